"""`kdn params`, `kdn generate` and `kdn probe` on tiny models, end to end, and how they answer mistakes."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from kdn import cli
from kdn.models import KDNCache, KDNForCausalLM, KDNModel
from kdn.models.presets import parameter_table, preset
from kdn.probe import effective_writes
from kdn.progress import progress

WORDS = ("<s>", "</s>", "the", "cat", "dog", "sat", "on", "mat", "a", ".")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model and a tokenizer of ten words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("models") / "cats"
    torch.manual_seed(1)
    KDNForCausalLM(preset("kdn-diagonal-tiny", vocab_size=len(WORDS))).save_pretrained(folder)
    words = models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="a")
    tokenizer = Tokenizer(words)
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>").save_pretrained(
        folder
    )
    return folder


def said(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    capsys.readouterr()
    assert cli.main([str(x) for x in arguments]) == 0
    return capsys.readouterr().out


def refused(*arguments: object) -> str:
    """The sentence with which a command stops."""
    with pytest.raises(SystemExit) as ended:
        cli.main([str(x) for x in arguments])
    assert isinstance(ended.value.code, str)
    return ended.value.code


# --- params ---


def test_params_has_the_papers_numbers(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    names = ["kdn-isotropic-1.3b", "kdn-diagonal-1.3b"]
    file = tmp_path / "new" / "params.json"
    printed = said(capsys, "params", *names, "--json", file)
    assert "1,302,390,288" in printed and "1,302,348,492" in printed and "without embeddings" in printed
    rows = json.loads(file.read_text(encoding="utf-8"))
    assert rows == [row._asdict() for row in parameter_table(names)]


def test_params_of_one_scale(capsys: pytest.CaptureFixture[str]) -> None:
    lines = said(capsys, "params", "--scale", "tiny").partition("\n\n")[0].splitlines()[1:]
    assert {"kdn-diagonal-tiny", "attention-tiny"} <= {line.split()[0] for line in lines}
    assert all(line.split()[0].endswith("-tiny") for line in lines)
    assert "kdn-diagonal-tiny" in refused("params", "kdn-diagonal-tinny")
    assert "750m" in refused("params", "--scale", "75m")


def test_results_that_cannot_be_written_are_said_before_the_work(saved: Path, tmp_path: Path) -> None:
    file = tmp_path / "a file"
    file.write_text("", encoding="utf-8")
    said = f"cannot make the folder {file}"
    assert said in refused("params", "kda-tiny", "--json", file / "params.json")
    assert said in refused("generate", saved, "the cat", "--save-state", file / "cat.state")
    assert said in refused("probe", saved, "--out", file)


# --- generate ---


def test_generate_is_the_models_own_greedy_choice(capsys: pytest.CaptureFixture[str], saved: Path) -> None:
    model = KDNForCausalLM.from_pretrained(saved).eval()
    longest = 0
    for prompt in ("the cat sat", "a dog", "on the mat .", "cat mat dog"):
        ids = torch.tensor([[WORDS.index(word) for word in prompt.split()]])
        expected = model.generate(ids, max_new_tokens=8, do_sample=False, eos_token_id=1)[0, ids.shape[1] :]
        printed = said(capsys, "generate", saved, prompt, "--greedy", "--max-new-tokens", 8)
        assert printed.split() == [WORDS[i] for i in expected.tolist() if i != 1]
        longest = max(longest, len(printed.split()))
    assert longest > 2, "a model that ends at once shows nothing"


def test_generate_goes_on_from_a_saved_state(
    capsys: pytest.CaptureFixture[str], saved: Path, tmp_path: Path
) -> None:
    state, prompt = tmp_path / "new" / "cat.state", tmp_path / "prompt.txt"
    prompt.write_text("the cat sat", encoding="utf-8")
    options = ("--max-new-tokens", 12, "--seed", 3)
    whole = said(capsys, "generate", saved, "the cat sat on the", *options)
    before = said(
        capsys, "generate", saved, "--prompt-file", prompt, "--save-state", state, "--max-new-tokens", 0
    )
    assert before == "" and KDNCache.load(state).tokens == 3
    assert said(capsys, "generate", saved, "on the", "--load-state", state, *options) == whole
    assert said(capsys, "generate", saved, "on the", *options) != whole
    other = ("generate", "kdn-isotropic-tiny", "on", "--random-init", "--load-state", state)
    assert "not one of kdn-isotropic-tiny" in refused(*other)


def test_generate_with_random_weights(capsys: pytest.CaptureFixture[str]) -> None:
    call = ("generate", "kdn-diagonal-swa-tiny", "Grüße, 🌍", "--random-init", "--max-new-tokens", 9)
    first = said(capsys, *call)
    assert first == said(capsys, *call) and first != said(capsys, *call, "--seed", 1)
    assert "\x1b" not in capsys.readouterr().err


def test_top_p_leaves_out_the_unlikely() -> None:
    from kdn.cli.generate import _sample

    generator = torch.Generator().manual_seed(0)
    scores = torch.tensor([0.1, 0.5, 0.3, 0.1]).log()
    assert {_sample(scores, 0.79, generator) for _ in range(100)} == {1, 2}
    assert {_sample(scores, 1e-9, generator) for _ in range(20)} == {1}
    assert {_sample(scores, 1.0, generator) for _ in range(200)} == {0, 1, 2, 3}


def test_a_character_of_several_tokens_is_printed_whole(capsys: pytest.CaptureFixture[str]) -> None:
    from kdn.cli.generate import _write
    from kdn.cli.loading import Bytes

    _write(Bytes(), list("für".encode()), iter("é\nnew line: 🌍!".encode()))
    assert capsys.readouterr().out == "é\nnew line: 🌍!\n"


def test_generate_says_what_is_missing(saved: Path, tmp_path: Path) -> None:
    assert "no such folder: nowhere" in refused("generate", "nowhere", "x")
    assert "add --random-init" in refused("generate", "kdn-diagonal-tiny", "x")
    assert "config.json" in refused("generate", tmp_path, "x")
    assert "empty" in refused("generate", saved, "")
    assert "no such file" in refused("generate", saved, "the", "--load-state", tmp_path / "x")
    bare = tmp_path / "bare"
    KDNForCausalLM(preset("kdn-diagonal-tiny")).save_pretrained(bare)
    assert "has no tokenizer" in refused("generate", bare, "x")
    big = ("generate", "kda-tiny", "x", "--random-init", "--tokenizer", bare)
    assert "has no tokenizer" in refused(*big)


def test_a_tokenizer_file_alone_will_do(
    capsys: pytest.CaptureFixture[str], saved: Path, tmp_path: Path
) -> None:
    (tmp_path / "tokenizer.json").write_bytes((saved / "tokenizer.json").read_bytes())
    call = ("generate", saved, "the cat", "--greedy", "--max-new-tokens", 3)
    assert said(capsys, *call, "--tokenizer", tmp_path).strip()


# --- probe ---


def test_probe_of_random_weights(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    call = ("probe", "--preset", "kdn-diagonal-tiny", "--random-init", "--sequences", 2, "--length", 48)
    printed = said(capsys, *call, "--dtype", "float32", "--out", tmp_path, "--seed", 5)
    assert "seed 5" in printed
    saved = json.loads((tmp_path / "writes.json").read_text(encoding="utf-8"))
    (panel,) = saved["panels"]
    kdn, kda = panel["curves"][:-1], panel["curves"][-1]
    assert [curve["info_scale"] for curve in kdn] == [1, pytest.approx(32**0.5), 32, 128]
    means = [curve["mean"] for curve in kdn]
    assert means == sorted(means, reverse=True) and means[0] > means[-1] + 0.1
    assert kda["label"] == "KDA" and kda["info_scale"] is None and kda["mean"] == pytest.approx(0.5, abs=0.05)

    torch.manual_seed(5)
    model = KDNModel(preset("kdn-diagonal-tiny")).eval()
    tokens = torch.randint(512, (2, 48), generator=torch.Generator().manual_seed(5))
    for curve in kdn:
        writes = effective_writes(model, tokens, info_scale=curve["info_scale"])
        assert curve["mean"] == pytest.approx(torch.stack(list(writes.values())).mean().item(), abs=1e-5)
        assert curve["layers"]["1"] == pytest.approx(writes[1].mean().item(), abs=1e-5)
        assert sum(curve["counts"]) == sum(x.numel() for x in writes.values())
        assert f"{curve['mean']:.3f}" in printed
    pytest.importorskip("matplotlib")
    assert (tmp_path / "writes.png").read_bytes().startswith(b"\x89PNG")


def test_bfloat16_gives_the_same_means(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    call = (
        "probe",
        "kdn-diagonal-tiny",
        "--random-init",
        "--sequences",
        2,
        "--length",
        128,
        "--beside",
        "none",
    )
    means = {}
    for dtype in ("bfloat16", "float32"):
        said(capsys, *call, "--dtype", dtype, "--out", tmp_path / dtype)
        (panel,) = json.loads((tmp_path / dtype / "writes.json").read_text(encoding="utf-8"))["panels"]
        means[dtype] = [curve["mean"] for curve in panel["curves"]]
    assert means["bfloat16"] == pytest.approx(means["float32"], abs=1e-3)
    assert means["bfloat16"] != means["float32"]


def test_probe_of_a_saved_model_before_and_after(
    capsys: pytest.CaptureFixture[str], saved: Path, tmp_path: Path
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the cat sat on the mat . a dog sat on a mat . " * 5, encoding="utf-8")
    call = ("probe", saved, "--text", text, "--length", 32, "--info-scale", 1, 32)
    printed = said(capsys, *call, "--dtype", "float32", "--out", tmp_path)
    assert "2 sequences of 32 tokens" in printed
    before, after = json.loads((tmp_path / "writes.json").read_text(encoding="utf-8"))["panels"]
    assert [curve["info_scale"] for curve in before["curves"]] == [1, 32, None]
    assert [curve["info_scale"] for curve in after["curves"]] == [1, 32]
    ids = [WORDS.index(word) for word in text.read_text(encoding="utf-8").split()]
    writes = effective_writes(
        KDNModel.from_pretrained(saved), torch.tensor(ids[:64]).view(2, 32), info_scale=32
    )
    mean = torch.stack(list(writes.values())).mean().item()
    assert after["curves"][1]["mean"] == pytest.approx(mean, abs=1e-5)
    assert before["curves"][1]["mean"] != pytest.approx(mean, abs=1e-5)


def test_heat_map(capsys: pytest.CaptureFixture[str], saved: Path, tmp_path: Path) -> None:
    call = ("probe", saved, "--heatmap", "the cat sat", "--dtype", "float32", "--info-scale", 7)
    said(capsys, *call, "--out", tmp_path)
    data = json.loads((tmp_path / "tokens.json").read_text(encoding="utf-8"))
    assert data["tokens"] == ["the", "cat", "sat"]
    model = KDNForCausalLM.from_pretrained(saved).eval()
    for layer in model.model.layers:
        layer.mixer.info_scale = 7.0
    with torch.no_grad():
        known = model(torch.tensor([[2, 3, 5]]), output_uncertainty=True).uncertainty
    for name, expected in known._asdict().items():
        torch.testing.assert_close(torch.tensor(data[name]), expected[:, 0].mean(-1), atol=1e-5, rtol=1e-4)


def test_probe_says_what_is_wrong(capsys: pytest.CaptureFixture[str], saved: Path, tmp_path: Path) -> None:
    out = ("--out", tmp_path)
    assert "no such folder: nowhere" in refused("probe", "nowhere", *out)
    assert "erases" in refused(
        "probe", "attention-tiny", "--random-init", "--sequences", 1, "--length", 8, *out
    )
    assert "cannot read" in refused("probe", saved, "--text", tmp_path / "none.txt", *out)
    for wrong, complaint in {
        ("--preset", "kda-tiny"): "add --random-init",
        (): "give a MODEL or --preset",
        (str(saved), "--info-scale", "0"): "must be a number > 0",
        (str(saved), "--heatmap", "x", "--info-scale", "1", "2"): "one --info-scale",
    }.items():
        with pytest.raises(SystemExit) as ended:
            cli.main(["probe", *wrong])
        assert ended.value.code == 2 and complaint in capsys.readouterr().err.splitlines()[-1]


# --- progress ---


@pytest.mark.parametrize("package", ["rich", None])
def test_progress_is_drawn_on_terminals_only(
    package: str | None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if package:
        pytest.importorskip(package)
    else:
        monkeypatch.setitem(sys.modules, "rich.console", None)

    def count() -> Any:
        with progress(3, "reading") as bar:
            for _ in range(3):
                bar.advance(note="a [note]")
        return capsys.readouterr()

    assert count() == ("", "")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    printed = count()
    assert printed.out == "" and "reading" in printed.err
    if package is None:
        assert "3 of 3, 0:00 left a [note]" in printed.err and printed.err.endswith("\r\x1b[K")


def test_info_names_optional_packages(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from importlib import metadata

    from kdn.cli import info

    monkeypatch.setitem(info.OPTIONAL, "no-such-package", "nothing")
    lines = {line.split()[0]: line for line in said(capsys, "info").splitlines() if line.startswith("  ")}
    assert metadata.version("transformers") in lines["transformers"]
    assert "pip install no-such-package" in lines["no-such-package"]
    assert {"datasets", "tokenizers", "matplotlib", "rich"} <= lines.keys()
