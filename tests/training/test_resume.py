"""A run that was killed, damaged or stopped resumes to the same bits as one that never was."""

import json
import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import Server
from runs import losses, tiny
from safetensors.torch import load_file

from kdn.training.checkpoint import CheckpointError
from kdn.training.loop import train
from kdn.training.recipe import Recipe, RecipeError, build

MakeRecipe = Callable[..., Recipe]


def weights(run: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = load_file(run / "model" / "model.safetensors")
    return found


def assert_same_run(one: Path, other: Path) -> None:
    """The same bits: weights of the exported model, and the losses logged."""
    a, b = weights(one), weights(other)
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
    assert losses(one) == losses(other)


@pytest.fixture(scope="module")
def undisturbed(server: Server, shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of `recipe()`, never stopped."""
    folder = tmp_path_factory.mktemp("undisturbed")
    train(build(tiny(shards, folder)))
    return folder


def test_killed_at_any_moment_it_ends_with_the_same_bits(
    server: Server, undisturbed: Path, recipe_file: Any, tmp_path: Path
) -> None:
    """Ten times SIGKILL: at random moments, and while a checkpoint is being written."""
    file, chance = recipe_file(checkpoint={"every": 2}), random.Random(0)
    killed = writing = resumed = 0
    for attempt in range(10):
        run = server.start(["train", file])
        # Some steps further, so that the run gets on between the kills.
        further = chance.randint(1, 2)
        while run.running() and run.said.count("\nstep ") < further:
            time.sleep(0.001)
        while attempt % 2 and run.running() and not list(tmp_path.glob("run/checkpoints/.*.writing")):
            time.sleep(0.0002)
        time.sleep(chance.uniform(0, 0.005))
        run.kill()
        killed += run.wait() == [-9]
        writing += bool(list(tmp_path.glob("run/checkpoints/.*.writing")))
        resumed += "resumed at step" in run.said
    assert killed >= 8, "it had ended before it could be killed"
    assert resumed >= 5, "it was killed before there was a checkpoint"
    assert writing >= 2, "no checkpoint was being written at any of these moments"
    statuses, said = server.run(["train", file])
    assert statuses == [0], said
    assert_same_run(tmp_path / "run", undisturbed)


def flip(folder: Path) -> None:
    file = next(folder.glob("*.distcp"))
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "__0_0.distcp has changed": flip,
    ".metadata has changed": lambda f: (f / ".metadata").write_bytes((f / ".metadata").read_bytes()[:-9]),
    "__0_0.distcp is missing": lambda f: (f / "__0_0.distcp").unlink(),
    "kdn.json does not read": lambda f: (f / "kdn.json").write_text('{"about": {'),
    "kdn.json has changed": lambda f: (f / "kdn.json").write_text(
        (f / "kdn.json").read_text().replace('"position": 120', '"position": 121')
    ),
}


@pytest.mark.parametrize("said", DAMAGES)
def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(
    said: str, undisturbed: Path, recipe: MakeRecipe, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(undisturbed, tmp_path / "run")
    shutil.rmtree(tmp_path / "run/model")
    shutil.rmtree(tmp_path / "run/checkpoints/step-00000020")
    newest = tmp_path / "run/checkpoints/step-00000015"
    DAMAGES[said](newest)
    train(recipe(), stop_after=None if said == next(iter(DAMAGES)) else 10)
    printed = capsys.readouterr().err
    assert f"{newest} is damaged ({said}): using the one before" in printed
    assert "resumed at step 10 of 20" in printed
    if said == next(iter(DAMAGES)):
        assert_same_run(tmp_path / "run", undisturbed)


def test_where_all_are_damaged_nothing_is_started_again(recipe: MakeRecipe, tmp_path: Path) -> None:
    train(recipe(), stop_after=10)
    for folder in (tmp_path / "run/checkpoints").iterdir():
        flip(folder)
    with pytest.raises(CheckpointError, match=r"step-00000005 is damaged .* none before it\. Remove"):
        train(recipe())


def test_a_finished_run_says_so_and_does_nothing(
    undisturbed: Path, server: Server, recipe_file: Any, tmp_path: Path
) -> None:
    shutil.copytree(undisturbed, tmp_path / "run")
    start = time.monotonic()
    statuses, said = server.run(["train", recipe_file()])
    assert statuses == [0] and time.monotonic() - start < 2
    assert said == f"finished already: 20 steps, the model is in {tmp_path / 'run/model'}\n"
    assert_same_run(tmp_path / "run", undisturbed)


def test_the_last_checkpoints_are_kept(undisturbed: Path) -> None:
    kept = sorted(path.name for path in (undisturbed / "checkpoints").iterdir())
    assert kept == ["step-00000010", "step-00000015", "step-00000020"]


CHANGES: dict[str, dict[str, Any]] = {
    "model.intermediate_size is 235 there and 100 here": {"model": {"intermediate_size": 100}},
    "model.mixer is 'kdn-diagonal' there and 'kda' here": {"model": {"preset": "kda-tiny"}},
    "data.seed is 0 there and 1 here": {"data": {"seed": 1}},
    "data.length is 64 there and 128 here": {"data": {"length": 128}},
    "data.packing is 'documents' there and 'concatenate' here": {"data": {"packing": "concatenate"}},
    "train.batch_tokens is 512 there and 1024 here": {"train": {"batch_tokens": 1024}},
    "train.seed is 0 there and 1 here": {"train": {"seed": 1}},
    "data.train is": {"data": {"train": "validation"}},
}


@pytest.mark.parametrize("said", CHANGES)
def test_resuming_another_run_is_refused(
    said: str, undisturbed: Path, shards: Path, recipe: MakeRecipe, tmp_path: Path
) -> None:
    shutil.copytree(undisturbed, tmp_path / "run")
    if said != next(iter(CHANGES)):  # once of a finished run
        shutil.rmtree(tmp_path / "run/model")
    changes = json.loads(json.dumps(CHANGES[said]).replace('"validation"', f'"{shards}/validation"'))
    with pytest.raises(RecipeError, match="was made by another recipe") as caught:
        train(recipe(**changes))
    assert said in str(caught.value)


def test_what_is_no_part_of_the_result_may_change(
    undisturbed: Path, shards: Path, recipe: MakeRecipe, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Shards that moved, another micro-batch, more tokens, another optimizer: a finished run goes on."""
    shutil.copytree(undisturbed, tmp_path / "run")
    shutil.copytree(shards / "train", tmp_path / "moved")
    changed = recipe(
        data={"train": str(tmp_path / "moved")},
        train={"tokens": 24 * 512, "micro_batch": 4},
        optimizer={"weight_decay": 0.0},
    )
    result = train(changed)
    assert result.steps == 24 and "resumed at step 20 of 24" in capsys.readouterr().err
    assert [step for step, _ in losses(tmp_path / "run")] == list(range(1, 25))
    assert json.loads((tmp_path / "run/model/training.json").read_text())["step"] == 24


def test_interrupted_it_says_how_to_go_on(
    server: Server, undisturbed: Path, recipe_file: Any, tmp_path: Path
) -> None:
    file = recipe_file()
    for _ in range(20):
        run = server.start(["train", file])
        while "step 7/" not in run.said:
            time.sleep(0.002)
        run.kill(2)
        status = run.wait()
        if status != [0]:
            break
        shutil.rmtree(tmp_path / "run")  # it was done before the signal came: again
    assert status == [130]
    assert "interrupted: the same command goes on from the newest checkpoint" in run.said
    assert "Traceback" not in run.said
    assert server.run(["train", file])[0] == [0]
    assert_same_run(tmp_path / "run", undisturbed)


def test_a_full_disk_keeps_the_earlier_checkpoints(
    server: Server, undisturbed: Path, recipe_file: Any, tmp_path: Path
) -> None:
    """A file cannot grow beyond a limit, which stands for the disk."""
    file = recipe_file()
    for _ in range(20):
        run = server.start(["train", file])
        while not list((tmp_path / "run/checkpoints").glob("step-*")):
            time.sleep(0.002)
        run.kill()
        run.wait()
        whole = [p.name for p in (tmp_path / "run/checkpoints").glob("step-*")]
        if whole == ["step-00000005"]:
            break
        shutil.rmtree(tmp_path / "run")  # it was further before the signal came: again
    assert whole == ["step-00000005"]
    statuses, said = server.run(["train", file], file_limit=500_000)
    assert statuses == [1] and "Traceback" not in said, said
    assert "a checkpoint could not be written" in said and "File too large" in said
    assert sorted(p.name for p in (tmp_path / "run/checkpoints").iterdir()) == ["step-00000005"]
    assert server.run(["train", file])[0] == [0]
    assert_same_run(tmp_path / "run", undisturbed)
