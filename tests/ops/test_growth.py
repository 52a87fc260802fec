"""`memory_growth` against products of matrices formed one by one, and where the answer is known."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kdn.ops import diagonal_gain, memory_growth


def direct(k: Tensor, gain: Tensor, log_decay: Tensor | None) -> Tensor:
    """log ‖Π (I − g kᵀ) D‖ / ‖I‖ over T, the product formed in float64 and rescaled every token."""
    batch, time, heads, width = k.shape
    rates = torch.zeros(batch, heads, dtype=torch.float64)
    for b in range(batch):
        for h in range(heads):
            product = torch.eye(width, dtype=torch.float64)
            for t in range(time):
                decay = torch.zeros(width, dtype=torch.float64)
                if log_decay is not None:
                    decay = log_decay[b, t, h].double().expand(width)
                # The decay's largest entry apart: it alone may underflow.
                top = decay.max()
                write = torch.outer(gain[b, t, h].double(), k[b, t, h].double())
                product = (torch.eye(width) - write) @ ((decay - top).exp()[:, None] * product)
                norm = product.norm()
                rates[b, h] += norm.log() + top
                product = product / norm
    return (rates - 0.5 * math.log(width)) / time


def inputs(time: int, width: int = 6) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    k = F.normalize(torch.randn(2, time, 3, width, generator=generator), dim=-1)
    gain = 0.5 * k + 0.3 * torch.randn(2, time, 3, width, generator=generator)
    return k, gain, -torch.rand(2, time, 3, width, generator=generator)


@pytest.mark.parametrize("time", [1, 5, 64, 65, 150])
@pytest.mark.parametrize("decay", ["channel", "head", "none"])
def test_equals_the_product(backend: str, time: int, decay: str) -> None:
    k, gain, log_decay = inputs(time)
    chosen = {"channel": 0.2 * log_decay, "head": log_decay[..., 0], "none": None}[decay]
    got = memory_growth(k, gain, chosen, backend=backend)
    assert got.dtype == torch.float32
    assert got.shape == (2, 3)
    assert torch.allclose(got.double(), direct(k, gain, chosen), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("every", [1, 7, 64, 1000])
def test_rescaling_is_not_part_of_the_answer(every: int) -> None:
    k, gain, log_decay = inputs(150)
    got = memory_growth(k, gain, 0.2 * log_decay, every=every)
    assert torch.allclose(got.double(), direct(k, gain, 0.2 * log_decay), rtol=1e-4, atol=1e-5)


def test_nothing_written_without_decay_is_zero(backend: str) -> None:
    k, gain, _ = inputs(130)
    assert memory_growth(k, torch.zeros_like(gain), backend=backend).abs().max() < 1e-6


@pytest.mark.parametrize("size", [0.01, 1.0])
def test_nothing_written_is_the_mean_decay(backend: str, size: float) -> None:
    k, gain, log_decay = inputs(130)
    per_head = size * log_decay[..., 0]
    got = memory_growth(k, torch.zeros_like(gain), per_head, backend=backend)
    assert torch.allclose(got, per_head.mean(1), rtol=1e-4)


@pytest.mark.parametrize("size", [3.0, 50.0])
def test_decays_that_underflow_between_rescalings(backend: str, size: float) -> None:
    """DESIGN.md's legal decays: 64 tokens at −3 leave nothing of a float32."""
    k, gain, _ = inputs(130)
    per_head = torch.full((2, 130, 3), -size)
    got = memory_growth(k, torch.zeros_like(gain), per_head, backend=backend)
    assert torch.allclose(got, per_head.mean(1), rtol=1e-4)


def test_a_memory_that_forgets_everything() -> None:
    """One channel, each token's residual written whole: nothing is left, and nothing is not NaN."""
    k = torch.ones(1, 130, 1, 1)
    assert memory_growth(k, k).item() == -math.inf


def test_growth_is_seen() -> None:
    """Two keys in turn with oblique gains: the product of each pair stretches by a known factor."""
    a, b = torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])
    gains = torch.tensor([0.5, 3.0]), torch.tensor([3.0, 0.5])
    k = torch.stack((a, b) * 100)[None, :, None]
    gain = torch.stack(gains * 100)[None, :, None]
    pair = (torch.eye(2) - torch.outer(gains[1], b)) @ (torch.eye(2) - torch.outer(gains[0], a))
    rate = torch.linalg.eigvals(pair.double()).abs().max().log() / 2
    assert rate > 0
    assert abs(memory_growth(k, gain).item() - rate.item()) < 0.02


def test_one_magnitude_of_noise_contracts_and_many_do_not() -> None:
    """DESIGN.md: ω of one magnitude contracts; ω = exp(2N) makes a diagonal memory grow."""
    torch.manual_seed(0)
    k = F.normalize(torch.randn(1, 2000, 2, 32), dim=-1)
    r = torch.full((1, 2000, 2), 1.0)
    rates = []
    for spread in (0.0, 2.0):
        noise = (spread * torch.randn(1, 1, 2, 32)).exp().expand(1, 2000, 2, 32)
        gain, _ = diagonal_gain(k, None, noise, r, info_scale=32.0)
        rates.append(memory_growth(k, gain))
    assert rates[0].max() < 0
    assert (rates[1] > rates[0]).all()


def test_no_graph_is_kept_and_inputs_are_left_alone() -> None:
    k, gain, log_decay = (x.requires_grad_() for x in inputs(70))
    before = [x.detach().clone() for x in (k, gain, log_decay)]
    assert not memory_growth(k, gain, log_decay).requires_grad
    assert all(a.equal(b) for a, b in zip((k, gain, log_decay), before, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_precisions(backend: str, dtype: torch.dtype) -> None:
    k, gain, log_decay = (x.to(dtype) for x in inputs(70))
    got = memory_growth(k, gain, 0.25 * log_decay, backend=backend)
    assert torch.allclose(got.double(), direct(k, gain, 0.25 * log_decay), rtol=1e-3, atol=1e-4)


def test_errors_name_the_argument() -> None:
    k, gain, log_decay = inputs(5)
    with pytest.raises(ValueError, match="gain must be"):
        memory_growth(k, gain[..., :3])
    with pytest.raises(ValueError, match="log_decay must be"):
        memory_growth(k, gain, log_decay[:, :2])
    with pytest.raises(ValueError, match="k must be"):
        memory_growth(k[0], gain)
    with pytest.raises(ValueError, match="every must be"):
        memory_growth(k, gain, every=0)
