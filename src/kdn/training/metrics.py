"""Where numbers of a run go: the console, `log.jsonl`, and TensorBoard or W&B where the recipe asks for them."""

import json
import sys
import time
from pathlib import Path
from typing import Any

from kdn.training.recipe import Recipe

__all__ = ["Metrics"]


class Metrics:
    """Numbers of the first rank; the others' calls do nothing.

    The console shows a live line on a terminal, else one line per logged step.
    """

    def __init__(self, recipe: Recipe, folder: Path, *, first: bool, resumed_at: int = 0) -> None:
        self.recipe, self.first, self.live = recipe, first, sys.stderr.isatty()
        self.started = time.monotonic()
        self.writers: list[Any] = []
        if not first:
            return
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / "log.jsonl"
        _forget_after(file, resumed_at)
        self.file = file.open("a", encoding="utf-8")
        if recipe.log.tensorboard:
            self.writers.append(_tensorboard(folder))
        if recipe.log.wandb is not None:
            self.writers.append(_wandb(recipe, folder))

    def log(self, step: int, numbers: dict[str, float]) -> None:
        if not self.first:
            return
        self.file.write(json.dumps({"step": step, **numbers}) + "\n")
        self.file.flush()
        for write in self.writers:
            write(step, numbers)
        self._show(step, numbers)

    def say(self, text: str) -> None:
        """A sentence for the person at the console."""
        if self.first:
            start = "\r\x1b[K" if self.live else ""
            print(f"{start}{text}", file=sys.stderr, flush=True)

    def close(self) -> None:
        if self.first:
            if self.live:
                print(file=sys.stderr)
            self.file.close()

    def _show(self, step: int, x: dict[str, float]) -> None:
        steps = self.recipe.steps
        parts = [f"step {step}/{steps}"]
        if "validation loss" in x:
            parts.append(f"validation loss {x['validation loss']:.4f}")
        if "loss" in x:
            parts.append(f"loss {x['loss']:.4f}")
            parts.append(f"lr {x['learning rate']:.2e}")
            parts.append(f"|g| {x['gradient norm']:.2f}")
            parts.append(f"{x['tokens/s']:,.0f} tok/s")
            parts.append(f"MFU {100 * x['MFU']:.0f}%")
            if "effective write" in x:
                parts.append(f"kᵀg {x['effective write']:.3f}")
            rate = x["seconds per step"]
            parts.append(f"left {_duration(rate * (steps - step))}")
        line = "  ".join(parts)
        if not self.live:
            print(line, file=sys.stderr, flush=True)
            return
        width = 20
        done = round(width * step / max(1, steps))
        print(f"\r\x1b[K{'━' * done}{'─' * (width - done)} {line}", end="", file=sys.stderr, flush=True)


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


def _tensorboard(folder: Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise RuntimeError(f"log.tensorboard is on, but TensorBoard is not installed: {error}") from None
    writer = SummaryWriter(str(folder / "tensorboard"))

    def write(step: int, numbers: dict[str, float]) -> None:
        for name, value in numbers.items():
            writer.add_scalar(name, value, step)

    return write


def _wandb(recipe: Recipe, folder: Path) -> Any:
    try:
        import wandb
    except ImportError as error:
        raise RuntimeError(f"log.wandb is set, but wandb is not installed: {error}") from None
    run = wandb.init(project=recipe.log.wandb, dir=str(folder), config=recipe.as_dict(), resume="allow")
    return lambda step, numbers: run.log(numbers, step=step)
