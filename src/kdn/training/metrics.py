"""Where numbers of a run go: the console, `log.jsonl`, and TensorBoard or W&B where the recipe asks for them."""

import json
import shutil
import sys
from collections.abc import Callable
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from kdn.training import TrainingStopped
from kdn.training.recipe import Recipe, RecipeError

__all__ = ["Metrics", "check_writers"]

LOG = "log.jsonl"
Writer = Callable[[int, dict[str, float]], object]


def check_writers(recipe: Recipe) -> None:
    """Raise RecipeError if the recipe asks for what is not installed."""
    for key, package in {"tensorboard": recipe.log.tensorboard, "wandb": recipe.log.wandb}.items():
        if package and find_spec(key) is None:
            raise RecipeError(
                f"log.{key} is set, but {key} is not installed: pip install {key}, or leave it out"
            )


class Metrics:
    """Numbers of the first rank; the others' calls do nothing.

    The console shows a live line on a terminal, else one line per logged step. What an earlier process wrote after step
    `resumed_at` is forgotten: it will be written again.
    """

    def __init__(self, recipe: Recipe, *, first: bool, resumed_at: int = 0) -> None:
        self.recipe, self.first, self.live = recipe, first, sys.stderr.isatty()
        self.writers: list[Writer] = []
        if not first:
            return
        folder = Path(recipe.checkpoint.folder)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            _forget_after(folder / LOG, resumed_at)
            self.file = (folder / LOG).open("a", encoding="utf-8")
        except OSError as error:
            raise TrainingStopped(f"{folder / LOG} cannot be written: {error.strerror}") from error
        if recipe.log.tensorboard:
            self.writers.append(_tensorboard(folder, resumed_at))
        if recipe.log.wandb is not None:
            self.writers.append(_wandb(recipe, folder))

    def log(self, step: int, numbers: dict[str, float]) -> None:
        if not self.first:
            return
        try:
            self.file.write(json.dumps({"step": step, **numbers}) + "\n")
            self.file.flush()
        except OSError as error:
            raise TrainingStopped(f"{self.file.name} cannot be written: {error.strerror}") from error
        for write in self.writers:
            write(step, numbers)
        self._show(step, numbers)

    def say(self, text: str) -> None:
        """A sentence for the person at the console."""
        if self.first:
            self.announce(text)

    @staticmethod
    def announce(text: str) -> None:
        start = "\r\x1b[K" if sys.stderr.isatty() else ""
        print(f"{start}{text}", file=sys.stderr, flush=True)

    def close(self) -> None:
        if self.first:
            if self.live:
                print(file=sys.stderr)
            with suppress(OSError):  # of a full disk, which was said already
                self.file.close()

    def _show(self, step: int, x: dict[str, float]) -> None:
        steps = self.recipe.steps
        parts = [f"step {step}/{steps}"]
        if "loss" in x:
            parts += [
                f"loss {x['loss']:.4f}",
                f"lr {x['learning rate']:.2e}",
                f"|g| {x['gradient norm']:.2f}",
                f"{x['tokens/s']:,.0f} tok/s",
                f"MFU {100 * x['MFU']:.1f}%",
                f"{x['memory GiB']:.1f} GiB",
            ]
        if "effective write" in x:
            parts.append(f"kᵀg {x['effective write']:.3f}")
        if "state norm" in x:
            parts.append(f"‖S‖ {x['state norm']:.2f}")
        if "seconds per step" in x:
            parts.append(f"left {_duration(x['seconds per step'] * (steps - step))}")
        if "validation loss" in x:  # a line that stays
            self.say(f"step {step}/{steps}  validation loss {x['validation loss']:.4f}")
            return
        line = "  ".join(parts)
        if not self.live:
            print(line, file=sys.stderr, flush=True)
            return
        width = 20
        done = round(width * step / max(1, steps))
        line = f"{'━' * done}{'─' * (width - done)} {line}"
        # A line that wraps could not be taken back.
        line = line[: shutil.get_terminal_size().columns - 1]
        print(f"\r\x1b[K{line}", end="", file=sys.stderr, flush=True)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _forget_after(file: Path, step: int) -> None:
    """Drop what a run wrote after the checkpoint that this one goes on from, and a line cut off by its death."""
    if not file.exists():
        return
    kept = []
    for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            if json.loads(line)["step"] <= step:
                kept.append(line)
        except (json.JSONDecodeError, KeyError, TypeError):
            continue
    new = file.with_suffix(".new")
    new.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
    new.replace(file)


def _tensorboard(folder: Path, resumed_at: int) -> Writer:
    from torch.utils.tensorboard import SummaryWriter

    # TensorBoard drops what it was told from here on.
    writer = SummaryWriter(str(folder / "tensorboard"), purge_step=resumed_at + 1)

    def write(step: int, numbers: dict[str, float]) -> None:
        for name, value in numbers.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    return write


def _wandb(recipe: Recipe, folder: Path) -> Writer:
    import wandb

    # The folder is the run: a process that resumes it goes on with the same page.
    file = folder / "wandb.id"
    if not file.exists():
        file.write_text(wandb.util.generate_id(), encoding="utf-8")
    run: Any = wandb.init(
        project=recipe.log.wandb,
        id=file.read_text(encoding="utf-8"),
        name=folder.name,
        dir=str(folder),
        config=recipe.as_dict(),
        resume="allow",
    )
    return lambda step, numbers: run.log(numbers, step=step)
