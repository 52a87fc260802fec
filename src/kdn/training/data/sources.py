"""Where text comes from: documents, one string each, in an order that never changes.

    owner/name            a dataset of the Hugging Face hub, streamed
    FILE.parquet          row group by row group
    FILE.jsonl            one JSON object a line (.json too); .gz and .zst are read as they are
    any other FILE        plain UTF-8 text: one document, or one per paragraph with `blank_lines`; .gz and .zst too
    FOLDER                every file in it that is not hidden, by path
    stdlib                Python's standard library on this machine: sources, and what builtins say of themselves

Empty documents are left out. What cannot be read stops with a `DataError` that names the place.
"""

import builtins
import inspect
import io
import json
import re
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, BinaryIO

from kdn.training.data import DataError

__all__ = ["STDLIB", "Source"]

STDLIB = "stdlib"
COMPRESSED = (".gz", ".zst")
# Folders of the standard library that are tests, not part of it, or come with its tools.
NOT_LIBRARY = {"__pycache__", "dist-packages", "idle_test", "site-packages", "test", "tests"}


@dataclass(frozen=True)
class Source:
    """Documents by the name of where they are.

    column: which column (parquet, Hugging Face) or key (JSONL) holds the text.
    config, split: of a Hugging Face dataset; split None is "train".
    blank_lines: plain text files hold one document per paragraph, not one in all.
    """

    name: str
    column: str = "text"
    config: str | None = None
    split: str | None = None
    blank_lines: bool = False

    def documents(self) -> Iterator[str]:
        """All documents that are not empty, in order. Iterating again gives the same ones."""
        return (text for text in self._all() if text.strip())

    def _all(self) -> Iterator[str]:
        path = Path(self.name)
        local = self.name == STDLIB or path.exists()
        if local and (self.config or self.split):
            raise DataError(
                f"config and split belong to Hugging Face datasets, {self.name} is on this machine"
            )
        if self.name == STDLIB:
            return _stdlib()
        if path.is_dir():
            return self._folder(path)
        if path.exists():
            return self._file(path)
        if re.fullmatch(r"\w[\w.-]*/[\w.-]+", self.name) and path.suffix not in (
            ".parquet",
            ".jsonl",
            ".txt",
        ):
            return self._hub()
        raise DataError(
            f"there is no file or folder {self.name}; a Hugging Face dataset is spelt owner/name, "
            f"and {STDLIB!r} is Python's own library"
        )

    def _folder(self, folder: Path) -> Iterator[str]:
        inside = ((p, p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())
        files = [p for p, r in sorted(inside, key=_by_path) if not any(x.startswith(".") for x in r.parts)]
        if not files:
            raise DataError(f"folder {folder} holds no files")
        for path in files:
            yield from self._file(path)

    def _file(self, path: Path) -> Iterator[str]:
        kind = next((s for s in reversed(path.suffixes) if s not in COMPRESSED), "")
        if kind == ".parquet":
            found = _parquet(path, self.column)
        elif kind in (".jsonl", ".json"):
            found = _jsonl(path, self.column)
        else:
            found = _plain(path, self.blank_lines)
        empty = True
        for text in found:
            empty = empty and not text.strip()
            yield text
        if empty:
            raise DataError(f"{path} is empty: there is no text in it")

    def _hub(self) -> Iterator[str]:
        from datasets import load_dataset

        # What can go wrong on the way to the hub is an open set of exceptions of several HTTP libraries.
        where = f"dataset {self.name}"
        try:
            rows = iter(load_dataset(self.name, self.config, split=self.split or "train", streaming=True))
        except Exception as error:
            raise DataError(f"{where} cannot be opened: {_first_line(error)}") from error
        number = 0
        while True:
            try:
                row = next(rows)
            except StopIteration:
                return
            except Exception as error:
                raise DataError(f"{where}, row {number}, cannot be read: {_first_line(error)}") from error
            yield _text(row, self.column, f"{where}, row {number}")
            number += 1


def _by_path(found: tuple[Path, Path]) -> str:
    """Names compare the same on every system."""
    return found[1].as_posix()


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def _text(row: dict[str, Any], column: str, where: str) -> str:
    """row[column]; a missing value is an empty document."""
    if column not in row:
        raise DataError(
            f"{where}: there is no column {column!r}, there are {', '.join(sorted(row)) or 'none'}"
        )
    text = row[column]
    if text is None:
        return ""
    if not isinstance(text, str):
        raise DataError(f"{where}: column {column!r} holds {type(text).__name__}, not text")
    # JSON can spell halves of a surrogate pair; they are no characters and have no bytes.
    if any("\ud800" <= c <= "\udfff" for c in text) if not text.isascii() else False:
        raise DataError(f"{where}: column {column!r} holds half of a surrogate pair, which is no character")
    return text


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """(number from 1, line with its end) of a UTF-8 file, decompressed."""
    byte = 0
    try:
        with _opened(path) as file:
            for number, line in enumerate(file, 1):
                try:
                    yield number, line.decode("utf-8-sig" if number == 1 else "utf-8")
                except UnicodeDecodeError as error:
                    raise DataError(
                        f"{path}, line {number}: byte {byte + error.start} of the file is not UTF-8"
                    ) from None
                byte += len(line)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or _first_line(error)}") from error


def _opened(path: Path) -> BinaryIO:
    if path.suffix not in COMPRESSED:
        return open(path, "rb")
    import pyarrow

    packed = {".gz": "gzip", ".zst": "zstd"}[path.suffix]
    return io.BufferedReader(pyarrow.input_stream(str(path), compression=packed))


def _plain(path: Path, blank_lines: bool) -> Iterator[str]:
    gathered: list[str] = []
    for _, line in _lines(path):
        if blank_lines and not line.strip():
            yield "".join(gathered)
            gathered.clear()
        else:
            gathered.append(line)
    yield "".join(gathered)


def _jsonl(path: Path, column: str) -> Iterator[str]:
    for number, line in _lines(path):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            row = json.loads(line)
        except ValueError as error:
            raise DataError(f"{where} is not JSON: {error}") from None
        if not isinstance(row, dict):
            raise DataError(f"{where} is not a JSON object with keys but {type(row).__name__}")
        yield _text(row, column, where)


def _parquet(path: Path, column: str) -> Iterator[str]:
    import pyarrow
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            if column not in names:
                raise DataError(
                    f"{path}: there is no column {column!r}, there are {', '.join(names) or 'none'}"
                )
            number = 0
            for rows in file.iter_batches(batch_size=1024, columns=[column]):
                for value in rows.column(0):
                    yield _text({column: value.as_py()}, column, f"{path}, row {number}")
                    number += 1
    except UnicodeDecodeError:
        raise DataError(f"{path}, row {number}: column {column!r} is not UTF-8") from None
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path} is not a readable parquet file: {_first_line(error)}") from error


def _stdlib() -> Iterator[str]:
    root = Path(sysconfig.get_paths()["stdlib"])
    found = sorted(((p, p.relative_to(root)) for p in root.rglob("*.py")), key=_by_path)
    for path, relative in found:
        if NOT_LIBRARY.isdisjoint(relative.parts):
            try:
                yield path.read_text("utf-8")
            except UnicodeDecodeError:
                continue  # a few are in other encodings, to test those
    # Modules written in C have no source there, but describe what they hold.
    for name in sorted(sys.builtin_module_names):
        module = builtins if name == "builtins" else import_module(name)
        yield "\n\n".join(_described(name, module))


def _described(name: str, thing: Any) -> Iterator[str]:
    for member, value in sorted(vars(thing).items()):
        text = getattr(value, "__doc__", None)
        if member.startswith("__") or not isinstance(text, str) or not callable(value):
            continue
        yield f"{name}.{member}\n{inspect.cleandoc(text)}"
        if inspect.isclass(value) and not inspect.isclass(thing):
            yield from _described(f"{name}.{member}", value)
