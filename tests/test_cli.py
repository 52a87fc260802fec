"""The `kdn` command: what it prints, what it saves, and how it answers mistakes and missing peers."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from kdn import bench, cli
from kdn.bench import Settings, peers, report
from kdn.bench import ops as measuring
from kdn.ops import backend_report, delta_memory, diagonal_gain

TINY = Settings(lengths=(8, 16), batches=(2,), heads=1, width=8, seconds=0.01, matmul=32, copied=2**12)


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """What `kdn bench ops --quick` printed, and the folder it wrote."""
    folder = tmp_path_factory.mktemp("bench") / "new" / "folder"
    arguments = ["bench", "ops", "--quick", "--threads", "1", "--lengths", "32", "16", "--out", str(folder)]
    run = subprocess.run([sys.executable, "-m", "kdn", *arguments], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert "\x1b" not in run.stderr, "progress is for terminals"
    return run.stdout, folder


def test_bench_prints_a_table(quick: tuple[str, Path]) -> None:
    printed, folder = quick
    assert "FMA peak" in printed and "GB/s" in printed
    for word in ("% of floor", "faults", "SDPA", "4 projections", "decode", str(folder / "ops.json")):
        assert word in printed


def test_bench_saves_what_its_docs_promise(quick: tuple[str, Path]) -> None:
    saved = json.loads((quick[1] / "ops.json").read_text(encoding="utf-8"))
    assert {"cpu", "cores", "architecture", "system"} <= saved["machine"].keys()
    assert {"kdn", "python", "torch"} <= saved["versions"].keys()
    assert saved["date"][:2] == "20"
    (run,) = saved["runs"]
    assert run["allocator"] == "default" and run["threads"] == 1 and run["complete"]
    assert run["peak"]["flops_per_thread"] > 0 and run["copy"]["bytes_per_second"] > 0
    ops = {"diagonal KDN", "memory", "diagonal gain", "isotropic KDN", "KDA, fixed β"}
    served = [name for name, why, _ in backend_report("cpu") if why is None and name != "reference"]
    measured = {(row["op"], row["pass"], row["who"], row["shape"]["T"]) for row in run["rows"]}
    for part in ("forward", "backward", "forward+backward"):
        for length in (16, 32):
            assert {(op, part, who, length) for op in ops for who in served} <= measured
            assert ("diagonal KDN", part, "SDPA", length) in measured
    assert {("diagonal KDN", "decode", who, 1) for who in served} <= measured


def test_ratios_and_floors_follow_from_the_times(quick: tuple[str, Path]) -> None:
    (run,) = json.loads((quick[1] / "ops.json").read_text(encoding="utf-8"))["runs"]
    best = next(name for name, why, _ in backend_report("cpu") if why is None)
    times = {(r["op"], r["pass"], str(r["shape"]), r["who"]): r["ms"] for r in run["rows"]}
    fma = {"forward": 3, "backward": 8, "forward+backward": 11}
    for row in run["rows"]:
        ours = times[row["op"], row["pass"], str(row["shape"]), best]
        assert row["ratio"] == pytest.approx(row["ms"] / ours)
        assert 0 < row["ms_min"] <= row["ms"] <= row["ms_max"] and row["rounds"] >= 3
        if row["op"] == "diagonal gain" or row["who"] in ("SDPA", "4 projections"):
            assert row["percent_of_floor"] is None
            continue
        shape = row["shape"]
        elements = shape["B"] * shape["H"] * shape["K"] * shape["V"]
        if row["pass"] == "decode":
            floor = 8 * elements / run["copy"]["bytes_per_second"]
        else:
            floor = 2 * fma[row["pass"]] * elements * shape["T"] / run["peak"]["flops_per_thread"]
        assert row["floor_ms"] == pytest.approx(1e3 * floor)
        assert row["percent_of_floor"] == pytest.approx(1e5 * floor / row["ms"])


def test_plot_or_a_notice(quick: tuple[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = json.loads((quick[1] / "ops.json").read_text(encoding="utf-8"))
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    said = "\n".join(report.save(saved, tmp_path))
    assert "matplotlib is not installed" in said
    assert [file.name for file in tmp_path.iterdir()] == ["ops.json"]
    monkeypatch.undo()
    pytest.importorskip("matplotlib")
    report.save(saved, tmp_path)
    assert (tmp_path / "ops.png").read_bytes().startswith(b"\x89PNG")


def test_missing_peer_is_skipped_with_a_notice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers.models.qwen3_next", None)
    run = measuring.measure(TINY)
    assert any(notice.startswith("skipped transformers") for notice in run["notices"])
    assert {row["who"] for row in run["rows"]} == {*peers.our_backends(), "SDPA", "4 projections"}


def test_who_gets_too_slow_is_left_out_of_longer_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "LONGEST_RUN", 0.0)
    run = measuring.measure(TINY)
    longer = {row["who"] for row in run["rows"] if row["shape"]["T"] == 16}
    assert longer == {peers.our_backends()[0]}, "the first of our backends always stays"
    assert any("SDPA: no forward from T=16 on" in notice for notice in run["notices"])


def test_decoding_in_the_table_carries_its_states() -> None:
    """Three steps on one token leave the states that one call over three such tokens leaves."""
    x = peers.inputs(peers.Shape(2, 1, 2, 8))
    long = {name: tensor.repeat_interleave(3, 1) for name, tensor in x.items()}
    decay, noises = long["log_decay"], (long["process_noise"], long["obs_noise"])
    gain, cov = diagonal_gain(long["k"], decay, *noises, info_scale=8, backend="reference")
    _, state = delta_memory(long["q"], long["k"], long["v"], gain, decay, backend="reference")
    for contender in (c for c in peers.decoders()[0] if c.ours):
        carried = contender.prepare(x)
        for _ in range(3):
            contender.run(carried)
        torch.testing.assert_close(carried["state"], state, msg=contender.name)
        torch.testing.assert_close(carried["cov"], cov, msg=contender.name)


@pytest.mark.parametrize("mode", ["default", "raised"])
def test_malloc_is_set_for_the_measuring_process(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "1")  # what the user has set is not a mode
    given: dict[str, Any] = {}

    def instead(command: list[str], env: dict[str, str], check: bool) -> subprocess.CompletedProcess[str]:
        given.update(env)
        Path(command[-1]).write_text('{"rows": [], "notices": []}', encoding="utf-8")
        return subprocess.CompletedProcess(command, -9)

    monkeypatch.setattr(subprocess, "run", instead)
    run = bench._measure(Settings(allocator=mode))
    assert {name: given[name] for name in bench.RAISED if name in given} == (
        bench.RAISED if mode == "raised" else {}
    )
    assert not run["complete"] and "status -9" in run["notices"][-1], "a killed process is no success"


def test_info_names_every_backend(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KDN_BACKEND", raising=False)
    assert cli.main(["info"]) == 0
    printed = capsys.readouterr().out
    assert f"torch {torch.__version__}" in printed and f"{torch.get_num_threads()} threads" in printed
    lines = {line.split()[0]: line for line in printed.splitlines() if line.startswith("  ")}
    for name, why, default in backend_report("cpu"):
        assert ("default" in lines[name]) == default
        assert why is None or why in lines[name]
    assert "KDN_BACKEND is not set" in printed


def test_info_explains_an_override(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KDN_BACKEND", "reference")
    assert cli.main(["info"]) == 0
    printed = capsys.readouterr().out
    assert "KDN_BACKEND=reference overrides the default" in printed
    assert "reference  default" not in printed
    monkeypatch.setenv("KDN_BACKEND", "fastest")
    assert cli.main(["info"]) == 0, "what explains the mistake must not fall over it"
    assert "KDN_BACKEND must be one of" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "complaint", "help_of"),
    [
        (["bench", "ops", "--fast"], "--fast", "--allocator"),
        (["bench", "ops", "--lengths", "0"], "must be a whole number ≥ 1", "--allocator"),
        (["bench"], "required", "ops"),
        (["inform"], "inform", "info"),
        ([], "required", "info"),
    ],
)
def test_mistakes_are_answered_with_help(
    arguments: list[str], complaint: str, help_of: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("usage:") and help_of in said
    assert complaint in said.splitlines()[-1]
