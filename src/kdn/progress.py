"""A progress bar for whatever takes long: on stderr, and only where that is a terminal.

    with progress(len(rows), "reading") as bar:
        for row in rows:
            read(row)
            bar.advance()

With `rich` installed it is a bar with the time left, otherwise one line that rewrites itself.
"""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["Bar", "progress"]


class Bar:
    """How far something is. This one shows nothing."""

    def advance(self, steps: int = 1, note: str = "") -> None:
        """`steps` more are done; `note` stands behind the bar until the next one."""


class _Line(Bar):
    def __init__(self, total: int | None, text: str) -> None:
        self.total, self.text, self.done, self.start = total, text, 0, time.monotonic()
        self._show("")

    def advance(self, steps: int = 1, note: str = "") -> None:
        self.done += steps
        self._show(note)

    def _show(self, note: str) -> None:
        left, of = "", f" of {self.total:,}" if self.total else ""
        if self.done and self.total:
            seconds = (time.monotonic() - self.start) * (self.total - self.done) / self.done
            left = f", {_clock(seconds)} left"
        said = f"{self.text}: {self.done:,}{of}{left} {note}".rstrip()
        print(f"\r\x1b[K{said}", end="", file=sys.stderr, flush=True)


class _Rich(Bar):
    def __init__(self, shown: Any, task: Any) -> None:
        self.shown, self.task = shown, task

    def advance(self, steps: int = 1, note: str = "") -> None:
        self.shown.update(self.task, advance=steps, note=note)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


@contextmanager
def progress(total: int | None, text: str) -> Iterator[Bar]:
    """Show how much of `total` is done; gone when the block ends. None: nobody knows the total."""
    if not sys.stderr.isatty():
        yield Bar()
        return
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
    except ImportError:
        try:
            yield _Line(total, text)
        finally:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
        return
    plain = TextColumn("{task.description}", markup=False)
    columns = (
        plain,
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as shown:
        yield _Rich(shown, shown.add_task(text, total=total, note=""))
