"""The table as text, as JSON and as a plot. What its columns mean stands in docs/benchmarks.md."""

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kdn.bench.machine import machine, versions

__all__ = ["result", "save", "text"]

# Colours that colour-blind readers can tell apart (Okabe and Ito), ours first.
_COLOURS = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
_PLOTTED = "diagonal KDN"


def result(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """All that is saved: the runs, one for each allocator mode, and what they ran on."""
    date = datetime.now(UTC).isoformat(timespec="seconds")
    return {"date": date, "machine": machine(), "versions": versions(), "runs": list(runs)}


def text(result: dict[str, Any]) -> str:
    """The whole report for a terminal."""
    here = result["machine"]
    lines = [
        " · ".join(f"{name} {version}" for name, version in result["versions"].items()),
        f"{here['cpu']}, {here['cores']} cores, {here['system']}, {result['date']}",
    ]
    for run in result["runs"]:
        peak, copy = run["peak"], run["copy"]
        kept = "freed memory kept" if run["allocator"] == "raised" else "as it is"
        lines += [
            "",
            f"malloc {kept} ({run['allocator']}), {run['threads']} threads"
            + (f", {run['instruction_set']}" if run["instruction_set"] else ""),
            f"FMA peak {peak['flops_per_thread'] / 1e9:.1f} Gflop/s per thread ({peak['by']}), "
            f"copy {copy['bytes_per_second'] / 1e9:.1f} GB/s read and written",
            "",
            *_table(run["rows"]),
            *(f"notice: {notice}" for notice in run["notices"]),
        ]
    return "\n".join(lines)


def _table(rows: list[dict[str, Any]]) -> list[str]:
    head = ["op", "pass", "shape", "who", "ms", "ratio", "% of floor", "faults"]
    cells = [_cells(row) for row in _grouped(rows)]
    widths = [max(map(len, column)) for column in zip(head, *cells, strict=True)]
    lines, before = [], None
    for line in [head, *cells]:
        if before not in (None, line[:2]):
            lines.append("")
        before = line[:2]
        words = [
            f"{cell:<{width}}" if column < 4 else f"{cell:>{width}}"
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        lines.append("  ".join(words).rstrip())
    return [*lines, ""]


def _grouped(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Operation by operation and pass by pass, everything else as it was measured."""
    ops = list(dict.fromkeys(row["op"] for row in rows))
    passes = list(dict.fromkeys(row["pass"] for row in rows))
    return sorted(
        rows, key=lambda row: (ops.index(row["op"]), passes.index(row["pass"]), *row["shape"].values())
    )


def _cells(row: dict[str, Any]) -> list[str]:
    shape, percent = row["shape"], row["percent_of_floor"]
    where = f"B={shape['B']}" if row["pass"] == "decode" else f"T={shape['T']}"
    milliseconds = f"{row['ms']:.3f}" if row["ms"] < 10 else f"{row['ms']:.1f}"
    return [
        row["op"],
        row["pass"],
        f"{where} H={shape['H']} K=V={shape['K']}",
        row["who"],
        milliseconds,
        f"{row['ratio']:.2f}",
        "–" if percent is None else f"{percent:.0f}",
        f"{row['faults']:.0f}",
    ]


def save(result: dict[str, Any], folder: Path) -> list[str]:
    """Write ops.json and ops.png into `folder`; returns a line about each."""
    table, picture = folder / "ops.json", folder / "ops.png"
    table.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    try:
        _plot(result, picture)
    except ImportError:
        return [f"saved {table}", "notice: no plot, matplotlib is not installed: pip install matplotlib"]
    return [f"saved {table}", f"saved {picture}"]


def _plot(result: dict[str, Any], file: Path) -> None:
    """Time against length on logarithmic axes; one row of panels for each allocator mode."""
    from matplotlib.figure import Figure

    passes, runs = ("forward", "forward+backward"), result["runs"]
    figure = Figure(figsize=(10, 4.2 * len(runs)), layout="constrained")
    panels = figure.subplots(len(runs), len(passes), squeeze=False)
    for run, line in zip(runs, panels, strict=True):
        for part, panel in zip(passes, line, strict=True):
            rows = [row for row in run["rows"] if row["op"] == _PLOTTED and row["pass"] == part]
            names = dict.fromkeys(row["who"] for row in rows)
            for colour, name in zip(_COLOURS * len(names), names, strict=False):
                points = [row for row in rows if row["who"] == name]
                lengths = [row["shape"]["T"] for row in points]
                times = [row["ms"] for row in points]
                label = f"{_PLOTTED}, {name}" if points[0]["ours"] else name
                panel.plot(lengths, times, marker="o", markersize=4, color=colour, label=label)
            floors = {row["shape"]["T"]: row["floor_ms"] for row in rows if row["floor_ms"] is not None}
            panel.plot(list(floors), list(floors.values()), "--", color="0.5", label="floor")
            panel.set_xscale("log", base=2)
            panel.set_yscale("log")
            ticks = sorted({row["shape"]["T"] for row in rows})
            panel.set_xticks(ticks, [str(tick) for tick in ticks])
            panel.set_xlabel("sequence length T")
            panel.set_ylabel("milliseconds")
            panel.set_title(f"{part}, {run['threads']} threads, malloc {run['allocator']}")
            panel.grid(alpha=0.3)
            panel.legend(fontsize=8)
    figure.savefig(file, dpi=150)
