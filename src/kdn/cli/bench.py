"""`kdn bench …`: speed on this machine."""

import argparse
from pathlib import Path

from kdn.cli.arguments import command, stop, whole
from kdn.cli.loading import needs

__all__ = ["add"]


def add(commands: argparse._SubParsersAction) -> None:
    bench = command(
        commands,
        "bench",
        "measure speed on this machine",
        "Measure speed, always beside a peer in one process.",
    )
    benches = bench.add_subparsers(metavar="what", required=True)
    ops = command(
        benches,
        "ops",
        "the operations on the CPU, beside their peers",
        "Time the operations on the CPU, taking turns with what one would use instead: PyTorch's\n"
        "attention, transformers' chunk rule, and a layer's own four projections. Prints a table,\n"
        "saves it as ops.json and, where matplotlib is installed, ops.png. docs/benchmarks.md says\n"
        "what every column means.\n\n"
        "See that it runs, in seconds; then the whole table, which takes a while:\n\n"
        "    kdn bench ops --quick\n"
        "    kdn bench ops --threads 2 --out results",
    )
    ops.add_argument(
        "--quick", action="store_true", help="tiny sizes, few repeats: tests the table, not the speed"
    )
    ops.add_argument(
        "--out",
        default="kdn-bench",
        metavar="FOLDER",
        help="where ops.json and ops.png go (default: %(default)s)",
    )
    ops.add_argument(
        "--threads", type=whole(1), metavar="N", help="threads for all sides (default: torch's own)"
    )
    ops.add_argument(
        "--lengths", type=whole(1), nargs="+", metavar="T", help="sequence lengths (default: 512 … 32768)"
    )
    ops.add_argument(
        "--allocator",
        choices=["default", "raised", "both"],
        help="malloc as it is, or told to keep freed memory, which spares all sides the clearing of fresh "
        "pages (default: both, with --quick only as it is)",
    )
    ops.set_defaults(command=_ops, parser=ops)
    train = command(
        benches,
        "train",
        "training steps of a language model, beside a Llama of equal size",
        "Time training steps of whole models on this machine, taking turns in one process: Diagonal and\n"
        "Isotropic KDN, KDA, and transformers' Llama with PyTorch's attention, all with equally many\n"
        "parameters and the same step (bfloat16 autocast, clipping, AdamW). Saves train.json.\n\n"
        "    kdn bench train --scale tiny --lengths 256 --rounds 1\n"
        "    kdn bench train --scale 30m --lengths 4096 16384",
    )
    train.add_argument(
        "--scale", default="30m", metavar="SCALE", help="of the presets (default: %(default)s)"
    )
    train.add_argument(
        "--lengths",
        type=whole(1),
        nargs="+",
        default=[4096, 16384],
        metavar="T",
        help="tokens of the one sequence in a step (default: 4096 16384)",
    )
    train.add_argument(
        "--rounds", type=whole(1), default=5, metavar="N", help="steps of each side (default: %(default)s)"
    )
    train.add_argument(
        "--out", default="kdn-bench", metavar="FOLDER", help="where train.json goes (default: %(default)s)"
    )
    train.add_argument("--threads", type=whole(1), metavar="N", help="threads (default: torch's own)")
    train.set_defaults(command=_train, parser=train)


def _ops(options: argparse.Namespace) -> int:
    from kdn import bench

    return bench.main(
        quick=options.quick,
        out=options.out,
        threads=options.threads,
        lengths=options.lengths,
        allocator=options.allocator,
    )


def _train(options: argparse.Namespace) -> int:
    with needs("transformers"):
        from kdn.bench import train
    from kdn.models.presets import SCALES

    if options.scale not in SCALES:
        stop(f"--scale must be one of {', '.join(SCALES)}, got {options.scale!r}")
    return train.main(options.scale, options.lengths, options.rounds, Path(options.out), options.threads)
