"""`kdn quickstart`: train two small models here, measure both, leave a report."""

import argparse
from pathlib import Path

from kdn.cli.arguments import command, stop

__all__ = ["add"]


def add(commands: argparse._SubParsersAction) -> None:
    quickstart = command(
        commands,
        "quickstart",
        "train two small models in minutes, and see them side by side",
        "Train a tokenizer and two small models of equal size, Diagonal KDN and KDA, on the sources of\n"
        "Python's standard library; measure both; leave one page, report.html, that shows it all.\n"
        "Needs no download and no GPU. It takes less than ten minutes on two cores:\n\n"
        "    kdn quickstart\n\n"
        "See that it runs, in half a minute (the models learn nothing in that time):\n\n"
        "    kdn quickstart --quick --out /tmp/quickstart",
    )
    quickstart.add_argument(
        "--out",
        type=Path,
        default=Path("quickstart"),
        metavar="FOLDER",
        help="where everything goes, an earlier quickstart there is replaced (default: %(default)s)",
    )
    quickstart.add_argument("--quick", action="store_true", help="tiny sizes: tests the way, not the models")
    quickstart.set_defaults(command=_quickstart, parser=quickstart)


def _quickstart(options: argparse.Namespace) -> int:
    try:
        from kdn.training.quickstart import run
    except ImportError as error:
        stop(f"this needs pip install 'kalman-delta-networks[train]' ({error})")
    from kdn.training.data import DataError

    try:
        run(options.out, quick=options.quick)
    except DataError as error:
        stop(error)
    return 0
