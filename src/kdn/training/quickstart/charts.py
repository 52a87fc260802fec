"""Charts as SVG that stands in the page itself: sharp at any size, coloured by the page's style, light or dark.

    lines       curves with points
    densities   histograms, outlined or filled
    heat_map    rows of cells, pale to dark

A series is drawn in the colour of its CSS class: `kdn` or `kda`. Hovering over a point or cell shows its numbers.
"""

import math
from collections.abc import Callable, Sequence
from html import escape
from typing import NamedTuple

__all__ = ["Series", "densities", "heat_map", "lines"]

WIDTH, HEIGHT = 520, 300
LEFT, RIGHT, TOP, BOTTOM = 66, 14, 14, 46


class Series(NamedTuple):
    name: str
    style: str  # CSS class
    x: Sequence[float]
    y: Sequence[float]


class _Plane:
    """Numbers to places, and the axes."""

    def __init__(
        self,
        x: tuple[float, float],
        y: tuple[float, float],
        labels: tuple[str, str],
        logarithmic: bool = False,
    ) -> None:
        self.scale: Callable[[float], float] = math.log2 if logarithmic else float
        self.low, self.high = (self.scale(v) for v in x)
        self.y_low, self.y_high = y
        self.parts = [
            f'<text class="label" x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 8}" text-anchor="middle">'
            f"{escape(labels[0])}</text>",
            f'<text class="label" transform="translate(13 {(TOP + HEIGHT - BOTTOM) / 2}) rotate(-90)" '
            f'text-anchor="middle">{escape(labels[1])}</text>',
        ]

    def x(self, value: float) -> float:
        share = (self.scale(value) - self.low) / ((self.high - self.low) or 1)
        return LEFT + share * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        share = (value - self.y_low) / ((self.y_high - self.y_low) or 1)
        return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)

    def ticks(self, x: Sequence[float], y: Sequence[float], y_text: str = "{:g}") -> None:
        bottom = HEIGHT - BOTTOM
        for value in y:
            at = self.y(value)
            self.parts.append(
                f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>'
                f'<text class="tick" x="{LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">{y_text.format(value)}</text>'
            )
        for value in x:
            self.parts.append(
                f'<text class="tick" x="{self.x(value):.1f}" y="{bottom + 18}" text-anchor="middle">'
                f"{_short(value)}</text>"
            )

    def svg(self, title: str) -> str:
        return (
            f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">'
            f"{''.join(self.parts)}</svg>"
        )


def lines(
    title: str,
    series: Sequence[Series],
    labels: tuple[str, str],
    *,
    y: tuple[float, float] | None = None,
    logarithmic: bool = False,
    dots: bool = True,
    percent: bool = False,
    marks: Sequence[tuple[float, str]] = (),
) -> str:
    """Curves over one axis. marks: (x, text) of upright lines. logarithmic: x by powers of two, a tick each."""
    xs = sorted({value for s in series for value in s.x})
    ys = [value for s in series for value in s.y]
    y_range = y or _rounded(min(ys), max(ys))
    plane = _Plane((xs[0], xs[-1]), y_range, labels, logarithmic)
    plane.ticks(
        xs if logarithmic else _steps(xs[0], xs[-1]), _steps(*y_range), "{:.0%}" if percent else "{:g}"
    )
    for at, text in marks:
        place = plane.x(at)
        plane.parts.append(
            f'<line class="mark" x1="{place:.1f}" x2="{place:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>'
            f'<text class="tick" x="{place + 5:.1f}" y="{HEIGHT - BOTTOM - 8}">{escape(text)}</text>'
        )
    for s in series:
        places = [(plane.x(a), plane.y(b)) for a, b in zip(s.x, s.y, strict=True)]
        path = " ".join(f"{a:.1f},{b:.1f}" for a, b in places)
        plane.parts.append(f'<polyline class="curve {s.style}" points="{path}"/>')
        for (a, b), at, value in zip(places, s.x, s.y, strict=True):
            if dots:
                said = f"{value:.1%}" if percent else f"{value:.3f}"
                plane.parts.append(
                    f'<circle class="dot {s.style}" cx="{a:.1f}" cy="{b:.1f}" r="4.5">'
                    f"<title>{escape(s.name)}: {said} at {_short(at)}</title></circle>"
                )
    return plane.svg(title)


def densities(title: str, before: Sequence[Series], after: Sequence[Series], labels: tuple[str, str]) -> str:
    """Histograms over one axis: those before as dashed outlines, those after filled."""
    both = [*before, *after]
    top = max(value for s in both for value in s.y)
    plane = _Plane((0, max(s.x[-1] for s in both)), (0, top * 1.05), labels)
    plane.ticks([0, 0.25, 0.5, 0.75, 1], [])
    bottom = HEIGHT - BOTTOM
    plane.parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{bottom}" y2="{bottom}"/>')
    for s in both:
        path = " ".join(f"{plane.x(a):.1f},{plane.y(b):.1f}" for a, b in zip(s.x, s.y, strict=True))
        kind = "dashed" if s in before else "area"
        closed = f"{plane.x(s.x[0]):.1f},{bottom} {path} {plane.x(s.x[-1]):.1f},{bottom}"
        if kind == "area":
            plane.parts.append(f'<polygon class="area {s.style}" points="{closed}"/>')
        plane.parts.append(
            f'<polyline class="curve {kind} {s.style}" points="{path}"><title>{escape(s.name)}</title></polyline>'
        )
    return plane.svg(title)


def heat_map(title: str, rows: Sequence[tuple[str, Sequence[float]]], columns: Sequence[str]) -> str:
    """One row of cells per name, each row from its smallest number (pale) to its largest (dark)."""
    cell, height, left = 13, 30, 64
    width = left + cell * len(columns)
    parts = []
    for i, (name, values) in enumerate(rows):
        low, high = min(values), max(values)
        parts.append(
            f'<text class="tick" x="{left - 8}" y="{i * height + height / 2 + 4}" text-anchor="end">'
            f"{escape(name)}</text>"
        )
        for j, (column, value) in enumerate(zip(columns, values, strict=True)):
            share = (value - low) / ((high - low) or 1)
            parts.append(
                f'<rect class="heat" x="{left + j * cell}" y="{i * height}" width="{cell}" height="{height - 2}" '
                f'fill-opacity="{0.04 + 0.96 * share:.3f}"><title>{escape(column)}: {value:.4f}</title></rect>'
            )
    bottom = len(rows) * height
    for j, column in enumerate(columns):
        x, y = left + j * cell + cell / 2 + 3.5, bottom + 4
        parts.append(
            f'<text class="token" transform="translate({x} {y}) rotate(90)">{escape(column[:10])}</text>'
        )
    return (
        f'<svg class="wide" viewBox="0 0 {width} {bottom + 78}" width="{width}" height="{bottom + 78}" '
        f'role="img" aria-label="{escape(title)}">{"".join(parts)}</svg>'
    )


def _short(value: float) -> str:
    if value >= 1e6:
        return f"{value / 1e6:g}M"
    return f"{value / 1000:g}K" if value >= 10_000 else f"{value:,g}"


def _step(low: float, high: float) -> float:
    """A round number that goes some five times into what lies between."""
    rough = (high - low) / 5 or 1.0
    size = 10.0 ** math.floor(math.log10(rough))
    return next(m * size for m in (1, 2, 2.5, 5, 10) if m * size >= rough * 0.999)


def _steps(low: float, high: float) -> list[float]:
    """Round numbers from `low` to `high`."""
    step = _step(low, high)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(i * step, 10) for i in range(first, last + 1)]


def _rounded(low: float, high: float) -> tuple[float, float]:
    """A little more than from `low` to `high`, ending on round numbers."""
    step = _step(low, high)
    return math.floor(low / step) * step, math.ceil(high / step) * step
