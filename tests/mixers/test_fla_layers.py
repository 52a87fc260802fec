"""The delta-rule mixers are flash-linear-attention's layers: same weights, same outputs."""

from typing import Any

import pytest
import torch
from fla_layers import layer_class, layer_output, shake

from kdn.mixers import make_mixer

HIDDEN, HEADS, HEAD_DIM = 24, 2, 8

# mixer, options of its layer there, the same for ours
CASES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("kda", {}, {}),
    ("kda", {"allow_neg_eigval": True, "norm_eps": 1e-2}, {"allow_neg_eigval": True, "norm_eps": 1e-2}),
    ("kda", {"expand_v": 1.5, "conv_size": 3}, {"expand_v": 1.5, "conv_size": 3}),
    ("kda", {"use_short_conv": False}, {"conv_size": 0}),
    ("gdn2", {}, {}),
    ("gdn2", {"allow_neg_eigval": True, "expand_v": 2}, {"allow_neg_eigval": True, "expand_v": 2}),
    ("gated-deltanet", {}, {"expand_v": 2}),  # that library's default
    ("gated-deltanet", {"expand_v": 1, "use_gate": False}, {"output_gate": False}),
    ("gated-deltanet", {"allow_neg_eigval": True}, {"allow_neg_eigval": True, "expand_v": 2}),
    ("deltanet", {}, {}),
    ("deltanet", {"use_gate": True, "norm_eps": 1e-2}, {"output_gate": True, "norm_eps": 1e-2}),
    ("deltanet", {"allow_neg_eigval": True}, {"allow_neg_eigval": True}),
]


def layers(
    mixer: str, theirs: dict[str, Any], ours: dict[str, Any]
) -> tuple[torch.nn.Module, torch.nn.Module]:
    """Their layer with random weights, and our mixer with the same."""
    sizes: dict[str, Any] = {"hidden_size": HIDDEN, "num_heads": HEADS}
    # Their DeltaNet is given the width of all heads together, as a share of the hidden size.
    sizes |= {"head_dim": HEAD_DIM} if mixer != "deltanet" else {"expand_k": 2 / 3, "expand_v": 2 / 3}
    torch.manual_seed(0)
    layer = shake(layer_class(mixer)(**sizes | theirs))
    own = make_mixer(mixer, HIDDEN, HEADS, HEAD_DIM, **ours)
    own.load_state_dict(layer.state_dict())
    return layer, own


def check(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    assert ours.dtype == theirs.dtype == torch.float32
    assert ours.shape == theirs.shape
    error = float((ours - theirs).abs().max() / theirs.abs().max())
    assert error < 1e-4, f"{error:.1e}"


@pytest.mark.filterwarnings("ignore:ShortConvolution is crucial")
@pytest.mark.parametrize(("mixer", "theirs", "ours"), CASES, ids=str)
def test_same_weights_same_outputs(mixer: str, theirs: dict[str, Any], ours: dict[str, Any]) -> None:
    layer, own = layers(mixer, theirs, ours)
    x = torch.randn(2, 70, HIDDEN)
    with torch.no_grad():
        check(own(x)[0], layer_output(layer, x))


@pytest.mark.parametrize("mixer", ["kda", "gdn2", "gated-deltanet", "deltanet"])
def test_same_weights_same_gradients(mixer: str) -> None:
    """Training goes on as it would there: every weight gets the same gradient."""
    layer, own = layers(mixer, {}, {"expand_v": 2} if mixer == "gated-deltanet" else {})
    x, weights = torch.randn(1, 20, HIDDEN), torch.randn(1, 20, HIDDEN)
    (own(x)[0] * weights).sum().backward()
    (layer_output(layer, x) * weights).sum().backward()
    theirs = dict(layer.named_parameters())
    for name, parameter in own.named_parameters():
        assert parameter.grad is not None, name
        check(parameter.grad, theirs[name].grad)
