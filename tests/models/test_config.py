"""Configurations: what they accept, what they refuse and how they say so."""

from pathlib import Path
from typing import Any

import pytest

from kdn.mixers import MIXERS
from kdn.models import KDNConfig


def test_every_mixer_builds_from_its_name() -> None:
    for name in MIXERS:
        config = KDNConfig(mixer=name, num_hidden_layers=3, hidden_size=64, num_heads=2, head_dim=32)
        assert config.mixers == [name] * 3
        assert type(config.make_mixer(2)) is MIXERS[name]


def test_layers_name_one_mixer_each() -> None:
    config = KDNConfig(layers=["kda", "attention", "kda"], window=7, hidden_size=64, num_heads=2, head_dim=32)
    assert config.num_hidden_layers == 3
    assert [type(config.make_mixer(i)) for i in range(3)] == [MIXERS[n] for n in ("kda", "attention", "kda")]
    assert config.make_mixer(1).window == 7


def test_options_reach_the_mixers_that_have_them() -> None:
    config = KDNConfig(
        layers=["kdn-diagonal", "attention"],
        info_scale=3.0,
        rope_theta=500.0,
        norm_eps=1e-3,
        hidden_size=64,
        num_heads=2,
        head_dim=32,
    )
    recurrent, attention = config.make_mixer(0), config.make_mixer(1)
    assert recurrent.mu() == 3.0
    assert recurrent.norm_eps == 1e-3
    assert attention.rope_theta == 500.0


def test_a_configuration_survives_a_file(tmp_path: Path) -> None:
    given: dict[str, Any] = {
        "layers": ["kdn-isotropic", "attention"],
        "window": 9,
        "info_scale": 2.0,
        "decay": "sigmoid",
        "intermediate_size": 77,
        "tie_word_embeddings": True,
        "eos_token_id": [1, 2],
        "pad_token_id": 0,
    }
    config = KDNConfig(**given)
    config.save_pretrained(tmp_path)
    loaded = KDNConfig.from_pretrained(tmp_path)
    assert loaded.to_dict() == config.to_dict()
    for name, value in given.items():
        assert getattr(loaded, name) == value


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"mixer": "kdn-diagnal"}, "mixer must be one of .*did you mean 'kdn-diagonal'"),
        ({"layers": ["kda", "atention"]}, "mixer must be one of .*did you mean 'attention'"),
        ({"hidden_sizes": 3}, "no field 'hidden_sizes' .*did you mean 'hidden_size'"),
        ({"infoscale": 3}, "no field 'infoscale' .*did you mean 'info_scale'"),
        ({"mixer": "kda", "info_scale": 1.0}, r"no field 'info_scale' \(mixers: kda\)"),
        ({"layers": []}, "layers (has|names) 0"),
        ({"layers": ["kda"], "num_hidden_layers": 2}, "num_hidden_layers is 2"),
        ({"hidden_size": 0}, "hidden_size must be a whole number ≥ 1, got 0"),
        ({"vocab_size": -5}, "vocab_size must be a whole number ≥ 1, got -5"),
        ({"num_heads": 2.0}, r"num_heads must be a whole number ≥ 1, got 2\.0"),
        ({"head_dim": "8"}, "head_dim must be a whole number ≥ 1, got '8'"),
        ({"num_hidden_layers": True}, "num_hidden_layers must be a whole number ≥ 1, got True"),
        ({"intermediate_size": 0}, "intermediate_size must be a whole number ≥ 1, got 0"),
        ({"window": 0}, "window must be a whole number ≥ 1 or None, got 0"),
        ({"num_hidden_layers": 10**7}, "num_hidden_layers must be ≤ 10,000, got 10,000,000"),
        ({"layers": 3}, "layers must be a list of mixer names, one per layer, got 3"),
        ({"layers": "kda"}, "layers must be a list of mixer names, one per layer, got 'kda'"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings must be True or False, got 'no'"),
        ({"dtype": "float33"}, "dtype must be one of torch's, such as 'bfloat16', got 'float33'"),
        ({"window": True}, "window must be a whole number ≥ 1 or None, got True"),
        ({"norm_eps": -1.0}, r"norm_eps must be a number between 0 and 1, got -1\.0"),
        ({"norm_eps": "small"}, "norm_eps must be a number between 0 and 1, got 'small'"),
        ({"info_scale": "K"}, "info_scale must be a finite number or None, got 'K'"),
        ({"info_scale": float("inf")}, "info_scale must be a finite number or None, got inf"),
        ({"learn_info_scale": "yes"}, "learn_info_scale must be True or False, got 'yes'"),
        ({"conv_size": 1.5}, r"conv_size must be a whole number, got 1\.5"),
        ({"mixer": "mamba3-siso", "state_dim": "8"}, "state_dim must be a whole number or None, got '8'"),
    ],
)
def test_a_wrong_field_is_one_clear_error(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        KDNConfig(**fields)


def test_trainer_can_add_to_what_it_ignores() -> None:
    # transformers' Trainer.evaluate adds a list to it.
    assert isinstance(KDNConfig().keys_to_ignore_at_inference, list)
