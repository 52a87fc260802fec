"""Effective writes: kᵀg, the share of the residual at its own key that a token's write removes.

Near 1 a token rewrites what the memory holds for its key, near 0 it is hardly heard.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from kdn.mixers.delta import DeltaMixer, Write
from kdn.mixers.kalman import KalmanMixer

__all__ = ["effective_writes", "gains_watched", "info_scale_set"]


@contextmanager
def gains_watched(model: nn.Module, seen: Callable[[int, Tensor], object]) -> Iterator[None]:
    """While open, `seen(layer_index, kᵀg [B, T, H])` is called whenever a delta-rule layer of `model` runs
    over more than one token."""
    watched = [m for m in model.modules() if isinstance(m, DeltaMixer)]
    before = [vars(m).get("gain") for m in watched]  # set where somebody else is watching already

    def watch(mixer: DeltaMixer) -> None:
        original = mixer.gain

        def gain(k: Tensor, w: Write, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
            found = original(k, w, *args, **kwargs)
            if w.erase is not None:
                with torch.no_grad():
                    seen(mixer.layer_index, (w.erase.float() * found[0].float()).sum(-1))
            return found

        mixer.gain = gain  # type: ignore[method-assign]

    try:
        for mixer in watched:
            watch(mixer)
        yield
    finally:
        for mixer, theirs in zip(watched, before, strict=True):
            vars(mixer).pop("gain", None)
            if theirs is not None:
                mixer.gain = theirs  # type: ignore[method-assign]


@contextmanager
def info_scale_set(model: nn.Module, info_scale: float | None) -> Iterator[None]:
    """While open, every KDN layer uses this information scale (None: as before); weights stay as they are."""
    if info_scale is None:
        yield
        return
    if not info_scale > 0:
        raise ValueError(f"info_scale must be > 0, got {info_scale}")
    kalman = [m for m in model.modules() if isinstance(m, KalmanMixer)]
    before = [m.info_scale for m in kalman]
    try:
        for mixer in kalman:
            mixer.info_scale = info_scale
        yield
    finally:
        for mixer, old in zip(kalman, before, strict=True):
            mixer.info_scale = old


@torch.no_grad()
def effective_writes(
    model: nn.Module,
    tokens: Tensor,
    *,
    info_scale: float | None = None,
    progress: Callable[[int, int], object] = lambda done, total: None,
) -> dict[int, Tensor]:
    """kᵀg of every delta-rule layer of a `KDNModel` or `KDNForCausalLM`: layer → [sequences, T, H], float32.

    tokens: [sequences, T] ids; one sequence is run at a time. info_scale: as in `info_scale_set`.
    """
    backbone = getattr(model, "model", model)
    found: dict[int, list[Tensor]] = {}
    with ExitStack() as open_:
        open_.enter_context(info_scale_set(model, info_scale))
        open_.enter_context(gains_watched(model, lambda i, x: found.setdefault(i, []).append(x.cpu())))
        for i, row in enumerate(tokens):
            progress(i, len(tokens))
            backbone(row[None].to(next(model.parameters()).device), use_cache=False)
        progress(len(tokens), len(tokens))
    return {layer: torch.cat(rows) for layer, rows in found.items()}
