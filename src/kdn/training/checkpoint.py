"""Checkpoints that survive being killed: PyTorch's DCP, made atomic and verified.

    step-00000100/   DCP's files, and kdn.json: what the run says about itself, a SHA-256 of every other file
    nan-00000104/    the same, of the moment before a step whose loss was not a number

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
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save

from kdn.training import TrainingStopped
from kdn.training.parallel import Ranks

__all__ = ["CheckpointError", "Checkpoints", "Found", "opened"]

_ABOUT = "kdn.json"
# DCP says so from a thread of its own whenever a run is one process, which is what was asked for.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")


class CheckpointError(TrainingStopped):
    """A checkpoint that could not be written or read."""


class Found(NamedTuple):
    """A checkpoint that is whole."""

    folder: Path
    about: dict[str, Any]  # what `save` was told


class Checkpoints:
    """The checkpoints of one run, the last `keep` of them."""

    def __init__(self, folder: Path, keep: int, ranks: Ranks) -> None:
        self.folder, self.keep, self.ranks = folder, keep, ranks
        self.notes: list[str] = []  # what a person should know of what was found
        # A group of their own: the background thread's collectives must not meet those of the step.
        self.group = dist.new_group(backend="gloo") if ranks.world > 1 else None
        self.worker: threading.Thread | None = None
        self.failure: str | None = None

    def save(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        about: dict[str, Any],
        name: str | None = None,
    ) -> Path:
        """Write in the background, as soon as the one before is written; the states may change meanwhile.

        about: JSON that `newest` gives back, with the key "step".
        """
        self.finish()
        final = self.folder / (name or f"step-{about['step']:08d}")
        temporary = self.folder / f".{final.name}.writing"
        with self._agreed():
            if self.ranks.first:
                self.folder.mkdir(parents=True, exist_ok=True)
                shutil.rmtree(temporary, ignore_errors=True)
        weights, moments = get_state_dict(model, optimizer)
        state = {"model": weights, "optimizer": moments}
        future: Any = async_save(
            state, checkpoint_id=temporary, process_group=self.group, no_dist=self.ranks.world == 1
        )

        def complete() -> None:
            try:
                future.result()
                if self.ranks.first:
                    _seal(temporary, about)
                    shutil.rmtree(final, ignore_errors=True)
                    temporary.rename(final)
                    _sync(self.folder)
                    self._prune()
            except BaseException as error:
                self.failure = _cause(error)
                if self.ranks.first:  # what there is of it only fills the disk
                    shutil.rmtree(temporary, ignore_errors=True)

        self.worker = threading.Thread(target=complete, name="checkpoint")
        self.worker.start()
        return final

    def finish(self) -> None:
        """Wait until what is being written is written; on all ranks alike, an error if it is not."""
        if self.worker is None:
            return
        self.worker.join()
        self.worker = None
        with self._agreed():
            if self.failure is not None:
                why, self.failure = self.failure, None
                raise CheckpointError(
                    f"a checkpoint could not be written in {self.folder}: {why}; the earlier ones are whole, "
                    "the same command goes on from the newest"
                )

    def newest(self) -> Found | None:
        """The newest checkpoint that is whole; None where there is none at all."""
        found: Found | None = None
        with self._agreed():
            if self.ranks.first:
                found = self._newest_whole()
        if self.ranks.world > 1:
            shared: list[Any] = [found]
            dist.broadcast_object_list(shared, group=self.group)
            (found,) = shared
        return found

    def load(self, found: Found, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Take over its states; what the optimizer was told (decay, betas) stays as it is now."""
        settings = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
        weights, moments = get_state_dict(model, optimizer)
        state = {"model": weights, "optimizer": moments}
        load(state, checkpoint_id=found.folder, process_group=self.group, no_dist=self.ranks.world == 1)
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
        for group, told in zip(optimizer.param_groups, settings, strict=True):
            group.update(told)

    def _newest_whole(self) -> Found | None:
        for left in self.folder.glob(".*.writing"):  # by a run that was killed
            shutil.rmtree(left, ignore_errors=True)
        folders = sorted(self.folder.glob("step-*"), reverse=True)
        for i, folder in enumerate(folders):
            wrong = _what_is_wrong(folder)
            if wrong is None:
                return opened(folder)
            before = "using the one before" if i + 1 < len(folders) else "there is none before it"
            self.notes.append(f"checkpoint {folder} is damaged ({wrong}): {before}")
        if folders:
            raise CheckpointError(f"{'; '.join(self.notes)}. Remove {self.folder} to start again")
        return None

    def _prune(self) -> None:
        for folder in sorted(self.folder.glob("step-*"))[: -self.keep]:
            shutil.rmtree(folder, ignore_errors=True)

    def _agreed(self) -> "_Agreed":
        return _Agreed(self.group)


class _Agreed:
    """A block that fails on all ranks if it fails on one: nobody is left waiting in the next collective."""

    def __init__(self, group: Any) -> None:
        self.group = group

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, OSError):
            ours: str | None = f"{error.filename} cannot be written: {error.strerror}"
        else:
            ours = None if error is None else str(error)
        said = [ours]
        if self.group is not None:
            said *= dist.get_world_size(self.group)
            dist.all_gather_object(said, ours, group=self.group)
        failed = [text for text in said if text is not None]
        if failed and (error is None or isinstance(error, OSError)):
            raise CheckpointError(failed[0]) from error


def opened(folder: Path) -> Found:
    """A checkpoint by its folder; CheckpointError unless it is whole."""
    wrong = _what_is_wrong(folder)
    if wrong is not None:
        raise CheckpointError(f"{folder} is no whole checkpoint: {wrong}")
    return Found(folder, json.loads((folder / _ABOUT).read_text(encoding="utf-8"))["about"])


def _digest(file: Path) -> str:
    with file.open("rb") as read:
        return hashlib.file_digest(read, "sha256").hexdigest()


def _sync(path: Path) -> None:
    """Have the system write a file or folder to disk now."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _sealed(about: Any) -> str:
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()


def _seal(folder: Path, about: dict[str, Any]) -> None:
    files = sorted(p for p in folder.iterdir() if p.name != _ABOUT)
    for file in files:
        _sync(file)
    content = {"about": about, "sha256": {file.name: _digest(file) for file in files}}
    seal = folder / _ABOUT
    seal.write_text(json.dumps({**content, "own": _sealed(content)}, indent=1), encoding="utf-8")
    _sync(seal)
    _sync(folder)


def _what_is_wrong(folder: Path) -> str | None:
    """One phrase, or None if the checkpoint is whole."""
    try:
        read = json.loads((folder / _ABOUT).read_text(encoding="utf-8"))
        own, sums = read.pop("own"), read["sha256"]
    except (OSError, ValueError, KeyError, AttributeError):
        return f"{_ABOUT} does not read"
    if own != _sealed(read):
        return f"{_ABOUT} has changed"
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
        return error.strerror or str(error)
    inner = getattr(error, "failures", None)  # of DCP, per rank
    if inner:
        first = next(iter(inner.values()))
        return _cause(first[0] if isinstance(first, tuple) else first)
    if error.__cause__ or error.__context__:
        deeper = error.__cause__ or error.__context__
        assert deeper is not None
        return _cause(deeper)
    return str(error).splitlines()[0] if str(error) else type(error).__name__
