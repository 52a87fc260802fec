"""Checkpoints of flash-linear-attention load, and compute here what they compute there."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from fla_layers import layer_class, model_logits, shake, theirs
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from kdn.models import KDNForCausalLM
from kdn.models.fla import config_from_fla, load, state_dict_from_fla

SIZES = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_heads": 2,
    "head_dim": 8,
    "vocab_size": 40,
    "intermediate_size": 24,
}
CLASSES = {
    "kda": ("KDAConfig", "KDAForCausalLM"),
    "gated_deltanet": ("GatedDeltaNetConfig", "GatedDeltaNetForCausalLM"),
    "delta_net": ("DeltaNetConfig", "DeltaNetForCausalLM"),
}
ATTENTION = {"layers": [1], "num_heads": 2, "window_size": 5, "rope_theta": 500.0}


def build(kind: str, **settings: Any) -> PreTrainedModel:
    """A small model of that library with random weights."""
    models = theirs("fla.models")
    config_class, model_class = (getattr(models, name) for name in CLASSES[kind])
    torch.manual_seed(0)
    model = model_class(config_class(**SIZES | settings))
    assert isinstance(model, PreTrainedModel)
    shake(model)
    return model


def save(model: PreTrainedModel, folder: Path, **options: Any) -> Path:
    model.save_pretrained(folder, **options)
    return folder


def edit_config(folder: Path, **settings: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))


def check(ours: KDNForCausalLM, model: PreTrainedModel) -> None:
    tokens = torch.arange(2 * 24).view(2, 24) * 7 % SIZES["vocab_size"]
    with torch.no_grad():
        a, b = ours(tokens).logits, model_logits(model, tokens)
    assert a.dtype == b.dtype == torch.float32
    error = float((a - b).abs().max() / b.abs().max())
    assert error < 1e-4, f"{error:.1e}"


CHECKPOINTS: dict[str, tuple[str, dict[str, Any]]] = {
    "kda": ("kda", {}),
    "kda-options": ("kda", {"expand_v": 2.0, "allow_neg_eigval": True, "conv_size": 3, "norm_eps": 1e-2}),
    "kda-tied": ("kda", {"tie_word_embeddings": True}),
    "kda-no-convolution": ("kda", {"use_short_conv": False}),
    "gated-deltanet": ("gated_deltanet", {}),
    "gated-deltanet-no-gate": ("gated_deltanet", {"use_gate": False, "intermediate_size": None}),
    "deltanet": ("delta_net", {}),
    "deltanet-options": ("delta_net", {"expand_k": 0.5, "use_gate": True, "allow_neg_eigval": True}),
}


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_logits(name: str, tmp_path: Path) -> None:
    kind, settings = CHECKPOINTS[name]
    model = build(kind, **settings)
    check(load(save(model, tmp_path)), model)


def test_logits_of_gdn2(tmp_path: Path) -> None:
    """That library has GDN-2's layer but no model of it: here it stands in its KDA model."""
    model = build("kda")
    for block in model.model.layers:
        block.attn = shake(layer_class("gdn2")(hidden_size=16, num_heads=2, head_dim=8, norm_eps=1e-6))
    edit_config(save(model, tmp_path), model_type="gdn2")
    check(load(tmp_path), model)


@pytest.mark.parametrize("form", ["one", "list"])
def test_logits_of_a_hybrid(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its attention layers ask for a GPU package to be built: any object passes for it."""
    monkeypatch.setattr(theirs("fla.layers.attn"), "flash_attn_func", object())
    model = build("kda", attn=ATTENTION if form == "one" else [ATTENTION, {**ATTENTION, "layers": []}])
    ours = load(save(model, tmp_path))
    assert ours.config.mixers == ["kda", "attention"]
    check(ours, model)


@pytest.mark.parametrize("kind", CLASSES)
def test_absent_settings_are_that_librarys_defaults(kind: str) -> None:
    defaults = getattr(theirs("fla.models"), CLASSES[kind][0])().to_dict()
    assert config_from_fla({"model_type": kind}).to_dict() == config_from_fla(defaults).to_dict()


@pytest.mark.parametrize("ratio", [None, 3, 4])
def test_width_of_the_feed_forward_layer(ratio: int | None) -> None:
    mlp = theirs("fla.modules.mlp").GatedMLP(hidden_size=200, hidden_ratio=ratio)
    config = config_from_fla({"model_type": "kda", "hidden_size": 200, "hidden_ratio": ratio})
    assert config.intermediate_size == mlp.intermediate_size


def test_tokens_and_sizes() -> None:
    config = config_from_fla(
        {
            "model_type": "kda",
            **SIZES,
            "pad_token_id": 3,
            "bos_token_id": 4,
            "eos_token_id": [5, 6],
            "norm_eps": 1e-3,
        }
    )
    assert (config.pad_token_id, config.bos_token_id, config.eos_token_id) == (3, 4, [5, 6])
    assert {name: getattr(config, name) for name in SIZES} == SIZES
    assert config.norm_eps == 1e-3


def test_sharded(tmp_path: Path) -> None:
    model = build("kda")
    save(model, tmp_path, max_shard_size="8KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    check(load(tmp_path), model)


def test_repository_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the configuration and safetensors are asked for, nothing that would be unpickled."""
    model = build("kda")
    save(model, tmp_path)
    asked = {}

    def download(repo: str, allow_patterns: list[str]) -> str:
        asked[repo] = allow_patterns
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    check(load("owner/name"), model)
    assert all(x == "config.json" or ".safetensors" in x for x in asked["owner/name"])


def test_precision_is_the_checkpoints(tmp_path: Path) -> None:
    model = load(save(build("kda").bfloat16(), tmp_path))
    assert {x.dtype for x in model.parameters()} == {torch.bfloat16}


def test_saved_again_it_is_ours(tmp_path: Path) -> None:
    model = load(save(build("delta_net"), tmp_path / "theirs"))
    model.save_pretrained(tmp_path / "ours")
    again = KDNForCausalLM.from_pretrained(tmp_path / "ours").state_dict()
    for name, x in model.state_dict().items():
        assert torch.equal(x, again[name]), name


# --- errors ---


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        ("kda", "safe_gate", True),
        ("kda", "lower_bound", -5.0),
        ("kda", "num_v_heads", 4),
        ("kda", "conv_bias", True),
        ("kda", "attnres_block_size", 2),
        ("kda", "hidden_act", "powlu"),
        ("kda", "model_type", "gla"),
        ("gated_deltanet", "output_gate_activation", "sigmoid"),
        ("gated_deltanet", "num_v_heads", 12),
        ("delta_net", "qk_norm", "sum"),
        ("delta_net", "qk_activation", "relu"),
        ("delta_net", "use_beta", False),
        ("delta_net", "use_output_norm", False),
        ("delta_net", "expand_k", 0.33),
    ],
)
def test_what_cannot_be_expressed(kind: str, name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=name):
        config_from_fla({"model_type": kind, name: value})


@pytest.mark.parametrize(
    ("name", "attn"),
    [
        ("num_heads", {**ATTENTION, "num_heads": 4}),
        ("num_kv_heads", {**ATTENTION, "num_kv_heads": 1}),
        ("qkv_bias", {**ATTENTION, "qkv_bias": True}),
        ("qk_norm", {**ATTENTION, "qk_norm": True}),
        ("window_size", [ATTENTION, {**ATTENTION, "layers": [0], "window_size": 7}]),
        ("rope_theta", [ATTENTION, {**ATTENTION, "layers": [0], "rope_theta": 7.0}]),
    ],
)
def test_attention_that_cannot_be_expressed(name: str, attn: Any) -> None:
    with pytest.raises(ValueError, match=rf"attn\.{name}"):
        config_from_fla({"model_type": "kda", **SIZES, "attn": attn})


def test_attention_heads_have_the_size_of_the_others() -> None:
    with pytest.raises(ValueError, match="2 of 16 channels"):
        config_from_fla({"model_type": "kda", **SIZES, "head_dim": 16, "attn": ATTENTION})


def test_weights_that_do_not_fit() -> None:
    config = config_from_fla({"model_type": "kda", **SIZES})
    state = build("kda").state_dict()
    name = "model.layers.1.attn.A_log"
    with pytest.raises(ValueError, match=f"1 weights are missing .such as {name}"):
        state_dict_from_fla({k: x for k, x in state.items() if k != name}, config)
    with pytest.raises(ValueError, match=r"1 are not of this model .such as model.layers.1.attn.D"):
        state_dict_from_fla(state | {"model.layers.1.attn.D": torch.ones(2)}, config)
    with pytest.raises(ValueError, match=rf"1 have other sizes .such as {name}, \(3,\) and not \(2,\)"):
        state_dict_from_fla(state | {name: torch.ones(3)}, config)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="neither a folder nor the name of a repository"):
        load(tmp_path / "not" / "there")
    with pytest.raises(ValueError, match=r"no config.json there"):
        load(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="not valid JSON"):
        load(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "kda", **SIZES}))
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ValueError, match="safetensors only"):
        load(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\0" * 20)
    with pytest.raises(ValueError, match=r"model.safetensors is damaged"):
        load(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../b.safetensors"}}')
    with pytest.raises(ValueError, match="outside of the folder"):
        load(tmp_path)


def test_frequencies_of_older_checkpoints_are_not_weights(tmp_path: Path) -> None:
    model = build("kda")
    file = save(model, tmp_path) / "model.safetensors"
    save_file(load_file(file) | {"model.layers.0.attn.rotary.inv_freq": torch.ones(4)}, file)
    check(load(tmp_path), model)
