"""`kdn bench …`: speed on this machine."""

import argparse

from kdn.cli.arguments import command, whole

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


def _ops(options: argparse.Namespace) -> int:
    from kdn import bench

    return bench.main(
        quick=options.quick,
        out=options.out,
        threads=options.threads,
        lengths=options.lengths,
        allocator=options.allocator,
    )
