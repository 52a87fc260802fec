"""Tokens on disk, read through memory maps.

A folder holds

    index.json         what there is, sealed with its own checksum; written last, so it stands for "complete"
    000000.bin         tokens of shard 0, uint16 where the vocabulary is below 65,536 and uint32 elsewhere
    000000.docs        int64: where in the shard each of its documents starts

All numbers are little-endian. A document lies whole in one shard and ends with eos, so the shards one after another
are one stream of tokens that needs no further marks.

While it is being written the folder holds `index.partial.json` instead, which lists the whole shards, and `*.part`,
which the next writer discards. Every file gets its name by renaming once its bytes are on the disk: whatever
stops a writer, each shard that is listed is whole.
"""

import hashlib
import json
import os
import shutil
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np

from kdn.training.data import DataError

__all__ = ["SHARD_TOKENS", "ShardWriter", "TokenShards"]

FORMAT, VERSION = "kdn-shards", 1
INDEX, PARTIAL = "index.json", "index.partial.json"
SHARD_TOKENS = 2**26
PIECE = 2**24  # tokens looked at together when everything is read


def _digest(index: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(index, sort_keys=True).encode()).hexdigest()


def _read_index(path: Path) -> dict[str, Any]:
    try:
        index = json.loads(path.read_bytes())
    except ValueError:
        raise DataError(f"{path} is damaged: it is not JSON") from None
    if not isinstance(index, dict) or index.get("format") != FORMAT:
        raise DataError(f"{path} is not an index of token shards: its format is not {FORMAT!r}")
    # Before the checksum: another version may seal its index in another way.
    if index.get("version") != VERSION:
        raise DataError(f"{path} has version {index.get('version')}, this kdn reads version {VERSION}")
    if index.pop("sha256", None) != _digest(index):
        raise DataError(f"{path} is damaged: it does not match its own checksum")
    return index


def _check_sizes(folder: Path, index: Mapping[str, Any]) -> None:
    """Whether every shard that the index lists is there, with the size it should have."""
    for shard in index["shards"]:
        path = folder / shard["file"]
        sizes = {
            path: shard["tokens"] * np.dtype(index["dtype"]).itemsize,
            path.with_suffix(".docs"): shard["documents"] * 8,
        }
        for file, expected in sizes.items():
            if not file.is_file():
                raise DataError(f"{file} is missing, {folder} lists it")
            if (found := file.stat().st_size) != expected:
                raise DataError(f"{file} is damaged: it has {found} bytes and should have {expected}")


class ShardWriter:
    """Writes documents into a folder of token shards; a context manager.

    A shard ends with the document that fills it to `shard_tokens`. Leaving the `with` block completes the folder;
    leaving it by an exception keeps the whole shards, and `resume=True` continues after them: then
    `documents` says how many documents are there already, and the caller goes on with the next one. Resuming
    where nothing was begun begins; with the same documents the result has the same bytes as an undisturbed one.

    tokenizer, source: descriptions (JSON) that go into the index; a resumed folder must have been begun with the
    same ones. tokenizer["folder"], if there is one, is where its files are, seen from this folder.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        vocab_size: int,
        eos_token_id: int,
        tokenizer: Mapping[str, Any],
        source: Mapping[str, Any],
        shard_tokens: int = SHARD_TOKENS,
        resume: bool = False,
    ) -> None:
        if not 0 < vocab_size <= 2**32:
            raise ValueError(f"vocab_size must be in 1 … 2³², got {vocab_size}")
        if not 0 <= eos_token_id < vocab_size:
            raise ValueError(f"eos_token_id must be in 0 … {vocab_size - 1}, got {eos_token_id}")
        if shard_tokens < 1:
            raise ValueError(f"shard_tokens must be ≥ 1, got {shard_tokens}")
        self.folder = Path(folder)
        self.eos_token_id = eos_token_id
        self.vocab_size = vocab_size
        header: dict[str, Any] = {
            "format": FORMAT,
            "version": VERSION,
            "dtype": "uint16" if vocab_size < 2**16 else "uint32",
            "vocab_size": vocab_size,
            "eos_token_id": eos_token_id,
            "shard_tokens": shard_tokens,
            "tokenizer": dict(tokenizer),
            "source": dict(source),
        }
        # Through JSON once, so that what is compared with an index read from disk is of the same types.
        self._header: dict[str, Any] = json.loads(json.dumps(header))
        self._dtype = np.dtype(header["dtype"]).newbyteorder("<")
        self._shard_tokens = shard_tokens
        self._shards: list[dict[str, Any]] = []
        self._file: BinaryIO | None = None
        self._starts = array("q")  # of the open shard's documents
        self._filled = 0  # tokens in the open shard
        self._sha = hashlib.sha256()
        self.complete = False
        with self._disk():
            self.folder.mkdir(parents=True, exist_ok=True)
            self._begin(resume)

    def _begin(self, resume: bool) -> None:
        begun = next((n for n in (INDEX, PARTIAL) if (self.folder / n).exists()), None)
        if begun and not resume:
            state = "complete" if begun == INDEX else "unfinished"
            raise DataError(
                f"{self.folder} holds {state} token shards: resume (--resume) to go on, or give another folder"
            )
        if begun:
            index = _read_index(self.folder / begun)
            for key, wanted in self._header.items():
                if index[key] != wanted:
                    raise DataError(
                        f"{self.folder} was begun with {key} {index[key]}, not {wanted}: "
                        "give the same to resume, or another folder"
                    )
            _check_sizes(self.folder, index)
            self._shards = index["shards"]
            self.complete = begun == INDEX
        if not self.complete:
            self._write_index(PARTIAL)
        for leftover in self.folder.glob("*.part"):
            leftover.unlink()

    @property
    def documents(self) -> int:
        return sum(s["documents"] for s in self._shards) + len(self._starts)

    @property
    def tokens(self) -> int:
        return sum(s["tokens"] for s in self._shards) + self._filled

    def add(self, tokens: "Sequence[int] | np.ndarray") -> None:
        """One document's tokens, without its eos, which is added."""
        if self.complete:
            raise DataError(f"{self.folder} is complete: nothing can be added")
        ids = np.asarray(tokens, dtype=np.int64)
        if ids.size and not 0 <= ids.min() <= ids.max() < self.vocab_size:
            beyond = ids[(ids < 0) | (ids >= self.vocab_size)][0]
            raise DataError(
                f"token {beyond} of document {self.documents} is beyond the vocabulary of {self.vocab_size}"
            )
        data = np.append(ids, self.eos_token_id).astype(self._dtype).tobytes()
        with self._disk():
            if self._file is None:
                self._file = open(self._part(".bin"), "wb", buffering=2**20)  # noqa: SIM115
            self._file.write(data)
        self._sha.update(data)
        self._starts.append(self._filled)
        self._filled += ids.size + 1
        if self._filled >= self._shard_tokens:
            self._finish_shard()

    def close(self) -> None:
        """Write what is open, then the index: the folder is complete."""
        if self.complete:
            return
        if self._filled:
            self._finish_shard()
        if not self._shards:
            raise DataError(f"{self.folder} is left unfinished: there was no document to write")
        with self._disk():
            self._write_index(INDEX)
            (self.folder / PARTIAL).unlink()
        self.complete = True

    def __enter__(self) -> "ShardWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
            return
        if self._file is not None:
            # On a full disk, closing tries to write once more.
            with suppress(OSError):
                self._file.close()
        for leftover in self.folder.glob("*.part"):
            with suppress(OSError):
                leftover.unlink()

    def _part(self, suffix: str) -> Path:
        return self.folder / f"{len(self._shards):06d}{suffix}.part"

    def _finish_shard(self) -> None:
        assert self._file is not None
        starts = np.asarray(self._starts, dtype="<i8").tobytes()
        with self._disk():
            _to_disk(self._file)
            with open(self._part(".docs"), "wb") as docs:
                docs.write(starts)
                _to_disk(docs)
            for suffix in (".docs", ".bin"):
                part = self._part(suffix)
                part.rename(part.with_suffix(""))
            shard = {
                "file": f"{len(self._shards):06d}.bin",
                "tokens": self._filled,
                "documents": len(self._starts),
                "sha256": self._sha.hexdigest(),
                "docs_sha256": hashlib.sha256(starts).hexdigest(),
            }
            self._write_index(PARTIAL, shard)
        # Counted only now: until the index lists it, a shard is not there.
        self._shards.append(shard)
        self._file, self._starts, self._filled, self._sha = None, array("q"), 0, hashlib.sha256()

    def _write_index(self, name: str, *new: dict[str, Any]) -> None:
        shards = [*self._shards, *new]
        index = {
            **self._header,
            "tokens": sum(s["tokens"] for s in shards),
            "documents": sum(s["documents"] for s in shards),
            "shards": shards,
        }
        part = self.folder / f"{name}.part"
        with open(part, "wb") as file:
            file.write(json.dumps({**index, "sha256": _digest(index)}, indent=1).encode())
            _to_disk(file)
        part.rename(self.folder / name)
        if os.name == "posix":  # elsewhere a folder cannot be opened, and renames need no such care
            listing = os.open(self.folder, os.O_RDONLY)
            try:
                os.fsync(listing)
            finally:
                os.close(listing)

    @contextmanager
    def _disk(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            kept = sum(s["tokens"] for s in self._shards)
            raise DataError(
                f"{error.strerror or error} while writing {self.folder}: its {len(self._shards)} whole shards with "
                f"{kept} tokens are kept, resume (--resume) continues after them"
            ) from error


def _to_disk(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())
    file.close()


class TokenShards:
    """A complete folder of token shards, as one stream of `tokens` tokens in `documents` documents.

    Opening checks the index and the files' sizes; `verify` reads everything.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        if not (self.folder / INDEX).is_file():
            if (self.folder / PARTIAL).is_file():
                index = _read_index(self.folder / PARTIAL)
                raise DataError(
                    f"{self.folder} is unfinished: {len(index['shards'])} whole shards with {index['tokens']} tokens "
                    "are there, resume the writing (kdn data prepare … --resume)"
                )
            raise DataError(
                f"{self.folder} holds no token shards: there is no {INDEX} (kdn data prepare makes it)"
            )
        index = _read_index(self.folder / INDEX)
        _check_sizes(self.folder, index)
        self.checksum = _digest(index)  # of the index, which has those of the shards
        self.vocab_size: int = index["vocab_size"]
        self.eos_token_id: int = index["eos_token_id"]
        self.tokenizer: dict[str, Any] = index["tokenizer"]
        self.source: dict[str, Any] = index["source"]
        self.tokens: int = index["tokens"]
        self.documents: int = index["documents"]
        self.shards: list[dict[str, Any]] = index["shards"]
        dtype = np.dtype(index["dtype"]).newbyteorder("<")
        files = [self.folder / s["file"] for s in self.shards]
        self._tokens = [np.memmap(f, dtype, mode="r") for f in files]
        self._starts = [np.memmap(f.with_suffix(".docs"), "<i8", mode="r") for f in files]
        self._first = np.cumsum([0, *(s["tokens"] for s in self.shards)])  # of each shard, and the end

    def _pieces(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """(shard, from, to) that make up [start, stop) of the stream."""
        if not 0 <= start <= stop <= self.tokens:
            raise ValueError(f"start and stop must be in 0 … {self.tokens}, got {start} and {stop}")
        shard = int(np.searchsorted(self._first, start, side="right")) - 1
        while start < stop:
            end = min(stop, int(self._first[shard + 1]))
            offset = int(self._first[shard])
            yield shard, start - offset, end - offset
            start, shard = end, shard + 1

    def read(self, start: int, stop: int) -> np.ndarray:
        """Tokens [start, stop) of the stream, int64."""
        out = np.empty(stop - start, np.int64)
        filled = 0
        for shard, a, b in self._pieces(start, stop):
            piece = self._tokens[shard][a:b]
            if piece.max() >= self.vocab_size:
                raise self._beyond(shard, int(piece.max()))
            out[filled : filled + b - a] = piece
            filled += b - a
        return out

    def document_starts(self, start: int, stop: int) -> np.ndarray:
        """Where in the stream the documents start that start in [start, stop), int64."""
        found = [np.empty(0, np.int64)]
        for shard, a, b in self._pieces(start, stop):
            starts = self._starts[shard]
            low, high = np.searchsorted(starts, [a, b])
            found.append(starts[low:high].astype(np.int64) + self._first[shard])
        return np.concatenate(found)

    def verify(self, progress: Callable[[int], object] = lambda tokens: None) -> None:
        """Read everything: checksums, token ids, documents. `progress` is told how many tokens were read."""
        for i, shard in enumerate(self.shards):
            file = self.folder / shard["file"]
            tokens, starts = self._tokens[i], self._starts[i]
            sha = hashlib.sha256()
            for at in range(0, len(tokens), PIECE):
                piece = tokens[at : at + PIECE]
                sha.update(piece.tobytes())
                if piece.max() >= self.vocab_size:
                    raise self._beyond(i, int(piece.max()))
                progress(len(piece))
            docs = file.with_suffix(".docs")
            for path, found, listed in (
                (file, sha.hexdigest(), shard["sha256"]),
                (docs, hashlib.sha256(starts.tobytes()).hexdigest(), shard["docs_sha256"]),
            ):
                if found != listed:
                    raise DataError(f"{path} is damaged: it does not match its checksum in {INDEX}")
            if starts[0] != 0 or np.any(np.diff(starts) <= 0) or starts[-1] >= len(tokens):
                raise DataError(f"{docs} is wrong: starts of documents must rise from 0 and lie in the shard")
            if np.any(tokens[np.append(starts[1:], len(tokens)) - 1] != self.eos_token_id):
                raise DataError(
                    f"{file} is wrong: a document does not end with eos, token {self.eos_token_id}"
                )

    def copy_tokenizer(self, folder: str | os.PathLike[str]) -> None:
        """Put the files of the tokenizer that made these tokens into `folder`, beside a model's. Shards that were
        written without one leave it as it is."""
        if "folder" not in self.tokenizer:
            return
        files = self.folder / self.tokenizer["folder"]
        if not files.is_dir():
            raise DataError(f"{files} is missing: the tokenizer of {self.folder} belongs there")
        shutil.copytree(files, folder, dirs_exist_ok=True)

    def _beyond(self, shard: int, token: int) -> DataError:
        file = self.folder / self.shards[shard]["file"]
        return DataError(f"{file} holds token {token}, beyond the vocabulary of {self.vocab_size}")
