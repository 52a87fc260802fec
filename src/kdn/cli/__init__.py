"""The `kdn` command.

    kdn quickstart   train two small models in minutes, and see them side by side
    kdn info         what is installed, and which backend computes on this machine
    kdn params       how large the models are: parameters, states, arithmetic
    kdn data         text to token shards, which training reads
    kdn train        train the model of a recipe, or go on where it was stopped
    kdn generate     go on with a text
    kdn probe        how strongly a memory writes, and what it is unsure of
    kdn bench ops    how fast the operations are here, beside what one would use instead

One module per command. Whatever takes long to import is imported inside the command that needs it:
`kdn --help` answers at once.
"""

import sys
from collections.abc import Sequence

import kdn
from kdn.cli import bench, data, generate, info, params, probe, quickstart, train
from kdn.cli.arguments import Parser

__all__ = ["main"]


def _parser() -> Parser:
    parser = Parser(
        prog="kdn",
        description="Kalman Delta Networks: linear attention whose memory knows what it does not know.",
        epilog="Every command explains itself: kdn generate --help",
    )
    parser.add_argument("--version", action="version", version=f"kdn {kdn.__version__}")
    commands = parser.add_subparsers(metavar="command", required=True)
    for module in (quickstart, info, params, data, train, generate, probe, bench):
        module.add(commands)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `kdn` with these arguments (None: the command line's) and return its exit status."""
    options, unknown = _parser().parse_known_args(arguments)
    if unknown:
        options.parser.error(f"unknown arguments: {' '.join(unknown)}")
    try:
        status: int = options.command(options)
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130  # as shells report a command that was interrupted
    return status
