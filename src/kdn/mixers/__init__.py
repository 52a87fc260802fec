"""The layers: one `nn.Module` per system, all called alike.

    mixer = make_mixer("kdn-diagonal", hidden_size=512, num_heads=4, head_dim=128)
    y, state = mixer(x, state=None, cu_seqlens=None)         x, y: [B, T, hidden_size]

`state` is a NamedTuple of tensors (None: the start) that a later call continues from; with `cu_seqlens`
several sequences lie one after another in x, B is 1, and states have one row per sequence.

    delta.py       the delta-rule family: linear attention, DeltaNet, Gated DeltaNet, KDA, GDN-2
    kalman.py      of that family, the KDNs
    mamba3.py      Mamba-3, SISO and MIMO
    attention.py   softmax attention with rotary embedding, optionally in a sliding window
    parts.py       what they are made of: linear layers, norms, short convolutions
"""

import difflib
import inspect
import math
from collections.abc import Iterator, Mapping
from types import NoneType
from typing import Any, get_args

from torch import nn

from kdn.mixers.attention import Attention, AttentionState
from kdn.mixers.delta import (
    GDN2,
    KDA,
    DeltaNet,
    DeltaState,
    GatedDeltaNet,
    LinearAttention,
)
from kdn.mixers.kalman import DiagonalKDN, ExactKDN, IsotropicKDN
from kdn.mixers.mamba3 import Mamba3MIMO, Mamba3SISO, Mamba3State

__all__ = [
    "GDN2",
    "KDA",
    "MIXERS",
    "Attention",
    "AttentionState",
    "DeltaNet",
    "DeltaState",
    "DiagonalKDN",
    "ExactKDN",
    "GatedDeltaNet",
    "IsotropicKDN",
    "LinearAttention",
    "Mamba3MIMO",
    "Mamba3SISO",
    "Mamba3State",
    "make_mixer",
    "mixer_options",
]

MIXERS: dict[str, type[nn.Module]] = {
    "kdn-diagonal": DiagonalKDN,
    "kdn-isotropic": IsotropicKDN,
    "kdn-exact": ExactKDN,
    "kda": KDA,
    "gdn2": GDN2,
    "gated-deltanet": GatedDeltaNet,
    "deltanet": DeltaNet,
    "linear-attention": LinearAttention,
    "mamba3-siso": Mamba3SISO,
    "mamba3-mimo": Mamba3MIMO,
    "attention": Attention,
}


def mixer_class(name: str) -> type[nn.Module]:
    """The class of a mixer's name; a wrong name is answered with the nearest right one."""
    if name in MIXERS:
        return MIXERS[name]
    near = difflib.get_close_matches(str(name), MIXERS, 1, 0.5)
    hint = f", did you mean {near[0]!r}?" if near else ""
    raise ValueError(f"mixer must be one of {', '.join(MIXERS)}, got {name!r}{hint}")


def _option_parameters(name: str) -> Iterator[inspect.Parameter]:
    """The keyword arguments of a mixer's class and of those it derives from, its own last."""
    for cls in reversed(mixer_class(name).__mro__):
        if cls in (object, nn.Module) or "__init__" not in vars(cls):
            continue
        for parameter in inspect.signature(vars(cls)["__init__"]).parameters.values():
            if parameter.kind is parameter.KEYWORD_ONLY and parameter.name != "layer_index":
                yield parameter


def mixer_options(name: str) -> dict[str, Any]:
    """The options of a mixer beside its sizes, with their defaults."""
    return {parameter.name: parameter.default for parameter in _option_parameters(name)}


_KINDS = {
    bool: "True or False",
    int: "a whole number",
    float: "a finite number",
    str: "a text",
    NoneType: "None",
}


def _is_kind(value: object, kind: type) -> bool:
    if kind is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))


def check_option_types(name: str, options: Mapping[str, Any]) -> None:
    """ValueError for the first option that is not of the kind its mixer declares, as a config file may have it."""
    for parameter in _option_parameters(name):
        kinds = get_args(parameter.annotation) or (parameter.annotation,)
        value = options.get(parameter.name, parameter.default)
        if not any(_is_kind(value, kind) for kind in kinds):
            wanted = " or ".join(_KINDS[kind] for kind in kinds)
            raise ValueError(f"{parameter.name} must be {wanted}, got {value!r}")


def make_mixer(
    name: str, hidden_size: int, num_heads: int, head_dim: int, *, layer_index: int = 0, **options: Any
) -> nn.Module:
    """The mixer of that name; an option it does not have is an error that lists those it has."""
    cls, known = mixer_class(name), mixer_options(name)
    for option in options:
        if option not in known:
            raise TypeError(f"{name} has no option {option!r}, it has {', '.join(sorted(known)) or 'none'}")
    for size, value in {"hidden_size": hidden_size, "num_heads": num_heads, "head_dim": head_dim}.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{size} must be a whole number ≥ 1, got {value!r}")
    check_option_types(name, options)
    return cls(hidden_size, num_heads, head_dim, layer_index=layer_index, **options)
