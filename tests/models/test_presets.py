"""The paper's sizes, to the parameter."""

import pytest

from kdn.models.presets import PAPER, SCALES, count, parameter_table, preset, preset_names

ROWS = {row.name: row for row in parameter_table()}


@pytest.mark.parametrize(
    ("name", "width", "blocks"),
    [("kdn-isotropic-1.3b", 7208, 1_302_390_288), ("kdn-diagonal-1.3b", 7128, 1_302_348_492)],
)
def test_block_stacks_have_exactly_these_parameters(name: str, width: int, blocks: int) -> None:
    row = ROWS[name]
    assert (row.intermediate, row.blocks) == (width, blocks)
    assert row.total == blocks + 2 * 32000 * 2304 + 2304  # embeddings, head, last norm


@pytest.mark.parametrize("scale", ["750m", "1.3b"])
def test_all_rows_of_a_scale_are_equally_large(scale: str) -> None:
    sizes = [row.blocks for name, row in ROWS.items() if name.endswith(scale)]
    assert len(sizes) == {"750m": 8, "1.3b": 13}[scale]
    assert max(sizes) / min(sizes) - 1 < 3e-4


def test_states_per_layer_are_the_papers() -> None:
    heads, channels = 16, 128
    memory = heads * channels**2
    expected = {
        "kdn-diagonal-750m": memory + heads * channels,
        "kdn-isotropic-750m": memory + heads,
        **dict.fromkeys(("mamba3-siso-750m", "mamba3-mimo-750m", "kda-750m", "gdn2-750m"), memory),
    }
    assert memory == 262_144
    assert {name: ROWS[name].state for name in expected} == expected


def test_hybrids_alternate_and_begin_recurrent() -> None:
    config = preset("kdn-diagonal-swa-1.3b")
    assert config.mixers == ["kdn-diagonal", "attention"] * 9
    assert config.window == 2048
    assert preset("kdn-diagonal-1.3b").window is None


@pytest.mark.parametrize("scale", SCALES)
def test_every_preset_of_a_scale_is_as_large_as_its_width_allows(scale: str) -> None:
    """One more or one less in the feed-forward width is further from the scale's parameters."""
    names = [name for name in preset_names() if name.endswith(f"-{scale}")]
    assert len(names) == len(set(names)) == 21  # eleven mixers, ten hybrids
    for name in names:
        row, size = count(name), SCALES[scale]
        step = 3 * size.hidden * size.layers
        assert abs(row.blocks - size.blocks) <= step / 2, name


def test_changes_are_taken_after_the_width() -> None:
    config = preset("kdn-diagonal-30m", vocab_size=100, info_scale=1.0)
    assert (config.vocab_size, config.info_scale) == (100, 1.0)
    assert config.intermediate_size == preset("kdn-diagonal-30m").intermediate_size


def test_the_papers_rows_are_presets() -> None:
    assert set(PAPER) <= set(preset_names())


@pytest.mark.parametrize(
    ("wrong", "near"),
    [
        ("kdn-diagonal-1.3B", "kdn-diagonal-1.3b"),
        ("kdn-diagnal-750m", "kdn-diagonal-750m"),
        ("kda-swa-1.2b", "kda-swa-1.3b"),
        ("kdn-isotropic", "kdn-isotropic-"),
        ("attention-swa-1.3b", "-swa-1.3b|attention-1.3b"),
    ],
)
def test_an_unknown_name_is_answered_with_the_nearest(wrong: str, near: str) -> None:
    with pytest.raises(ValueError, match=f"no preset '{wrong}': .*did you mean '[^']*({near})"):
        preset(wrong)
