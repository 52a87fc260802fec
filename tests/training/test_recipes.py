"""Recipes: what they say is checked, and those of the paper are the paper's."""

import dataclasses
import json
import math
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import write_shards

from kdn.models import KDNForCausalLM
from kdn.training.loop import train
from kdn.training.optimizer import make_optimizer
from kdn.training.recipe import RecipeError, build, load

ROOT = Path(__file__).resolve().parents[2]
PAPER = {path.stem: path for path in sorted((ROOT / "recipes" / "paper").glob("*.toml"))}
RECURRENT = ("kda", "mamba3-siso", "mamba3-mimo", "gdn2", "kdn-isotropic", "kdn-diagonal")
ROWS = {
    *(f"{mixer}-750m" for mixer in ("deltanet", "gated-deltanet", *RECURRENT)),
    *(f"{mixer}-1.3b" for mixer in RECURRENT),
    "attention-1.3b",
    *(f"{mixer}-swa-1.3b" for mixer in RECURRENT),
}
# Fields that differ from kdn-diagonal-750m; K is 128. "Noises learned" at μ = 1 is the row μ = 1.
ABLATIONS: dict[str, dict[str, Any]] = {
    "mu-1": {"info_scale": 1.0},
    "mu-sqrt-k": {"info_scale": math.sqrt(128)},
    "mu-4k": {"info_scale": 512.0},
    "mu-learned": {"learn_info_scale": True},
    "r-1": {"info_scale": 1.0, "obs_noise": 1.0},
    "r-omega-1": {"info_scale": 1.0, "obs_noise": 1.0, "process_noise": 1.0},
}

WRONG: dict[str, dict[str, Any]] = {
    "a recipe has no section [trian], did you mean 'train'?": {"trian": {}},
    "[train] must be a section of keys, got 3": {"train": 3},
    "[train] has no key 'tokns', did you mean 'tokens'?": {"train": {"tokns": 1}},
    "[optimizer] has no key 'xyz'; it has peak, final": {"optimizer": {"xyz": 1}},
    "train.tokens must be a whole number, got 'many'": {"train": {"tokens": "many"}},
    "train.tokens must be a whole number, got 1.5": {"train": {"tokens": 1.5}},
    "train.compile must be true or false, got 1": {"train": {"compile": 1}},
    "optimizer.peak must be a number, got True": {"optimizer": {"peak": True}},
    "log.wandb must be a text or none, got 3": {"log": {"wandb": 3}},
    "got 'bf16', did you mean 'bfloat16'?": {"train": {"dtype": "bf16"}},
    "data.packing must be one of 'concatenate', 'documents', got 'none'": {"data": {"packing": "none"}},
    "train.batch_tokens must be a multiple of data.length 4096, got 5000": {"train": {"batch_tokens": 5000}},
    "must hold at least one batch": {"train": {"tokens": 10}},
    "optimizer.final must be in (0, peak]": {"optimizer": {"final": 1.0}},
    "optimizer.warmup must be a share": {"optimizer": {"warmup": 2.0}},
    "optimizer.clip must be > 0": {"optimizer": {"clip": 0.0}},
    "checkpoint.keep must be ≥ 1, got 0": {"checkpoint": {"keep": 0}},
    "parallel.context needs data.packing": {"data": {"packing": "documents"}, "parallel": {"context": 2}},
    "parallel.context > 1 and train.compile": {"train": {"compile": True}, "parallel": {"context": 2}},
    "[model] has no key 'vocab_sise', did you mean 'vocab_size'?": {"model": {"vocab_sise": 3}},
    "model.vocab_size must be a whole number, got '3'": {"model": {"vocab_size": "3"}},
    "[model] has no key 'info_scle', did you mean 'info_scale'?": {"model": {"info_scle": 1.0}},
    "did you mean 'kdn-diagonal-tiny'": {"model": {"preset": "kdn-diagonl-tiny"}},
    "model.preset must be a text, got 3": {"model": {"preset": 3}},
    "[model] has no key 'info_scale'; it has": {"model": {"preset": "kda-tiny", "info_scale": 1.0}},
    "info_scale must be > 0, got -1.0": {"model": {"preset": "kdn-diagonal-tiny", "info_scale": -1.0}},
    "model.tie_word_embeddings must be true or false": {"model": {"tie_word_embeddings": "yes"}},
    "did you mean 'kda'?": {"model": {"mixer": "kad"}},
}


@pytest.mark.parametrize("said", WRONG)
def test_a_wrong_recipe_is_told_what_would_do(said: str) -> None:
    with pytest.raises(RecipeError) as caught:
        build(WRONG[said]).model_config()
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_overrides_are_read_as_toml(tmp_path: Path) -> None:
    file = tmp_path / "recipe.toml"
    file.write_text('[data]\nvalidation = "there"\n')
    overrides = ["train.tokens=1e9", "model.preset=kda-tiny", "data.validation=none", "train.compile=true"]
    recipe = load(file, overrides)
    assert recipe.train.tokens == 10**9 and recipe.model["preset"] == "kda-tiny"
    assert recipe.data.validation is None and recipe.train.compile is True
    hybrid = load(file, ['model.layers=["kda", "attention"]', "model.preset=kda-tiny", "model.window=8"])
    assert hybrid.model_config().mixers == ["kda", "attention"]
    for wrong, said in {
        "train.tokens": "an override is written section.key=value, got 'train.tokens'",
        "tokens=3": "an override is written section.key=value, got 'tokens=3'",
        "train.tokns=3": "did you mean 'tokens'",
    }.items():
        with pytest.raises(RecipeError, match=said):
            load(file, [wrong])


def test_files_that_are_no_recipes(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"no recipe .*missing"):
        load(tmp_path / "missing.toml")
    (tmp_path / "bad.toml").write_bytes(b"[train\n")
    with pytest.raises(RecipeError, match=r"bad\.toml is not valid TOML"):
        load(tmp_path / "bad.toml")
    with pytest.raises(RecipeError, match="cannot be read"):
        load(tmp_path)


def test_the_learning_rate_rises_to_the_peak_and_falls_to_the_final_rate() -> None:
    recipe = build({"train": {"tokens": 1000, "batch_tokens": 10}, "data": {"length": 10}})
    rates = [recipe.learning_rate(step) for step in range(100)]
    assert recipe.steps == 100 and recipe.warmup_steps == 1
    recipe = dataclasses.replace(recipe, optimizer=dataclasses.replace(recipe.optimizer, warmup=0.1))
    rates = [recipe.learning_rate(step) for step in range(101)]
    assert rates[:10] == pytest.approx([4e-5 * i for i in range(1, 11)])
    assert max(rates) == rates[10] == pytest.approx(4e-4) and rates[100] == pytest.approx(4e-5)
    assert rates[55] == pytest.approx((4e-4 + 4e-5) / 2)
    assert rates[10:] == sorted(rates[10:], reverse=True)


def test_matrices_decay_and_nothing_else() -> None:
    recipe = build({"model": {"preset": "kdn-diagonal-tiny"}})
    with torch.device("meta"):
        model = KDNForCausalLM(recipe.model_config())
    names = {id(p): name for name, p in model.named_parameters()}
    optimizer = make_optimizer(model, recipe)
    decayed, others = ({names[id(p)] for p in group["params"]} for group in optimizer.param_groups)
    assert [g["weight_decay"] for g in optimizer.param_groups] == [0.1, 0.0]
    assert optimizer.defaults["fused"] and optimizer.defaults["betas"] == (0.9, 0.95)
    assert {"model.embeddings.weight", "model.layers.0.mixer.q_proj.weight"} <= decayed
    assert decayed | others == set(names.values())
    for word in ("norm", "bias", "conv", "A_log", "prior"):
        assert not any(word in name for name in decayed)


# --- the paper's ---


def test_the_papers_rows_are_all_there() -> None:
    assert set(PAPER) == ROWS | {f"kdn-diagonal-750m-{name}" for name in ABLATIONS}


@pytest.mark.parametrize("name", PAPER)
def test_a_recipe_of_the_paper_says_what_the_paper_does(name: str) -> None:
    recipe = load(PAPER[name])
    large = "1.3b" in name
    assert (recipe.steps, recipe.warmup_steps) == ((190_734, 1_907) if large else (95_367, 953))
    assert recipe.train.tokens == (100e9 if large else 50e9)
    assert recipe.train.batch_tokens == 524_288 and recipe.data.length == 4096
    assert (recipe.optimizer.peak, recipe.optimizer.final) == (4e-4, 4e-5)
    assert recipe.data.packing == "concatenate"
    assert recipe.train.dtype == "bfloat16"
    assert Path(recipe.checkpoint.folder).name == name
    same = load(PAPER["kdn-diagonal-750m"])
    assert (recipe.data, recipe.optimizer) == (same.data, same.optimizer)
    assert recipe.train.seed == same.train.seed
    ablation = ABLATIONS.get(name.removeprefix("kdn-diagonal-750m-"))
    model = {"preset": "kdn-diagonal-750m" if ablation else name, **(ablation or {})}
    if ablation and "obs_noise" in ablation:  # has fewer parameters, and so another width
        model["intermediate_size"] = recipe.model["intermediate_size"]
    assert recipe.model == model


@pytest.mark.parametrize("name", PAPER)
def test_a_recipe_of_the_paper_has_the_papers_parameters(name: str) -> None:
    with torch.device("meta"):
        model = KDNForCausalLM(load(PAPER[name]).model_config())
    blocks = sum(p.numel() for p in model.model.layers.parameters())
    exactly = {"kdn-isotropic-1.3b": 1_302_390_288, "kdn-diagonal-1.3b": 1_302_348_492}
    if name in exactly:
        assert blocks == exactly[name]
    assert blocks == pytest.approx(1_302_390_288 if "1.3b" in name else 750_000_000, rel=3e-4)
    assert model.lm_head.weight.shape == (32_000, 2304 if "1.3b" in name else 2048)
    assert model.lm_head.weight is not model.model.embeddings.weight


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_shards(tmp_path_factory.mktemp("words") / "shards", 20, 0)


def reduced(name: str) -> list[str]:
    """Overrides that keep what a recipe is about and make all of it small."""
    mixers = load(PAPER[name]).model_config().mixers[:2]
    sizes = {"hidden_size": 32, "num_heads": 2, "head_dim": 16, "intermediate_size": 48, "vocab_size": 97}
    model = {**sizes, "layers": mixers, "num_hidden_layers": 2}
    if "attention" in mixers:
        model["window"] = 8
    if any(mixer.startswith("mamba3") for mixer in mixers):
        model["value_head_dim"] = 16
    keys: dict[str, Any] = {f"model.{key}": value for key, value in model.items()}
    keys |= {"data.length": 16, "train.batch_tokens": 128, "train.tokens": 256, "train.micro_batch": 4}
    return [f"{key}={json.dumps(value)}" for key, value in keys.items()]


@pytest.mark.parametrize("name", PAPER)
def test_a_recipe_of_the_paper_trains_at_a_reduced_size(name: str, words: Path, tmp_path: Path) -> None:
    places = [f'data.train="{words}"', f'data.validation="{words}"', f'checkpoint.folder="{tmp_path}"']
    # Compiling is not what this is about, and takes longer than all else.
    recipe = load(PAPER[name], [*reduced(name), *places, "train.compile=false", "train.validate_tokens=64"])
    result = train(recipe)
    assert result.steps == 2 and math.isfinite(result.loss)
    assert result.validation_loss == pytest.approx(math.log(97), rel=0.1)


def test_small_recipes_differ_in_the_model_only() -> None:
    for scale in ("tiny", "30m"):
        one, other = (
            tomllib.loads((ROOT / f"recipes/small/{mixer}-{scale}.toml").read_text())
            for mixer in ("kdn-diagonal", "kda")
        )
        for part in (one, other):
            del part["model"], part["checkpoint"]["folder"]
        assert one == other
        for mixer in ("kdn-diagonal", "kda"):
            load(ROOT / f"recipes/small/{mixer}-{scale}.toml").model_config()
