"""Who takes part in the table: our backends, and what one would use instead.

A contender is a function of tensors that were prepared, in the layout it wants, before the clock starts.
Sequence shapes are ours, [B, T, H, K]; d = H·K is the width of the layer around them.
"""

import inspect
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kdn.ops import backend_report, decode, delta_memory, diagonal_gain, isotropic_gain

__all__ = ["KDN", "Contender", "Shape", "contenders", "decoders", "inputs"]

Tensors = dict[str, Tensor]
KDN = "diagonal KDN"  # the peers stand beside this one


class Shape(NamedTuple):
    batch: int
    time: int
    heads: int
    width: int  # K = V


@dataclass(frozen=True)
class Contender:
    """One way to compute one operation. `run` returns what gradients flow back from."""

    op: str
    name: str
    run: Callable[[Tensors], tuple[Tensor, ...]]
    prepare: Callable[[Tensors], Tensors]
    ours: bool = False
    memory: bool = False  # whether it computes the delta-rule memory, and so has its floor
    order: int = 1  # time grows as T to this power


def inputs(shape: Shape) -> Tensors:
    """What a layer hands to the operations, at random: unit keys, mild decay, noises of order one."""
    torch.manual_seed(0)
    full, per_head = tuple(shape), (shape.batch, shape.time, shape.heads)
    x = {
        "q": F.normalize(torch.randn(full), dim=-1),
        "k": F.normalize(torch.randn(full), dim=-1),
        "v": torch.randn(full),
        "log_decay": -0.1 * torch.rand(full),
        "process_noise": F.softplus(torch.randn(full)),
        "head_noise": F.softplus(torch.randn(per_head)),
        "obs_noise": 0.01 + F.softplus(torch.randn(per_head)),
        "beta": torch.rand(per_head),
    }
    x["head_decay"] = x["log_decay"][..., 0].contiguous()
    x["gain"] = x["beta"][..., None] * x["k"]
    return x


def _take(*names: str) -> Callable[[Tensors], Tensors]:
    return lambda x: {name: x[name] for name in names}


def our_backends() -> list[str]:
    """Those that serve the CPU, best first, without the one that is there to be right."""
    report = backend_report("cpu")
    return [name for name, why, _ in report if why is None and name != "reference"]


def contenders() -> tuple[list[Contender], list[str]]:
    """Everyone who computes whole sequences, and a notice for each peer that is not installed."""
    found = [entry for backend in our_backends() for entry in _ours(backend)]
    notices = []
    for peer in (_transformers, _attention, _projections):
        try:
            found.append(peer())
        except Exception as error:  # whatever a peer's import raises, the others are still measured
            notices.append(_skipped(peer, error))
    return found, notices


def _skipped(peer: Callable[..., Any], error: Exception) -> str:
    name = peer.__name__.strip("_").replace("_", " ")
    return f"skipped {name}: {type(error).__name__}: {str(error).partition(chr(10))[0]}"


def _ours(backend: str) -> list[Contender]:
    def gain(x: Tensors) -> Tensor:
        width = x["k"].shape[-1]
        arguments = x["k"], x["log_decay"], x["process_noise"], x["obs_noise"]
        return diagonal_gain(*arguments, info_scale=width, backend=backend)[0]

    def memory(x: Tensors, written: Tensor) -> tuple[Tensor]:
        return (delta_memory(x["q"], x["k"], x["v"], written, x["log_decay"], backend=backend)[0],)

    def isotropic(x: Tensors) -> tuple[Tensor]:
        width = x["k"].shape[-1]
        arguments = x["k"], x["log_decay"], x["head_noise"], x["obs_noise"]
        return memory(x, isotropic_gain(*arguments, info_scale=width, backend=backend)[0])

    qkv = "q", "k", "v", "log_decay"
    entries: list[tuple[str, Callable[[Tensors], tuple[Tensor, ...]], tuple[str, ...], bool]] = [
        (KDN, lambda x: memory(x, gain(x)), (*qkv, "process_noise", "obs_noise"), True),
        ("memory", lambda x: memory(x, x["gain"]), (*qkv, "gain"), True),
        ("diagonal gain", lambda x: (gain(x),), ("k", "log_decay", "process_noise", "obs_noise"), False),
        ("isotropic KDN", isotropic, (*qkv, "head_noise", "obs_noise"), True),
        ("KDA, fixed β", lambda x: memory(x, x["beta"][..., None] * x["k"]), (*qkv, "beta"), True),
    ]
    return [
        Contender(op, backend, run, _take(*names), ours=True, memory=writes)
        for op, run, names, writes in entries
    ]


def _modeling() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers.models.qwen3_next import modeling_qwen3_next
    return modeling_qwen3_next


def _transformers() -> Contender:
    """Gated DeltaNet: a fixed β and one decay per head."""
    # Undecorated: with flash-linear-attention installed the decorator would pick a GPU kernel.
    rule = inspect.unwrap(_modeling().torch_chunk_gated_delta_rule)
    return Contender(
        KDN,
        "transformers",
        lambda x: (rule(x["q"], x["k"], x["v"], x["head_decay"], x["beta"])[0],),
        _take("q", "k", "v", "head_decay", "beta"),
        memory=True,
    )


def _attention() -> Contender:
    def heads_first(x: Tensors) -> Tensors:
        return {name: x[name].transpose(1, 2).contiguous() for name in ("q", "k", "v")}

    return Contender(
        KDN,
        "SDPA",
        lambda x: (F.scaled_dot_product_attention(x["q"], x["k"], x["v"], is_causal=True),),
        heads_first,
        order=2,
    )


def _projections() -> Contender:
    """The layer's own four d × d products in bfloat16: what the operation is to be small beside."""

    def layer(x: Tensors) -> Tensors:
        tokens = x["v"].flatten(0, 1).flatten(1).to(torch.bfloat16)
        width = tokens.shape[-1]
        weights = {f"w{i}": (torch.randn(width, width) / width**0.5).to(torch.bfloat16) for i in range(4)}
        return {"x": tokens, **weights}

    return Contender(
        KDN, "4 projections", lambda x: tuple(F.linear(x["x"], x[f"w{i}"]) for i in range(4)), layer
    )


# --- Decoding: one token for each of B sequences. `run` leaves the new states where it found the old. ---


def decoders() -> tuple[list[Contender], list[str]]:
    """Everyone who continues sequences by one token; notices as in `contenders`."""
    found = [_our_step(backend) for backend in our_backends()]
    try:
        return [*found, _transformers_step()], []
    except Exception as error:
        return found, [_skipped(_transformers_step, error)]


def _with_state(*names: str, cov: bool) -> Callable[[Tensors], Tensors]:
    def prepare(x: Tensors) -> Tensors:
        batch, _, heads, width = x["k"].shape
        states = {"state": torch.zeros(batch, heads, width, width)}
        if cov:
            states["cov"] = torch.ones(batch, heads, width)
        return {name: x[name] for name in names} | states

    return prepare


def _our_step(backend: str) -> Contender:
    def step(x: Tensors) -> tuple[Tensor]:
        out = decode(
            x["q"],
            x["k"],
            x["v"],
            x["log_decay"],
            state=x["state"],
            kind="diagonal",
            process_noise=x["process_noise"],
            obs_noise=x["obs_noise"],
            info_scale=x["k"].shape[-1],
            cov=x["cov"],
            backend=backend,
        )
        return (out,)

    prepare = _with_state("q", "k", "v", "log_decay", "process_noise", "obs_noise", cov=True)
    return Contender(KDN, backend, step, prepare, ours=True, memory=True)


def _transformers_step() -> Contender:
    rule = inspect.unwrap(_modeling().torch_recurrent_gated_delta_rule)

    def step(x: Tensors) -> tuple[Tensor]:
        tokens = x["q"], x["k"], x["v"], x["head_decay"], x["beta"]
        out, x["state"] = rule(*tokens, initial_state=x["state"], output_final_state=True)
        return (out,)

    prepare = _with_state("q", "k", "v", "head_decay", "beta", cov=False)
    return Contender(KDN, "transformers", step, prepare, memory=True)
