"""Runs of training that take a second: token shards, a recipe, and what a run's log says."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from kdn.training.data.shards import ShardWriter

VOCABULARY = 97


def write_shards(folder: Path, documents: int, seed: int, vocabulary: int = VOCABULARY) -> Path:
    """Documents in which a token says something about the next."""
    random = np.random.default_rng(seed)
    with ShardWriter(folder, vocab_size=vocabulary, eos_token_id=0, tokenizer={}, source={}) as writer:
        for _ in range(documents):
            steps = random.integers(0, 3, random.integers(20, 90))
            writer.add(np.cumsum(steps) % (VOCABULARY - 1) + 1)
    return folder


def tiny(shards: Path, folder: Path, **changes: dict[str, Any]) -> dict[str, Any]:
    """A recipe of 20 steps that takes a second, as nested dictionaries; `changes` by section."""
    recipe: dict[str, dict[str, Any]] = {
        "model": {"preset": "kdn-diagonal-tiny", "vocab_size": VOCABULARY},
        "data": {"train": str(shards / "train"), "length": 64, "packing": "documents"},
        "train": {"tokens": 20 * 512, "batch_tokens": 512, "micro_batch": 2, "dtype": "float32"},
        "optimizer": {"peak": 3e-3, "final": 3e-4, "warmup": 0.1},
        "checkpoint": {"folder": str(folder), "every": 5, "keep": 3},
        "log": {"every": 1},
    }
    for section, keys in changes.items():
        recipe.setdefault(section, {}).update(keys)
    return recipe


def losses(folder: Path) -> list[tuple[int, float]]:
    """(step, loss) as the run's log has them."""
    rows = [json.loads(line) for line in (folder / "log.jsonl").read_text(encoding="utf-8").splitlines()]
    return [(row["step"], row["loss"]) for row in rows if "loss" in row]
