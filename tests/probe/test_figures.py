"""Figures show the numbers they are given, and reports are those of the models they are about."""

from pathlib import Path
from typing import Any

import pytest
import torch

from kdn.models import KDNModel
from kdn.models.presets import preset
from kdn.probe import effective_writes
from kdn.probe.report import by_token, default_scales, distribution, probe_writes, scale_name


def test_a_histogram_counts_every_write_once() -> None:
    writes = {
        1: torch.tensor([[[0.0, 0.005], [0.999, 1.0]]]),
        0: torch.tensor([[[0.125, 0.5], [0.5, 1.0000001]]]),
    }
    found = distribution(writes)
    assert len(found["counts"]) == 100 and sum(found["counts"]) == 8
    assert {i: n for i, n in enumerate(found["counts"]) if n} == {0: 2, 12: 1, 50: 2, 99: 3}
    assert found["mean"] == pytest.approx(4.129 / 8) and found["layers"]["1"] == pytest.approx(2.004 / 4)
    assert list(found["layers"]) == ["0", "1"]
    above = distribution({0: torch.tensor([[[1.5, 0.1]]])})["counts"]
    assert len(above) == 200 and above[150] == above[10] == 1


def test_scales_are_named_by_the_width_of_keys() -> None:
    names = [scale_name(x, 128) for x in (*default_scales(128), 11.3, 2.5)]
    assert names == ["μ = 1", "μ = 11.31 = √K", "μ = 128 = K", "μ = 512 = 4K", "μ = 11.3 = √K", "μ = 2.5"]


def test_probing_a_model_without_uncertainty_gives_one_curve() -> None:
    model, tokens = KDNModel(preset("kda-tiny")).eval(), torch.arange(16)[None]
    (curve,) = probe_writes(model, tokens, [1.0, 2.0], "KDA")
    writes = torch.stack(list(effective_writes(model, tokens).values()))
    assert curve["info_scale"] is None and curve["label"] == "KDA"
    assert curve["mean"] == pytest.approx(writes.mean().item(), abs=1e-6)
    assert probe_writes(KDNModel(preset("linear-attention-tiny")), tokens, [1.0], "x") == []


def test_what_is_not_known_is_none() -> None:
    data = by_token(KDNModel(preset("kda-tiny")).eval(), [1, 2, 3], ["a", "b", "c"])
    assert data["read_variance"] == [[None] * 3] * 2
    assert all(0 < x < 1 for row in data["effective_write"] for x in row)
    with pytest.raises(ValueError, match="equally many"):
        by_token(KDNModel(preset("kda-tiny")), [1, 2], ["a"])


def curve(label: str, info_scale: float | None, counts: list[int], mean: float) -> dict[str, Any]:
    return {"label": label, "info_scale": info_scale, "counts": counts, "bins_per_unit": 4, "mean": mean}


def test_densities_are_the_histograms(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from kdn.probe.figures import write_figure

    counts = {"a": [0, 1, 3, 4], "b": [2, 2, 2, 2], "KDA": [1, 0, 0, 1]}
    curves = [
        curve("a", 1.0, counts["a"], 0.7),
        curve("b", 2.0, counts["b"], 0.5),
        curve("KDA", None, counts["KDA"], 0.5),
    ]
    file = tmp_path / "writes.png"
    figure = write_figure(
        [{"title": "before", "curves": curves}, {"title": "after", "curves": curves[:1]}], file
    )
    assert file.read_bytes().startswith(b"\x89PNG")
    upper, lower = figure.axes
    assert upper.get_title("left") == "before" and lower.get_title("left") == "after"
    shown = {p.get_label().split("\n")[0]: p for p in upper.patches if p.get_label()}
    assert shown.keys() == counts.keys() and "mean 0.700" in shown["a"].get_label()
    for name, patch in shown.items():
        values, edges, _ = patch.get_data()
        assert list(values) == [4 * n / sum(counts[name]) for n in counts[name]]
        assert list(edges) == [0, 0.25, 0.5, 0.75, 1]
    assert len({p.get_edgecolor() for p in shown.values()}) == 3


def test_heat_maps_are_the_data(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from kdn.probe.figures import token_figure

    data = {
        "tokens": ["a$", " b", "\n"],
        "read_variance": [[0.1, 0.2, 0.3], [None] * 3],
        "effective_write": [[0.4, 0.5, 0.6], [0.7, 0.8, 0.9]],
        "state_norm": [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]],
    }
    file = tmp_path / "tokens.png"
    figure = token_figure(data, file, "title")
    assert file.read_bytes().startswith(b"\x89PNG")
    panels = [axis for axis in figure.axes if axis.get_ylabel() == "layer"]
    for axis, name in zip(panels, ("read_variance", "effective_write", "state_norm"), strict=True):
        rows = [[float("nan") if x is None else x for x in row] for row in data[name]]
        shown = torch.tensor(axis.images[0].get_array().filled(float("nan")).tolist())
        torch.testing.assert_close(shown, torch.tensor(rows), equal_nan=True)
    assert [text.get_text() for text in panels[-1].get_xticklabels()] == [r"a\$", "␣b", "↵"]
