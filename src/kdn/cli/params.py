"""`kdn params`: how large the models are."""

import argparse
import json
from pathlib import Path
from typing import Any

from kdn.cli.arguments import command, stop

__all__ = ["add"]

HEADS = (
    "model",
    "ffn width",
    "block parameters",
    "all parameters",
    "state/layer",
    "state bytes",
    "flops/token",
)
COUNTED = """
ffn width          inner width of the SwiGLU feed-forward parts, solved for the scale's number of block parameters
block parameters   of the stack of blocks, without embeddings, last norm and head: what "1.3b" and "750m" name
all parameters     with those
state/layer        numbers that one recurrent layer keeps per sequence: memory and uncertainty; not the few inputs
                   of its short convolutions, not Mamba-3's last token and angles, and not the keys and values
                   of attention layers
state bytes        of the whole model for one sequence, float32 states and, with attention, bfloat16 keys and values
                   of a full window
flops/token        forward, head included; two per weight, and those of the memories; gains are not counted"""


def add(commands: argparse._SubParsersAction) -> None:
    params = command(
        commands,
        "params",
        "how large the models are: parameters, states, arithmetic",
        "Count what a model by that name has, without building it: parameters, the state it keeps\n"
        "while it reads, and arithmetic per token. Without names: the rows of the paper's main table.\n\n"
        "    kdn params\n"
        "    kdn params --scale 750m\n"
        "    kdn params kdn-diagonal-1.3b kda-swa-1.3b --json params.json\n\n"
        "Names are <mixer>-<scale> and, for hybrids with attention in a window, <mixer>-swa-<scale>.",
    )
    params.add_argument("names", nargs="*", metavar="NAME", help="presets, such as kdn-isotropic-1.3b")
    params.add_argument("--scale", metavar="SCALE", help="only this scale: tiny, 30m, 125m, 750m or 1.3b")
    params.add_argument("--json", type=Path, metavar="FILE", help="write the table there as well")
    params.set_defaults(command=_params, parser=params)


def _params(options: argparse.Namespace) -> int:
    from kdn.cli.loading import make_folder, needs

    with needs("transformers"):
        from kdn.models.presets import parameter_table

    if options.json:
        make_folder(options.json.parent)
    try:
        table = parameter_table(_names(options.names, options.scale))
    except ValueError as error:
        stop(error)
    _print([[row.name, *(f"{number:,}" for number in row[1:])] for row in table])
    if options.json:
        rows: list[dict[str, Any]] = [row._asdict() for row in table]
        options.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
        print(f"\nsaved {options.json}")
    return 0


def _names(names: list[str], scale: str | None) -> list[str]:
    """The presets asked for; at a scale that the paper does not have, every mixer's."""
    from kdn.mixers import MIXERS
    from kdn.models.presets import PAPER, SCALES

    if scale is None:
        return names or list(PAPER)
    if scale not in SCALES:
        stop(f"no scale {scale!r}: there are {', '.join(SCALES)}")
    if names:
        return [name for name in names if name.endswith(f"-{scale}")] or stop(
            f"none of these has scale {scale}"
        )
    return [name for name in PAPER if name.endswith(f"-{scale}")] or [f"{mixer}-{scale}" for mixer in MIXERS]


def _print(cells: list[list[str]]) -> None:
    widths = [max(map(len, column)) for column in zip(HEADS, *cells, strict=True)]
    for line in [list(HEADS), *cells]:
        words = [f"{cell:>{width}}" for cell, width in zip(line[1:], widths[1:], strict=True)]
        print("  ".join([f"{line[0]:<{widths[0]}}", *words]))
    print(COUNTED)
