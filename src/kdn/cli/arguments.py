"""What the commands share in reading their arguments and answering mistakes."""

import argparse
import math
import sys
from collections.abc import Callable
from typing import NoReturn

__all__ = ["Parser", "command", "more_than_zero", "stop", "whole"]


class Parser(argparse.ArgumentParser):
    """Answers a mistake with the whole help text instead of the usage line."""

    def error(self, message: str) -> NoReturn:
        self.print_help(sys.stderr)
        self.exit(2, f"\n{self.prog}: {message}\n")


def stop(message: object) -> NoReturn:
    """End the command with one sentence about why, and exit status 1."""
    raise SystemExit(f"kdn: {message}")


def whole(least: int) -> Callable[[str], int]:
    """The type of an argument that is a whole number from `least` on."""

    def read(text: str) -> int:
        number = int(text) if text.isdecimal() else -1
        if number < least:
            raise argparse.ArgumentTypeError(f"must be a whole number ≥ {least}, got {text!r}")
        return number

    return read


def more_than_zero(text: str) -> float:
    """The type of an argument that is a number > 0."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number > 0, got {text!r}")
    return number


def command(commands: argparse._SubParsersAction, name: str, summary: str, text: str) -> Parser:
    formatter = argparse.RawDescriptionHelpFormatter
    added: Parser = commands.add_parser(name, help=summary, description=text, formatter_class=formatter)
    return added
