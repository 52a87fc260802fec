"""Checkpoints that survive being killed: PyTorch's DCP, made atomic and verified.

    step-00000100/   DCP's files, and kdn.json: step, extra numbers, a SHA-256 of every other file

A checkpoint is written in the background under a hidden name. When all is there and on disk, it is renamed: a folder
with its right name is whole. What is loaded is verified first; one that was damaged later is passed over, with a
sentence, for the one before. Any number of ranks can load what any number has written.
"""

import hashlib
import json
import os
import shutil
import threading
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save

from kdn.training.parallel import Ranks

__all__ = ["CheckpointError", "Checkpoints"]

_ABOUT = "kdn.json"
# DCP says so from a thread of its own whenever a run is one process, which is what was asked for.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")


class CheckpointError(RuntimeError):
    """A checkpoint that could not be written."""


class Checkpoints:
    """The checkpoints of one run, the last `keep` of them."""

    def __init__(self, folder: Path, keep: int, ranks: Ranks) -> None:
        self.folder, self.keep, self.ranks = folder, keep, ranks
        self.notes: list[str] = []  # what a person should know of what was found
        self.group = dist.new_group(backend="gloo") if ranks.world > 1 else None
        self.worker: threading.Thread | None = None
        self.failure: BaseException | None = None
        if ranks.first:
            folder.mkdir(parents=True, exist_ok=True)

    def save(
        self,
        step: int,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        extra: dict[str, Any],
        name: str | None = None,
    ) -> Path:
        """Write in the background, as soon as the one before is written; the states may change meanwhile."""
        self.finish()
        final = self.folder / (name or f"step-{step:08d}")
        temporary = self.folder / f".{final.name}.writing"
        if self.ranks.first:
            shutil.rmtree(temporary, ignore_errors=True)
        self._wait_for_all()
        weights, moments = get_state_dict(model, optimizer)
        state = {"model": weights, "optimizer": moments}
        future: Any = async_save(
            state, checkpoint_id=temporary, process_group=self.group, no_dist=self.ranks.world == 1
        )

        def complete() -> None:
            try:
                future.result()
                if self.ranks.first:
                    _seal(temporary, {"step": step, **extra})
                    shutil.rmtree(final, ignore_errors=True)
                    temporary.rename(final)
                    _sync(self.folder)
                    self._prune()
            except BaseException as error:
                self.failure = error

        self.worker = threading.Thread(target=complete, name="checkpoint")
        self.worker.start()
        return final

    def finish(self) -> None:
        """Wait until what is being written is written."""
        if self.worker is not None:
            self.worker.join()
            self.worker = None
        if self.failure is not None:
            error, self.failure = self.failure, None
            raise CheckpointError(
                f"a checkpoint in {self.folder} could not be written: {_cause(error)}"
            ) from error

    def restore(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any] | None:
        """Load the newest checkpoint that is whole; its step and extra numbers, or None where there is none."""
        found: list[Any] = [None, []]
        if self.ranks.first:
            found = [self._newest_whole(), self.notes]
        if self.ranks.world > 1:
            dist.broadcast_object_list(found, group=self.group)
        name, self.notes = found
        if name is None:
            return None
        weights, moments = get_state_dict(model, optimizer)
        state = {"model": weights, "optimizer": moments}
        folder = self.folder / name
        load(state, checkpoint_id=folder, process_group=self.group, no_dist=self.ranks.world == 1)
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
        read: dict[str, Any] = json.loads((folder / _ABOUT).read_text(encoding="utf-8"))["about"]
        return read

    def _newest_whole(self) -> str | None:
        for left in self.folder.glob(".*.writing"):  # by a run that was killed
            shutil.rmtree(left, ignore_errors=True)
        for folder in sorted(self.folder.glob("step-*"), reverse=True):
            wrong = _what_is_wrong(folder)
            if wrong is None:
                return folder.name
            self.notes.append(f"checkpoint {folder} is damaged ({wrong}): using the one before")
        return None

    def _prune(self) -> None:
        for folder in sorted(self.folder.glob("step-*"))[: -self.keep]:
            shutil.rmtree(folder, ignore_errors=True)

    def _wait_for_all(self) -> None:
        if self.group is not None:
            dist.barrier(group=self.group)


def _digest(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _sync(path: Path) -> None:
    """Have the system write a file or folder to disk now."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _seal(folder: Path, about: dict[str, Any]) -> None:
    files = sorted(p for p in folder.iterdir() if p.name != _ABOUT)
    for file in files:
        _sync(file)
    sums = {file.name: _digest(file) for file in files}
    seal = folder / _ABOUT
    seal.write_text(json.dumps({"about": about, "sha256": sums}, indent=1), encoding="utf-8")
    _sync(seal)
    _sync(folder)


def _what_is_wrong(folder: Path) -> str | None:
    """One phrase, or None if the checkpoint is whole."""
    try:
        sums = json.loads((folder / _ABOUT).read_text(encoding="utf-8"))["sha256"]
    except (OSError, ValueError, KeyError):
        return f"{_ABOUT} does not read"
    for name, wanted in sums.items():
        file = folder / name
        if not file.exists():
            return f"{name} is missing"
        if _digest(file) != wanted:
            return f"{name} has changed"
    return None


def _cause(error: BaseException) -> str:
    """The innermost reason, as the system puts it."""
    if isinstance(error, OSError):
        return str(error)
    inner = getattr(error, "failures", None)  # of DCP, per rank
    if inner:
        first = next(iter(inner.values()))
        return _cause(first[0] if isinstance(first, tuple) else first)
    return f"{type(error).__name__}: {error}"
