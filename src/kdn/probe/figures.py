"""Figures of what a memory knows. They take plain data, as report.py makes it and JSON keeps it.

    write_figure      how effective writes are distributed: one curve per model or information scale
    token_figure      read variance, effective write and state norm over layers and tokens

Both return matplotlib's Figure and, given a file, save it. No window system is needed.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = ["token_figure", "write_figure"]

# Colours that colour-blind readers can tell apart (Okabe and Ito); grey is for what one compares with.
_COLOURS = ("#0072B2", "#009E73", "#E69F00", "#D55E00", "#CC79A7", "#56B4E9")
_GREY = "0.55"
_LABELLED = 80  # tokens that can be written side by side
_PANELS = {
    "read_variance": ("read variance τ² qᵀPq: how unsure the memory is of what it answers", "cividis"),
    "effective_write": ("effective write kᵀg: how much of the old answer a token replaces", "viridis"),
    "state_norm": ("state norm ‖S‖: how much the memory holds", "bone_r"),
}


def write_figure(panels: Sequence[dict[str, Any]], file: Path | str | None = None) -> Any:
    """Densities of effective writes, one panel under the other with one axis.

    panels: each {"title": …, "curves": […]}; curves as `probe_writes` gives them. A curve without information
    scale is one to compare with: grey.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.4, 0.5 + 2.9 * len(panels)), layout="constrained")
    axes = figure.subplots(len(panels), 1, squeeze=False, sharex=True)[:, 0]
    end = max(len(c["counts"]) / c["bins_per_unit"] for panel in panels for c in panel["curves"])
    for axis, panel in zip(axes, panels, strict=True):
        _densities(axis, panel["curves"])
        axis.set_title(panel["title"], loc="left", fontsize=11)
        axis.set_ylabel("density")
        axis.set_xlim(0, end)
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(fontsize=9, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    axes[-1].set_xlabel("effective write kᵀg")
    if file is not None:
        figure.savefig(file, dpi=150)
    return figure


def _densities(axis: Any, curves: Sequence[dict[str, Any]]) -> None:
    scaled = [curve for curve in curves if curve["info_scale"] is not None]
    plain = [curve for curve in curves if curve["info_scale"] is None]
    colours = [(_COLOURS[i % len(_COLOURS)], curve) for i, curve in enumerate(scaled)]
    if not scaled and plain:  # nothing to compare with: the first is the subject
        colours, plain = [(_COLOURS[0], plain[0])], plain[1:]
    for colour, curve in [(_GREY, curve) for curve in plain] + colours:
        counts, bins = curve["counts"], curve["bins_per_unit"]
        total = sum(counts)
        edges = [i / bins for i in range(len(counts) + 1)]
        label = f"{curve['label']}\nmean {curve['mean']:.3f}"
        density = [bins * count / total for count in counts]
        axis.stairs(density, edges, fill=True, color=colour, alpha=0.15, linewidth=0)
        axis.stairs(density, edges, color=colour, linewidth=1.4, label=label)
        axis.axvline(curve["mean"], color=colour, linewidth=1, linestyle=(0, (4, 3)))


def token_figure(data: dict[str, Any], file: Path | str | None = None, title: str = "") -> Any:
    """Heat maps over layers and tokens: read variance, effective write, state norm. data: as `by_token`."""
    from matplotlib.figure import Figure

    tokens = data["tokens"]
    layers = len(data["effective_write"])
    width = min(max(7.0, 2.0 + 0.19 * len(tokens)), 18.0)
    figure = Figure(figsize=(width, 1.2 + 3 * (0.65 + 0.13 * max(layers, 6))), layout="constrained")
    if title:
        figure.suptitle(title, fontsize=11)
    axes = figure.subplots(len(_PANELS), 1, sharex=True)
    for axis, (name, (text, colours)) in zip(axes, _PANELS.items(), strict=True):
        rows = [[float("nan") if x is None else x for x in row] for row in data[name]]
        axis.set_title(text, loc="left", fontsize=10)
        axis.set_facecolor("0.9")  # shows through where a layer does not know
        limits = {"vmin": 0, "vmax": 1} if name == "effective_write" else {}
        image = axis.imshow(rows, aspect="auto", interpolation="nearest", cmap=colours, **limits)
        figure.colorbar(image, ax=axis, pad=0.01, fraction=0.03)
        axis.set_ylabel("layer")
        step = max(1, layers // 8)
        axis.set_yticks(range(0, layers, step), range(0, layers, step))
    if len(tokens) <= _LABELLED:
        axes[-1].set_xticks(range(len(tokens)), [_shown(t) for t in tokens], rotation=90, fontsize=8)
    axes[-1].set_xlabel("token")
    if file is not None:
        figure.savefig(file, dpi=150)
    return figure


def _shown(token: str) -> str:
    """A token as a label: spaces and line ends visible, and no $, which starts a formula."""
    return token.replace("\n", "↵").replace("\t", "→").replace(" ", "␣").replace("$", r"\$")
