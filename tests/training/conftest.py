"""What tests of training share: token shards, a tiny recipe, processes that run it."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kdn.training.data.shards import ShardWriter
from kdn.training.recipe import Recipe, build
from processes import Server

VOCABULARY = 97


def write_shards(folder: Path, documents: int, seed: int, vocabulary: int = VOCABULARY) -> Path:
    """Documents in which a token says something about the next."""
    random = np.random.default_rng(seed)
    with ShardWriter(folder, vocab_size=vocabulary, eos_token_id=0, tokenizer={}, source={}) as writer:
        for _ in range(documents):
            steps = random.integers(0, 3, random.integers(20, 90))
            writer.add(np.cumsum(steps) % (VOCABULARY - 1) + 1)
    return folder


@pytest.fixture(scope="session")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with train/ (some 250 sequences of 64) and validation/ (27 of them)."""
    folder = tmp_path_factory.mktemp("shards")
    write_shards(folder / "train", 300, 0)
    write_shards(folder / "validation", 33, 1)
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


@pytest.fixture
def recipe(shards: Path, tmp_path: Path) -> Callable[..., Recipe]:
    return lambda folder="run", **changes: build(tiny(shards, tmp_path / folder, **changes))


@pytest.fixture
def recipe_file(shards: Path, tmp_path: Path) -> Callable[..., Path]:
    """The same in a TOML file."""

    def write(folder: str = "run", **changes: Any) -> Path:
        lines = []
        for section, keys in tiny(shards, tmp_path / folder, **changes).items():
            lines.append(f"[{section}]")
            lines += [f"{key} = {json.dumps(value)}" for key, value in keys.items()]
        file = tmp_path / f"{folder}.toml"
        file.write_text("\n".join(lines) + "\n", encoding="utf-8")
        return file

    return write


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(tmp_path_factory.mktemp("server")) as server:
        yield server


def losses(folder: Path) -> list[tuple[int, float]]:
    """(step, loss) as the run's log has them."""
    rows = [json.loads(line) for line in (folder / "log.jsonl").read_text(encoding="utf-8").splitlines()]
    return [(row["step"], row["loss"]) for row in rows if "loss" in row]
