"""What tests of training share: token shards, a tiny recipe, processes that run it."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import Server
from runs import tiny, write_shards

from kdn.training.recipe import Recipe, build


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    """Models this small only lose by more, and the same number of threads gives the same bits."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with train/ (some 250 sequences of 64) and validation/ (27 of them)."""
    folder = tmp_path_factory.mktemp("shards")
    write_shards(folder / "train", 300, 0)
    write_shards(folder / "validation", 33, 1)
    return folder


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
