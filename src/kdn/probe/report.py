"""What `kdn probe` finds out, as plain numbers: ready for JSON, and for the figures of figures.py.

distribution    effective writes → means and a histogram
probe_writes    those of a model, one for each information scale
by_token        what every layer's memory knows at every token of a text
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from kdn.mixers.kalman import KalmanMixer
from kdn.probe.writes import effective_writes

__all__ = ["BINS", "by_token", "default_scales", "distribution", "probe_writes", "scale_name"]

BINS = 100  # per unit of effective write


def default_scales(width: int) -> list[float]:
    """The paper's information scales for keys of this width: 1, √K, K, 4K."""
    return [1.0, math.sqrt(width), float(width), 4.0 * width]


def scale_name(info_scale: float, width: int) -> str:
    """An information scale as a reader wants it: a number, and what it is in terms of K."""
    known = {math.sqrt(width): "√K", float(width): "K", 4.0 * width: "4K"}
    names = [name for scale, name in known.items() if math.isclose(scale, info_scale, rel_tol=5e-3)]
    return f"μ = {info_scale:.4g}" + (f" = {names[0]}" if names and info_scale != 1 else "")


def distribution(writes: dict[int, Tensor]) -> dict[str, Any]:
    """Of `effective_writes`: the mean over all layers, heads and tokens, each layer's, and a histogram.

    counts[i] is how many lie in [i, i + 1) / BINS; the last bin also has what rounding put above it.
    """
    values = torch.stack([writes[layer] for layer in sorted(writes)]).double()
    top = 2 if values.max() > 1.001 else 1  # above 1 only where negative eigenvalues are allowed
    counts = (values * BINS).long().clamp(0, top * BINS - 1).flatten().bincount(minlength=top * BINS)
    return {
        "mean": values.mean().item(),
        "median": values.median().item(),
        "layers": {str(layer): writes[layer].double().mean().item() for layer in sorted(writes)},
        "bins_per_unit": BINS,
        "counts": counts.tolist(),
    }


def probe_writes(
    model: nn.Module,
    tokens: Tensor,
    scales: Sequence[float],
    label: str,
    progress: Callable[[int, int], object] = lambda done, total: None,
) -> list[dict[str, Any]]:
    """One distribution of effective writes per information scale; one alone, as the model is, if it has none.

    tokens: [sequences, T] ids. Empty if the model has no layer that erases anything before it writes.
    """
    kalman = [m for m in model.modules() if isinstance(m, KalmanMixer)]
    curves = []
    for scale in scales if kalman else [None]:
        writes = effective_writes(model, tokens, info_scale=scale, progress=progress)
        if not writes:
            return []
        name = label if scale is None else f"{label}, {scale_name(scale, kalman[0].head_dim)}"
        curves.append({"label": name, "info_scale": scale, **distribution(writes)})
    return curves


def by_token(model: nn.Module, ids: Sequence[int], tokens: Sequence[str]) -> dict[str, Any]:
    """Read variance, effective write and state norm of every layer at every token, averaged over heads.

    ids and tokens: a text as numbers and as what is written under the columns. Each result is a list of layers
    of lists of tokens, with None where a layer does not know it.
    """
    if len(ids) != len(tokens):
        raise ValueError(f"ids and tokens must be equally many, got {len(ids)} and {len(tokens)}")
    backbone = getattr(model, "model", model)
    device = next(model.parameters()).device
    with torch.no_grad():
        found = backbone(torch.tensor([list(ids)], device=device), use_cache=False, output_uncertainty=True)
    known = found.uncertainty._asdict()
    return {"tokens": list(tokens)} | {name: _numbers(x[:, 0].mean(-1)) for name, x in known.items()}


def _numbers(x: Tensor) -> list[list[float | None]]:
    return [[None if math.isnan(number) else number for number in row] for row in x.tolist()]
