"""The short ways that decoding takes through linear layers and convolutions give what the long ones give."""

import pytest
import torch
import torch.nn.functional as F

from kdn.mixers import parts
from kdn.mixers.parts import Linear, ShortConvolution


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(1, 1, 40), (40,), (1, 40), (2, 1, 40), (0, 40)])
def test_one_row_is_the_same_product(shape: tuple[int, ...], bias: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layer, x = Linear(40, 231, bias=bias).to(dtype), torch.randn(shape).to(dtype)
    expected = F.linear(x.double(), layer.weight.double(), layer.bias.double() if bias else None)
    with torch.no_grad():
        found = layer(x)
    assert found.dtype == dtype
    bound = 0.02 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(found.double(), expected, atol=bound, rtol=bound)
    assert torch.equal(layer(x), F.linear(x, layer.weight, layer.bias)), "with gradients it is nn.Linear"


def test_one_row_takes_the_short_way(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = []
    product = parts.linear_of_row
    monkeypatch.setattr(parts, "linear_of_row", lambda *given: taken.append(1) or product(*given))
    layer = Linear(8, 4, bias=False).bfloat16()
    with torch.no_grad():
        layer(torch.zeros(1, 1, 8).bfloat16())
        assert taken == [1]
        layer(torch.zeros(1, 2, 8).bfloat16())
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert layer.float()(torch.zeros(1, 1, 8)).dtype == torch.bfloat16
    layer.bfloat16()(torch.zeros(1, 1, 8).bfloat16())
    assert taken == [1]


@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize("activation", [False, True])
def test_a_convolution_token_by_token(width: int, activation: bool) -> None:
    torch.manual_seed(0)
    layer, x = ShortConvolution(6, width, activation=activation), torch.randn(2, 9, 6)
    whole, end = layer(x)
    rows, history = [], None
    for token in x.split(1, 1):
        before = None if history is None else history.clone()
        y, new = layer(token, history)
        assert history is None or torch.equal(history, before), "the caller's history stays as it is"
        rows.append(y)
        history = new
    torch.testing.assert_close(torch.cat(rows, 1), whole)
    assert history is not None
    torch.testing.assert_close(history, end)
