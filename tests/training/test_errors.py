"""What goes wrong is said in one sentence, before the first step where it can be, and loses nothing."""

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from processes import Server
from runs import losses, write_shards

from kdn.cli import main
from kdn.training import TrainingStopped, loop
from kdn.training.checkpoint import Checkpoints, opened
from kdn.training.data import DataError
from kdn.training.data.shards import ShardWriter, TokenShards
from kdn.training.loop import replay, train
from kdn.training.metrics import Metrics
from kdn.training.parallel import joined
from kdn.training.recipe import Recipe, RecipeError, made_of

MakeRecipe = Callable[..., Recipe]


def unfinished(folder: Path) -> Path:
    with (
        pytest.raises(RuntimeError),
        ShardWriter(
            folder, vocab_size=97, eos_token_id=0, tokenizer={}, source={}, shard_tokens=50
        ) as writer,
    ):
        writer.add(range(1, 90))
        raise RuntimeError("stopped")
    return folder


def too_short(folder: Path) -> Path:
    with ShardWriter(folder, vocab_size=97, eos_token_id=0, tokenizer={}, source={}) as writer:
        writer.add([1, 2, 3])
    return folder


def cut_off(folder: Path) -> Path:
    file = write_shards(folder, 30, 0) / "000000.bin"
    file.write_bytes(file.read_bytes()[:100])
    return folder


BAD_DATA: dict[str, Callable[[Path], Path]] = {
    "holds no token shards": lambda folder: folder,
    "is unfinished: 1 whole shards": unfinished,
    "fewer than one sequence of 64": too_short,
    "is damaged: it has 100 bytes": cut_off,
    "has token ids up to 299, the model only 97: set model.vocab_size=300": lambda folder: write_shards(
        folder, 30, 0, vocabulary=300
    ),
}


@pytest.mark.parametrize("said", BAD_DATA)
def test_bad_data_stop_before_the_first_step(said: str, recipe: MakeRecipe, tmp_path: Path) -> None:
    bad = BAD_DATA[said](tmp_path / "bad")
    with pytest.raises(DataError) as caught:
        train(recipe(data={"train": str(bad)}))
    assert said in str(caught.value) and str(bad) in str(caught.value)
    if "fewer" not in said:  # validation may be shorter than a sequence
        with pytest.raises(DataError) as caught:
            train(recipe(data={"validation": str(bad)}))
        assert said in str(caught.value)
        assert not (tmp_path / "run").exists()


def test_the_command_says_it_in_one_line(recipe_file: Any, tmp_path: Path, server: Server) -> None:
    statuses, said = server.run(["train", recipe_file(data={"train": "nowhere"})])
    assert statuses == [1]
    assert said == "kdn: nowhere holds no token shards: there is no index.json (kdn data prepare makes it)\n"
    with pytest.raises(SystemExit, match=r"^kdn: \[train\] has no key 'tokns', did you mean 'tokens'\?$"):
        main(["train", str(recipe_file()), "train.tokns=3"])
    with pytest.raises(SystemExit, match=r"^kdn: no recipe nowhere\.toml$"):
        main(["train", "nowhere.toml"])


def test_a_token_beyond_the_vocabulary_stops_and_loses_nothing(
    recipe_file: Any, tmp_path: Path, server: Server
) -> None:
    """Opening shards cannot see it; the run stops when it reads it, and goes on when the shards are whole again."""
    file = write_shards(tmp_path / "data", 300, 0) / "000000.bin"
    good = file.read_bytes()
    bad = bytearray(good)
    at = 2 * (len(good) // 4)
    bad[at : at + 2] = b"\xff\x7f"
    file.write_bytes(bad)
    recipe = recipe_file(data={"train": str(tmp_path / "data")}, train={"tokens": 40 * 512})
    statuses, said = server.run(["train", recipe])
    assert statuses == [1] and "Traceback" not in said
    assert f"kdn: {file} holds token 32767, beyond the vocabulary of 97\n" in said
    stopped = losses(tmp_path / "run")
    file.write_bytes(good)
    assert server.run(["train", recipe])[0] == [0]
    assert losses(tmp_path / "run")[: len(stopped)] == stopped


def test_a_log_that_cannot_be_written_is_one_sentence(recipe: MakeRecipe) -> None:
    metrics = Metrics(recipe(), first=True)
    metrics.file = open("/dev/full", "a")  # noqa: SIM115
    with pytest.raises(TrainingStopped, match="/dev/full cannot be written: No space left on device"):
        metrics.log(1, {"loss": 1.0})
    metrics.close()


def test_data_is_a_command(shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "verify", str(shards / "train")]) == 0
    assert "all in order" in capsys.readouterr().out
    assert main(["data", "verify", str(tmp_path)]) == 1
    text = tmp_path / "text.jsonl"
    text.write_text('{"txt": "hello"}\n')
    assert main(["data", "prepare", str(text), "--out", str(tmp_path), "--train-tokenizer", "300"]) == 1
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 2 and all(line.startswith("kdn: ") for line in said)
    assert "line 1: there is no column 'text', there are txt" in said[1]


# At a rate like this weights are of no use after one step.
EXPLODING = {"optimizer": {"peak": 1e15, "final": 1e15, "warmup": 0.0}, "data": {"packing": "concatenate"}}


def test_nan_stops_with_a_state_that_reproduces_it(recipe: MakeRecipe, tmp_path: Path, shards: Path) -> None:
    exploding = recipe(**EXPLODING)
    with pytest.raises(TrainingStopped) as caught:
        train(exploding)
    said = str(caught.value)
    saved = tmp_path / "run/checkpoints/nan-00000002"
    assert "loss nan" in said and "at step 2, sequences 8 to 15 of the data's order" in said
    assert str(saved) in said
    about = json.loads((saved / "kdn.json").read_text())["about"]
    assert (about["step"], about["position"]) == (1, 8)
    loss, _ = replay(exploding, saved)
    assert math.isnan(loss)
    assert all(weight.isfinite().all() for weight in weights_in(exploding, saved))  # the step was not taken
    # Neither the state alone nor the batch alone.
    ok, _ = replay(exploding, saved_at_the_start(exploding, tmp_path))
    assert math.isfinite(ok)


def weights_in(recipe: Recipe, checkpoint: Path) -> list[torch.Tensor]:
    with joined(recipe) as ranks:
        model = loop._make_model(recipe, recipe.model_config(), ranks)
        optimizer = loop.make_optimizer(model, recipe)
        Checkpoints(checkpoint.parent, 1, ranks).load(opened(checkpoint), model, optimizer)
    return [parameter.detach() for parameter in model.parameters()]


def saved_at_the_start(recipe: Recipe, folder: Path) -> Path:
    """A checkpoint before any step, at the second step's position."""
    config = recipe.model_config()
    same = made_of(recipe, config, TokenShards(recipe.data.train).checksum)
    with joined(recipe) as ranks:
        model = loop._make_model(recipe, config, ranks)
        checkpoints = Checkpoints(folder, 1, ranks)
        about = {"step": 1, "position": 8, "made of": same}
        where = checkpoints.save(model, loop.make_optimizer(model, recipe), about)
        checkpoints.finish()
    return where


def test_nan_is_one_sentence_of_the_command_and_can_be_replayed(
    server: Server, recipe_file: Any, tmp_path: Path
) -> None:
    file = recipe_file(**EXPLODING)
    statuses, said = server.run(["train", file])
    assert statuses == [1] and "Traceback" not in said and "kdn: loss nan" in said
    nan = tmp_path / "run/checkpoints/nan-00000002"
    statuses, said = server.run(["train", file, "--replay", nan])
    assert statuses == [0] and "loss nan, gradient norm nan\n" in said
    statuses, said = server.run(["train", file, "--replay", tmp_path])
    assert statuses == [1] and f"kdn: {tmp_path} is no whole checkpoint" in said


def test_writers_that_are_missing_are_said_before_training(
    recipe: MakeRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kdn.training import metrics

    monkeypatch.setattr(metrics, "find_spec", lambda name: None)
    for key, value, package in (("tensorboard", True, "tensorboard"), ("wandb", "project", "wandb")):
        with pytest.raises(
            RecipeError, match=f"log.{key} is set, but {package} is not installed: pip install"
        ):
            train(recipe(log={key: value}))
    assert not (tmp_path / "run").exists()


def test_writers_are_told_all_that_is_logged(
    recipe: MakeRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stand-ins for TensorBoard and W&B, with the calls that theirs have."""
    from kdn.training import metrics

    told: dict[str, list[Any]] = {"tensorboard": [], "wandb": [], "init": []}

    class SummaryWriter:
        def __init__(self, log_dir: str, purge_step: int) -> None:
            told["init"].append((log_dir, purge_step))

        def add_scalar(self, name: str, value: float, step: int) -> None:
            told["tensorboard"].append((step, name, value))

        def flush(self) -> None: ...

    class Run:
        def log(self, numbers: dict[str, float], step: int) -> None:
            told["wandb"].append((step, numbers))

    def init(**options: Any) -> Run:
        told["init"].append(options)
        return Run()

    monkeypatch.setattr(metrics, "find_spec", lambda name: True)
    board, wandb = ModuleType("torch.utils.tensorboard"), ModuleType("wandb")
    vars(board)["SummaryWriter"] = SummaryWriter
    vars(wandb).update(init=init, util=SimpleNamespace(generate_id=lambda: "abc"))
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", board)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    train(recipe(train={"tokens": 2 * 512}, log={"tensorboard": True, "wandb": "mine"}))
    assert [step for step, _ in told["wandb"]] == [1, 2]
    assert {"loss", "tokens/s", "effective write"} <= told["wandb"][0][1].keys()
    assert (1, "loss", told["wandb"][0][1]["loss"]) in told["tensorboard"]
    assert told["init"][0] == (str(tmp_path / "run/tensorboard"), 1)
    assert told["init"][1]["project"] == "mine" and told["init"][1]["id"] == "abc"


LOGGED = {
    "step",
    "tokens",
    "loss",
    "learning rate",
    "gradient norm",
    "tokens/s",
    "seconds per step",
    "MFU",
    "memory GiB",
    "effective write",
    "state norm",
}


@pytest.mark.parametrize("packing", ["documents", "concatenate"])
def test_what_is_logged(
    packing: str, recipe: MakeRecipe, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(recipe(train={"tokens": 2 * 512}, data={"packing": packing}))
    rows = [json.loads(line) for line in (tmp_path / "run/log.jsonl").read_text().splitlines()]
    assert [set(row) for row in rows] == [LOGGED] * 2
    for row in rows:
        assert all(value > 0 and math.isfinite(value) for value in row.values())
    assert 0 < rows[0]["effective write"] < 1
    shown = capsys.readouterr().err.splitlines()
    assert len(shown) == 2 and all("‖S‖" in line and "GiB" in line and "MFU" in line for line in shown)


def test_what_is_watched_is_the_models_own(recipe: MakeRecipe, tmp_path: Path, shards: Path) -> None:
    """The first step's numbers, computed again from the model as it starts."""
    frozen = recipe(
        train={"tokens": 512}, optimizer={"peak": 1e-30, "final": 1e-30}, data={"packing": "concatenate"}
    )
    train(frozen)
    (row,) = (json.loads(line) for line in (tmp_path / "run/log.jsonl").read_text().splitlines())
    with joined(frozen) as ranks:
        model = loop._make_model(frozen, frozen.model_config(), ranks)
        batch = next(loop._batches(frozen, ranks, TokenShards(shards / "train"), 0))
    with torch.no_grad():
        cache = model(input_ids=batch.input_ids[:1], use_cache=True).past_key_values
    memories = torch.stack([cache.state(i).memory for i in range(len(cache))])
    assert row["state norm"] == pytest.approx(float(memories.flatten(-2).norm(dim=-1).mean()), rel=1e-4)


def test_a_terminal_gets_a_live_bar(recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch) -> None:
    import io

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("COLUMNS", "80")
    train(recipe(train={"tokens": 2 * 512}))
    drawn = terminal.getvalue().split("\r\x1b[K")
    assert drawn[1].startswith("━" * 10 + "─" * 10 + " step 1/2")
    assert drawn[2].startswith("━" * 20 + " step 2/2")
    assert all(len(line.rstrip("\n")) <= 79 for line in drawn)


def test_activation_checkpoints_change_nothing(recipe: MakeRecipe, tmp_path: Path) -> None:
    train(recipe("plain", train={"tokens": 3 * 512}))
    train(recipe("checkpointed", train={"tokens": 3 * 512, "checkpoint_activations": True}))
    assert losses(tmp_path / "plain") == losses(tmp_path / "checkpointed")


def test_micro_batches_add_up_to_the_same_step(recipe: MakeRecipe, tmp_path: Path) -> None:
    for micro in (1, 8):
        train(recipe(str(micro), train={"tokens": 5 * 512, "micro_batch": micro}))
    pairs = zip(losses(tmp_path / "1"), losses(tmp_path / "8"), strict=True)
    assert max(abs(a - b) for (_, a), (_, b) in pairs) < 1e-5


def test_what_is_trained_loads_as_a_model(recipe: MakeRecipe, shards: Path, tmp_path: Path) -> None:
    """And has the validation loss that training reported, over every validation token."""
    from kdn.models import KDNForCausalLM
    from kdn.training.data.batches import Batches
    from kdn.training.data.shards import TokenShards

    result = train(recipe(data={"validation": str(shards / "validation")}, train={"tokens": 5 * 512}))
    model = KDNForCausalLM.from_pretrained(result.folder)
    total, count = 0.0, 0
    for batch in Batches.in_order(TokenShards(shards / "validation"), length=64, packing="documents"):
        with torch.no_grad():
            found = model(input_ids=batch.input_ids, targets=batch.targets, cu_seqlens=batch.cu_seqlens)
        here = int((batch.targets != -100).sum())
        total, count = total + float(found.loss) * here, count + here
    assert result.validation_loss == pytest.approx(total / count, abs=1e-5)
