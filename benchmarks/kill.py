"""Kill a run ten times, and compare what becomes of it with a run that was left alone.

    python benchmarks/kill.py

Real processes of `kdn train`, ended by SIGKILL: half of them at random moments, half while a checkpoint is being
written. Prints every attempt, and whether losses and weights came out the same, bit for bit. Takes some minutes.
tests/training/test_resume.py does the same in seconds, with processes forked from one that has imported everything.
"""

import hashlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from kdn.training.data.shards import ShardWriter

RECIPE = """
model = {{ preset = "kdn-diagonal-tiny", vocab_size = 97 }}
data = {{ train = "{data}", length = 64, packing = "documents" }}
train = {{ tokens = 76_800, batch_tokens = 512, micro_batch = 2, dtype = "float32" }}
optimizer = {{ peak = 3e-3, final = 3e-4, warmup = 0.1 }}
checkpoint = {{ folder = "{folder}", every = 5, keep = 3 }}
log = {{ every = 1 }}
"""


def write_data(folder: Path) -> None:
    chance = np.random.default_rng(0)
    with ShardWriter(folder, vocab_size=97, eos_token_id=0, tokenizer={}, source={}) as writer:
        for _ in range(300):
            writer.add(np.cumsum(chance.integers(0, 3, chance.integers(20, 90))) % 96 + 1)


def start(recipe: Path) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "kdn", "train", str(recipe)], env=environment, stderr=subprocess.DEVNULL
    )


def logged(run: Path) -> list[tuple[int, float]]:
    file = run / "log.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()[:-1]] if file.exists() else []
    return [(row["step"], row["loss"]) for row in rows]


def written_after(run: Path, moment: float) -> bool:
    file = run / "log.jsonl"
    return file.exists() and file.stat().st_mtime > moment


def kill_one(recipe: Path, run: Path, while_writing: bool, chance: random.Random) -> str:
    """One attempt: waits until it trains, kills it, and says when."""
    whole = sorted(run.glob("checkpoints/step-*"))
    resumed = int(whole[-1].name.removeprefix("step-")) if whole else 0
    process, began = start(recipe), time.time()
    # Some steps further than it began, so that the run gets on between the kills.
    further = chance.randint(1, 25)
    while process.poll() is None and not (
        written_after(run, began) and len(logged(run)) >= resumed + further
    ):
        time.sleep(0.005)
    while while_writing and process.poll() is None and not list(run.glob("checkpoints/.*.writing")):
        time.sleep(0.0002)
    time.sleep(chance.uniform(0, 0.02))
    process.kill()
    status = process.wait()
    half = [path.name for path in run.glob("checkpoints/.*.writing")]
    names = sorted(path.name for path in run.glob("checkpoints/step-*"))
    steps = logged(run)
    return (
        f"exit {status}, after step {steps[-1][0] if steps else 0}, newest whole checkpoint "
        f"{names[-1] if names else 'none'}, half-written: {', '.join(half) or 'none'}"
    )


def main() -> int:
    chance = random.Random(0)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_data(folder / "data")
        recipes = {run: folder / f"{run}.toml" for run in ("alone", "killed")}
        for run, file in recipes.items():
            file.write_text(RECIPE.format(data=folder / "data", folder=folder / run))
        if start(recipes["alone"]).wait() != 0:
            raise SystemExit("the run that was left alone failed")
        for attempt in range(10):
            said = kill_one(recipes["killed"], folder / "killed", attempt % 2 == 1, chance)
            print(f"kill {attempt + 1:>2}: {said}", flush=True)
        status = start(recipes["killed"]).wait()
        print(f"left alone at last: exit {status}")
        weights = [
            hashlib.sha256((folder / run / "model/model.safetensors").read_bytes()).hexdigest()
            for run in recipes
        ]
        same_losses = logged(folder / "alone") == logged(folder / "killed")
        print(f"{len(logged(folder / 'alone'))} logged losses the same: {same_losses}")
        print(f"weights the same: {weights[0] == weights[1]} (SHA-256 {weights[0][:16]}, {weights[1][:16]})")
    return 0 if same_losses and weights[0] == weights[1] else 1


if __name__ == "__main__":
    sys.exit(main())
