"""Saving and loading: safetensors only, whole or not at all, and known to transformers' Auto classes."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModel, AutoModelForCausalLM

from kdn.models import KDNConfig, KDNForCausalLM, KDNModel

SIZES: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_heads": 2,
    "head_dim": 16,
}
HYBRID: dict[str, Any] = {"layers": ["kdn-isotropic", "attention"], "window": 4}


def model_of(**fields: Any) -> KDNForCausalLM:
    torch.manual_seed(0)
    return KDNForCausalLM(KDNConfig(**(SIZES | fields))).eval()


def ids() -> Tensor:
    return torch.arange(24).view(2, 12)


def assert_same(a: KDNForCausalLM, b: KDNForCausalLM) -> None:
    mine, theirs = a.state_dict(), b.state_dict()
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(value, theirs[name]) for name, value in mine.items())
    torch.testing.assert_close(a(ids()).logits, b(ids()).logits, atol=0, rtol=0)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    model_of().save_pretrained(folder)
    return folder


# --- round trips ---


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("fields", [{"mixer": "kdn-diagonal"}, HYBRID, {"mixer": "mamba3-mimo"}])
def test_a_saved_model_is_the_same_model(tmp_path: Path, fields: dict[str, Any], tied: bool) -> None:
    model = model_of(**fields, tie_word_embeddings=tied)
    with torch.no_grad():  # away from every value that initialisation could give
        for parameter in model.parameters():
            parameter.mul_(1.5).add_(0.01)
    model.save_pretrained(tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
    }
    assert ("lm_head.weight" in load_file(tmp_path / "model.safetensors")) is not tied
    torch.manual_seed(99)
    loaded = KDNForCausalLM.from_pretrained(tmp_path).eval()
    assert_same(model, loaded)
    assert (loaded.lm_head.weight is loaded.model.embeddings.weight) is tied


def test_the_backbone_loads_alone(saved: Path) -> None:
    model = model_of()
    for backbone in (KDNModel.from_pretrained(saved), AutoModel.from_pretrained(saved)):
        assert type(backbone) is KDNModel
        hidden = backbone.eval()(ids()).last_hidden_state
        torch.testing.assert_close(model.lm_head(hidden), model(ids()).logits)


def test_weights_load_as_bfloat16(saved: Path) -> None:
    loaded = KDNForCausalLM.from_pretrained(saved, dtype=torch.bfloat16).eval()
    assert {p.dtype for p in loaded.parameters()} == {torch.bfloat16}
    expected = {name: value.bfloat16() for name, value in model_of().state_dict().items()}
    assert all(torch.equal(value, expected[name]) for name, value in loaded.state_dict().items())
    assert loaded(ids()).logits.isfinite().all()


def test_a_model_may_be_saved_in_shards(tmp_path: Path) -> None:
    model = model_of()
    model.save_pretrained(tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    assert_same(model, KDNForCausalLM.from_pretrained(tmp_path).eval())
    last = sorted(tmp_path.glob("model-*.safetensors"))[-1]
    last.write_bytes(last.read_bytes()[:-100])
    with pytest.raises(ValueError, match="damaged or cut off"):
        KDNForCausalLM.from_pretrained(tmp_path)
    last.unlink()
    with pytest.raises(ValueError, match=rf"{last.name} is missing, which has a part of the weights"):
        KDNForCausalLM.from_pretrained(tmp_path)


# --- what is refused ---


def rewrite_config(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return change


def rewrite_weights(change: Callable[[dict[str, Tensor]], Any]) -> Callable[[Path], None]:
    def rewrite(folder: Path) -> None:
        weights = load_file(folder / "model.safetensors")
        change(weights)
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})

    return rewrite


def rewrite_bytes(change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def rewrite(folder: Path) -> None:
        file = folder / "model.safetensors"
        file.write_bytes(change(file.read_bytes()))

    return rewrite


def pickled_weights(folder: Path) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (rewrite_bytes(lambda b: b[: len(b) // 2]), "weights are damaged or cut off"),
        (rewrite_bytes(lambda b: b[:20] + b"\xff\xfe" + b[22:]), "weights are damaged or cut off"),
        (rewrite_bytes(lambda b: b""), "weights are damaged or cut off"),
        (lambda folder: (folder / "model.safetensors").unlink(), "no weights there"),
        (pickled_weights, "no weights there"),
        (rewrite_weights(lambda w: w.pop("model.norm.weight")), r"1 weights are missing .*model\.norm"),
        (rewrite_weights(lambda w: w.update(x=torch.ones(1))), r"1 are not of this model \(such as x\)"),
        (rewrite_config(num_hidden_layers=3), r"weights are missing \(such as model\.layers\.2\."),
        (rewrite_config(num_hidden_layers=1), r"are not of this model \(such as model\.layers\.1\."),
        (rewrite_config(mixer="kda"), "missing .* and .* not of this model"),
        (rewrite_config(hidden_size=48), "do not have the sizes that config.json says"),
        (rewrite_config(hidden_size=10**9), "do not have the sizes that config.json says"),
        (rewrite_config(num_heads=0), "num_heads must be a whole number ≥ 1, got 0"),
        (rewrite_config(mixer="kdn"), "mixer must be one of"),
        (rewrite_config(hidden_sizes=3), "no field 'hidden_sizes'"),
        (rewrite_config(model_type="llama"), "model type 'llama', not 'kdn'"),
        (lambda folder: (folder / "config.json").write_text('{"mod'), "config.json: not valid JSON"),
        (
            lambda folder: (folder / "config.json").write_text("[]"),
            "config.json: not a JSON object but a list",
        ),
        (rewrite_config(num_hidden_layers=10**7), "num_hidden_layers must be ≤ 10,000"),
        (rewrite_config(dtype="float33"), "dtype must be one of torch's"),
        (lambda folder: (folder / "config.json").unlink(), "no config.json"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_one_clear_error(
    saved: Path, tmp_path: Path, damage: Callable[[Path], Any], said: str
) -> None:
    folder = tmp_path / "bad"
    shutil.copytree(saved, folder)
    damage(folder)
    with pytest.raises(ValueError, match=said) as caught:
        KDNForCausalLM.from_pretrained(folder)
    assert "\n" not in str(caught.value)


def test_nothing_is_ever_unpickled(saved: Path) -> None:
    with pytest.raises(ValueError, match="use_safetensors=False"):
        KDNForCausalLM.from_pretrained(saved, use_safetensors=False)


# --- in a process of its own ---


def fresh(program: str, **environment: str) -> str:
    run = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"} | environment,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


@pytest.mark.parametrize(
    "imports",
    [
        "import transformers, kdn",
        "import kdn, transformers",
        "from transformers import AutoModelForCausalLM, AutoConfig; import kdn",
        "import kdn; from transformers import GenerationMixin; import transformers",
    ],
)
def test_auto_classes_know_the_models_once_kdn_is_imported(saved: Path, imports: str) -> None:
    program = f"""
import sys
{imports}
import transformers
assert "kdn.models" not in sys.modules, "nothing is loaded until a model is"
model = transformers.AutoModelForCausalLM.from_pretrained({str(saved)!r})
config = transformers.AutoConfig.from_pretrained({str(saved)!r})
print(type(model).__module__, type(model).__name__, type(config).__name__, config.num_heads)
print(type(transformers.AutoConfig.for_model("kdn", num_heads=3)).__module__)
assert not [finder for finder in sys.meta_path if type(finder).__module__.startswith("kdn")]
"""
    lines = fresh(program).splitlines()
    assert lines == ["kdn.models.modeling KDNForCausalLM KDNConfig 2", "kdn.models.config"]


def test_a_model_for_a_hub_loads_as_remote_code(tmp_path: Path) -> None:
    """Without `import kdn`: the folder's own small file does it."""
    folder, cache = tmp_path / "model", tmp_path / "modules"
    program = f"""
import torch, kdn
kdn.KDNForCausalLM.register_for_auto_class("AutoModelForCausalLM")
torch.manual_seed(0)
kdn.KDNForCausalLM(kdn.KDNConfig(**{SIZES!r})).save_pretrained({str(folder)!r})
"""
    fresh(program)
    assert {file.name for file in folder.glob("*.py")} == {"hub.py"}
    auto_map = json.loads((folder / "config.json").read_text())["auto_map"]
    assert auto_map["AutoModelForCausalLM"] == "hub.KDNForCausalLM"
    assert auto_map["AutoConfig"] == "hub.KDNConfig"
    program = f"""
import transformers
model = transformers.AutoModelForCausalLM.from_pretrained({str(folder)!r}, trust_remote_code=True)
print(type(model).__module__, float(model.lm_head.weight.sum()))
"""
    module, total = fresh(program, HF_MODULES_CACHE=str(cache)).split()
    assert module == "kdn.models.modeling"
    assert float(total) == pytest.approx(model_of().lm_head.weight.sum().item(), abs=1e-4)
    # and where kdn is imported, nobody has to trust anything
    assert_same(model_of(), AutoModelForCausalLM.from_pretrained(folder).eval())
