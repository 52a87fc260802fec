"""Models by name: the paper's sizes and small ones, with feed-forward widths that make them comparable.

    <mixer>-<scale>        kdn-diagonal-750m, kda-tiny, mamba3-mimo-1.3b; transformer: attention-1.3b
    <mixer>-swa-<scale>    the hybrids: that mixer and attention in a window of 2,048, alternating

A scale fixes layers, width, heads and the number of parameters in the stack of blocks (embeddings and head
are not counted). The feed-forward width of each preset is the whole number that comes nearest to it.
"""

import difflib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from kdn.mixers import MIXERS
from kdn.models.config import KDNConfig
from kdn.models.modeling import KDNForCausalLM

__all__ = ["PAPER", "SCALES", "Scale", "parameter_table", "preset", "preset_names"]


class Scale(NamedTuple):
    layers: int
    hidden: int
    heads: int
    head_dim: int
    blocks: int  # parameters of the stack of blocks
    vocabulary: int = 32000
    tied: bool = False
    window: int = 2048


SCALES = {
    "tiny": Scale(2, 64, 2, 32, 150_000, 512, True, 64),
    "30m": Scale(8, 512, 4, 128, 30_000_000, tied=True),
    "125m": Scale(12, 768, 6, 128, 100_000_000, tied=True),  # 125 million with the embeddings
    "750m": Scale(16, 2048, 16, 128, 750_000_000),
    "1.3b": Scale(18, 2304, 18, 128, 1_302_390_288),
}

_RECURRENT = ("kda", "mamba3-siso", "mamba3-mimo", "gdn2", "kdn-isotropic", "kdn-diagonal")
# The rows of the paper's main table.
PAPER = (
    *(f"{mixer}-750m" for mixer in ("deltanet", "gated-deltanet", *_RECURRENT)),
    *(f"{mixer}-1.3b" for mixer in _RECURRENT),
    "attention-1.3b",
    *(f"{mixer}-swa-1.3b" for mixer in _RECURRENT),
)


def preset_names() -> Iterator[str]:
    for scale in SCALES:
        for mixer in MIXERS:
            yield f"{mixer}-{scale}"
            if mixer != "attention":
                yield f"{mixer}-swa-{scale}"


def preset(name: str, **changes: Any) -> KDNConfig:
    """The configuration of that name; `changes` are fields to change, after widths are solved."""
    mixer, _, size = name.rpartition("-")
    hybrid = mixer.endswith("-swa")
    mixer = mixer.removesuffix("-swa")
    if size not in SCALES or mixer not in MIXERS or (hybrid and mixer == "attention"):
        near = difflib.get_close_matches(name, list(preset_names()), 1, 0.5)
        hint = f", did you mean {near[0]!r}?" if near else ""
        raise ValueError(
            f"no preset {name!r}: write <mixer>-<scale> or <mixer>-swa-<scale>, scales are "
            f"{', '.join(SCALES)}{hint}"
        )
    scale = SCALES[size]
    layers = [mixer, "attention"] * (scale.layers // 2) if hybrid else [mixer] * scale.layers
    fields: dict[str, Any] = {
        "mixer": mixer,
        "layers": layers if hybrid else None,
        "num_hidden_layers": scale.layers,
        "vocab_size": scale.vocabulary,
        "hidden_size": scale.hidden,
        "num_heads": scale.heads,
        "head_dim": scale.head_dim,
        "window": scale.window if "attention" in layers else None,
        "tie_word_embeddings": scale.tied,
    }
    return KDNConfig(**(fields | {"intermediate_size": _width(KDNConfig(**fields), scale.blocks)} | changes))


def _mixer_parameters(config: KDNConfig) -> int:
    """Parameters of all layers' mixers."""
    counts: dict[str, int] = {}
    with torch.device("meta"):
        for i, name in enumerate(config.mixers):
            if name not in counts:
                counts[name] = sum(p.numel() for p in config.make_mixer(i).parameters())
    return sum(counts[name] for name in config.mixers)


def _width(config: KDNConfig, blocks: int) -> int:
    """The feed-forward width with which the stack of blocks has as nearly as possible `blocks` parameters."""
    layers, width = config.num_hidden_layers, config.hidden_size
    rest = blocks - _mixer_parameters(config) - 2 * width * layers
    return max(1, round(rest / (3 * width * layers)))


class Count(NamedTuple):
    """One row of `kdn params`."""

    name: str
    intermediate: int
    blocks: int  # parameters of the stack
    total: int  # with embeddings, last norm and head
    state: int  # numbers of recurrent state in a layer, averaged over layers that have one
    state_bytes: int  # of the whole model for one sequence, as it is kept: float32 states, bfloat16 keys
    flops: int  # forward, per token, head included


def count(name: str) -> Count:
    config = preset(name)
    with torch.device("meta"):
        model = KDNForCausalLM(config)
    blocks = sum(p.numel() for p in model.model.layers.parameters())
    mixers: list[Any] = [layer.mixer for layer in model.model.layers]
    recurrent = [m.state_size() for m, kind in zip(mixers, config.mixers, strict=True) if kind != "attention"]
    held = sum(
        m.state_size() * (2 if kind == "attention" else 4)
        for m, kind in zip(mixers, config.mixers, strict=True)
    )
    matrices = sum(p.numel() for p in model.model.layers.parameters() if p.ndim == 2)
    head = config.vocab_size * config.hidden_size
    return Count(
        name,
        config.intermediate_size,
        blocks,
        sum(p.numel() for p in model.parameters()),
        sum(recurrent) // len(recurrent) if recurrent else 0,
        held,
        2 * (matrices + head) + sum(m.flops_per_token() for m in mixers),
    )


def parameter_table(names: list[str] | None = None) -> list[Count]:
    """One row per preset; by default those of the paper's main table."""
    return [count(name) for name in (names or PAPER)]
