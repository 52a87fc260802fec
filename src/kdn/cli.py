"""The `kdn` command.

    kdn info         what is installed, and which backend computes on this machine
    kdn bench ops    how fast the operations are here, beside what one would use instead

Whatever takes long to import is imported inside the command that needs it: `kdn --help` answers at once.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

import kdn

__all__ = ["main"]


class _Parser(argparse.ArgumentParser):
    """Answers a mistake with the whole help text instead of the usage line."""

    def error(self, message: str) -> NoReturn:
        self.print_help(sys.stderr)
        self.exit(2, f"\n{self.prog}: {message}\n")


def _positive(text: str) -> int:
    number = int(text) if text.isdecimal() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number ≥ 1, got {text!r}")
    return number


def _command(commands: argparse._SubParsersAction, name: str, summary: str, text: str) -> _Parser:
    formatter = argparse.RawDescriptionHelpFormatter
    added: _Parser = commands.add_parser(name, help=summary, description=text, formatter_class=formatter)
    return added


def _parser() -> _Parser:
    parser = _Parser(
        prog="kdn",
        description="Kalman Delta Networks: linear attention whose memory knows what it does not know.",
        epilog="Every command explains itself: kdn bench ops --help",
    )
    parser.add_argument("--version", action="version", version=f"kdn {kdn.__version__}")
    commands = parser.add_subparsers(metavar="command", required=True)

    info = _command(
        commands,
        "info",
        "what is installed, and which backend computes here",
        "Versions, processor and threads; then every backend, best first: whether it serves this\n"
        "machine's devices, why not where it does not, and which one is used.\n\n"
        "KDN_BACKEND overrides the choice. To see what that does:\n\n"
        "    KDN_BACKEND=torch kdn info",
    )
    info.set_defaults(command=lambda options: _info(), parser=info)

    bench = _command(
        commands,
        "bench",
        "measure speed on this machine",
        "Measure speed, always beside a peer in one process.",
    )
    benches = bench.add_subparsers(metavar="what", required=True)
    ops = _command(
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
        "--threads", type=_positive, metavar="N", help="threads for all sides (default: torch's own)"
    )
    ops.add_argument(
        "--lengths", type=_positive, nargs="+", metavar="T", help="sequence lengths (default: 512 … 32768)"
    )
    ops.add_argument(
        "--allocator",
        choices=["default", "raised", "both"],
        help="malloc as it is, or told to keep freed memory, which spares all sides the clearing of fresh "
        "pages (default: both, with --quick only as it is)",
    )
    ops.set_defaults(command=_bench_ops, parser=ops)
    return parser


def _info() -> int:
    import torch

    from kdn.bench.machine import machine, versions

    print(" · ".join(f"{name} {version}" for name, version in versions().items()))
    here = machine()
    print(f"{here['cpu']}, {here['cores']} cores, torch uses {torch.get_num_threads()} threads")
    _print_backends("cpu")
    if torch.accelerator.is_available():
        _print_backends(str(torch.accelerator.current_accelerator()))
    return 0


def _print_backends(device: str) -> None:
    import torch

    from kdn.bench.machine import instruction_set
    from kdn.ops import backend_report
    from kdn.ops.registry import choose

    # The report is asked for without the override, so that a wrong one is explained and not raised.
    override = os.environ.pop("KDN_BACKEND", "")
    try:
        report = backend_report(device)
    finally:
        if override:
            os.environ["KDN_BACKEND"] = override
    print(f"\nbackends on {device}, best first")
    width = max(len(name) for name, _, _ in report)
    for name, why, default in report:
        said = f"no: {why}" if why else "default" if default else "serves"
        if not why and (compiled := instruction_set(name)):
            said += f", {compiled}"
        print(f"  {name:<{width}}  {said}")
    if not override:
        print("KDN_BACKEND is not set: the default is used")
        return
    try:
        choose(None, torch.device(device))
        print(f"KDN_BACKEND={override} overrides the default: {override} is used")
    except ValueError as error:
        print(f"{error}. Until KDN_BACKEND is corrected or unset, operations on {device} raise this")


def _bench_ops(options: argparse.Namespace) -> int:
    from kdn import bench

    return bench.main(
        quick=options.quick,
        out=options.out,
        threads=options.threads,
        lengths=options.lengths,
        allocator=options.allocator,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `kdn` with these arguments (None: the command line's) and return its exit status."""
    options, unknown = _parser().parse_known_args(arguments)
    if unknown:
        options.parser.error(f"unknown arguments: {' '.join(unknown)}")
    status: int = options.command(options)
    return status
