"""Several ranks compute what one does: FSDP2, context parallelism, both; and none waits for one that failed."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from processes import Server
from runs import losses, tiny, write_shards
from safetensors.torch import load_file

from kdn.training.data.batches import permuted
from kdn.training.data.shards import TokenShards
from kdn.training.loop import train
from kdn.training.recipe import build

SMALL = {"batch_tokens": 256, "micro_batch": 1}
LONG = {"train": {"tokens": 50 * 256, **SMALL}, "checkpoint": {"every": 10}, "log": {"every": 5}}


def assert_close(one: list[tuple[int, float]], other: list[tuple[int, float]], tolerance: float) -> None:
    assert [step for step, _ in one] == [step for step, _ in other]
    assert max(abs(a - b) for (_, a), (_, b) in zip(one, other, strict=True)) <= tolerance


@pytest.fixture(scope="module")
def one_rank(shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """50 steps on one rank, validated twice."""
    folder = tmp_path_factory.mktemp("one-rank")
    train(build(tiny(shards, folder, **LONG, data={"validation": str(shards / "validation")})))
    return folder


@pytest.mark.parametrize("ranks", [2, 4])
def test_fsdp_has_the_losses_of_one_rank(
    ranks: int, server: Server, one_rank: Path, shards: Path, recipe_file: Any, tmp_path: Path
) -> None:
    """Over 50 steps, at the end on validation shards whose sequences no number of ranks divides, and exported."""
    file = recipe_file(**LONG, data={"validation": str(shards / "validation")})
    statuses, said = server.run(["train", file], ranks=ranks)
    assert statuses == [0] * ranks, said
    run = tmp_path / "run"
    assert_close(losses(run), losses(one_rank), 1e-4)
    assert_close(validations(run), validations(one_rank), 1e-4)
    for line in said.splitlines():  # nothing else: no warnings
        assert line.startswith("step "), line
    got, wanted = (load_file(x / "model" / "model.safetensors") for x in (run, one_rank))
    assert got.keys() == wanted.keys()  # embedding and head are one: saved once
    for name, weight in wanted.items():
        torch.testing.assert_close(got[name], weight, rtol=0.01, atol=1e-3)


def validations(run: Path) -> list[tuple[int, float]]:
    rows = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    return [(row["step"], row["validation loss"]) for row in rows if "validation loss" in row]


def test_resuming_on_another_number_of_ranks(
    server: Server, one_rank: Path, recipe_file: Any, tmp_path: Path
) -> None:
    """10 steps on one rank, then two, then one again."""
    file, run = recipe_file(**LONG), tmp_path / "run"
    for ranks, checkpoint in ((1, 10), (2, 20)):
        going = server.start(["train", file], ranks=ranks)
        while not (run / f"checkpoints/step-{checkpoint:08d}").exists() and going.running():
            time.sleep(0.002)
        going.kill()
        going.wait()
    statuses, said = server.run(["train", file])
    assert statuses == [0] and "resumed at step 20" in said, said
    assert_close(losses(run), losses(one_rank), 1e-4)


@pytest.mark.parametrize("ranks", [2, 4])
def test_context_parallel_with_fsdp_has_the_losses_of_one_rank(
    ranks: int, server: Server, shards: Path, recipe_file: Any, tmp_path: Path
) -> None:
    """Every sequence on two ranks, all parameters split among all ranks."""
    whole = {
        "data": {"packing": "concatenate", "validation": str(shards / "validation")},
        "train": {"tokens": 8 * 256, **SMALL, "validate_tokens": 704},
    }
    expected = train(build(tiny(shards, tmp_path / "one", **whole)))
    statuses, said = server.run(["train", recipe_file(**whole, parallel={"context": 2})], ranks=ranks)
    assert statuses == [0] * ranks, said
    assert_close(losses(tmp_path / "run"), losses(tmp_path / "one"), 1e-4)
    ((_, validation),) = validations(tmp_path / "run")
    assert expected.validation_loss is not None and abs(validation - expected.validation_loss) < 1e-4


def test_bfloat16_differs_by_rounding_only(
    server: Server, shards: Path, recipe_file: Any, tmp_path: Path
) -> None:
    low = {"train": {"dtype": "bfloat16", "tokens": 6 * 256, **SMALL}}
    train(build(tiny(shards, tmp_path / "one", **low)))
    statuses, said = server.run(["train", recipe_file(**low)], ranks=2)
    assert statuses == [0, 0], said
    assert_close(losses(tmp_path / "run"), losses(tmp_path / "one"), 5e-3)


def test_a_rank_that_fails_leaves_none_waiting(server: Server, recipe_file: Any, tmp_path: Path) -> None:
    """The second rank alone reads a token that the vocabulary does not have, at the third step."""
    folder = write_shards(tmp_path / "bad", 300, 0)
    per_epoch = (TokenShards(folder).tokens - 1) // 64
    sequence = int(permuted(np.array([2 * 8 + 5]), per_epoch, 0, 0)[0])
    tokens = np.memmap(folder / "000000.bin", "<u2", mode="r+")
    tokens[sequence * 64 + 20] = 12345
    tokens.flush()
    run = server.start(["train", recipe_file(data={"train": str(folder)})], ranks=2)
    statuses = run.wait(30)
    assert statuses[1] == 1 and statuses[0] != 0
    assert f"kdn: rank 1: {folder}/000000.bin holds token 12345, beyond the vocabulary of 97" in run.said
    assert "step 2/" in run.said and "step 3/" not in run.said


def test_a_full_disk_stops_all_ranks(server: Server, recipe_file: Any, tmp_path: Path) -> None:
    statuses, said = server.run(["train", recipe_file()], ranks=2, file_limit=300_000)
    assert statuses == [1, 1] and "Traceback" not in said, said
    for rank in (0, 1):
        assert f"kdn: rank {rank}: a checkpoint could not be written" in said
    assert not list((tmp_path / "run/checkpoints").iterdir())


def test_what_only_the_first_rank_cannot_do_stops_all(
    server: Server, recipe_file: Any, tmp_path: Path
) -> None:
    """A file where the folder of checkpoints should be, which the first rank makes."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run/checkpoints").write_text("")
    run = server.start(["train", recipe_file(train={"tokens": 5 * 512})], ranks=2)
    assert run.wait(30) == [1, 1] and "Traceback" not in run.said, run.said
    assert f"kdn: rank 1: {tmp_path}/run/checkpoints cannot be written: File exists" in run.said


def test_ranks_that_do_not_divide_the_batch_are_refused(server: Server, recipe_file: Any) -> None:
    statuses, said = server.run(["train", recipe_file(train={"micro_batch": 4})], ranks=4)
    assert statuses == [1] * 4
    assert "a batch of 8 sequences does not split into 4 shares of micro-batches of 4" in said
    statuses, said = server.run(
        ["train", recipe_file(parallel={"context": 2}, data={"packing": "concatenate"})]
    )
    assert statuses == [1] and "parallel.context must divide the number of ranks 1, got 2" in said


def test_torchrun(recipe_file: Any, shards: Path, tmp_path: Path) -> None:
    short = {"train": {"tokens": 3 * 512}}
    command = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "kdn", "train"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(
        [sys.executable, *command, recipe_file(**short)], capture_output=True, text=True, env=environment
    )
    assert ran.returncode == 0, ran.stderr
    train(build(tiny(shards, tmp_path / "one", **short)))
    assert_close(losses(tmp_path / "run"), losses(tmp_path / "one"), 1e-4)
