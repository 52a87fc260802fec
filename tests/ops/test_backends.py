"""Every fast backend gives the reference's answers: outputs, states and all gradients."""

import pytest
import torch
from cases import GAINS, Case, assert_close, distance, make, rounded, run

from kdn.ops import delta_memory

# T, K, V: every T of interest once, K from 8 to 256, K on both sides of V.
SHAPES = [
    (1, 8, 16),
    (2, 256, 64),
    (63, 64, 256),
    (64, 16, 8),
    (65, 128, 128),
    (257, 32, 48),
    (1000, 16, 32),
    (4096, 32, 16),
]
EXACT_SHAPES = [
    (1, 8, 16),
    (2, 256, 64),
    (63, 64, 16),
    (65, 16, 24),
    (257, 32, 8),
    (1000, 8, 16),
    (4096, 8, 16),
]


def shapes(gain: str) -> list[tuple[int, int, int]]:
    # The exact filter's reference keeps T·K² numbers per head for autograd: so it is narrow where it is long.
    return EXACT_SHAPES if gain == "exact" else SHAPES


ALL = [(gain, *shape) for gain in GAINS for shape in shapes(gain)]


@pytest.mark.parametrize(("gain", "time", "width", "values"), ALL)
def test_float32_agrees_with_reference(
    fast_backend: str, gain: str, time: int, width: int, values: int
) -> None:
    case = rounded(make(gain, time, width, values), torch.float32)
    want = run(case, "reference", torch.float64)
    assert_close(run(case, fast_backend, torch.float32), want, 1e-5)


@pytest.mark.parametrize(("gain", "time", "width", "values"), ALL)
def test_bfloat16_agrees_with_reference(
    fast_backend: str, gain: str, time: int, width: int, values: int
) -> None:
    case = rounded(make(gain, time, width, values), torch.bfloat16)
    want = run(case, "reference", torch.float64)
    got = run(case, fast_backend, torch.bfloat16)
    assert got["gain"].dtype == got["out"].dtype == got["∂k"].dtype == torch.bfloat16
    assert got["cov"].dtype == got["prior"].dtype == got["state"].dtype == torch.float32
    assert_close(got, want, 1e-2)


@pytest.mark.parametrize("gain", GAINS)
def test_float64_agrees_to_rounding(fast_backend: str, gain: str) -> None:
    case = make(gain, 130, 16, 24, batch=2)
    want = run(case, "reference", torch.float64)
    got = run(case, fast_backend, torch.float64)
    assert all(x.dtype == torch.float64 for x in got.values())
    assert_close(got, want, 1e-12 if fast_backend == "torch" else 1e-5)


@pytest.mark.parametrize("gain", GAINS)
@pytest.mark.parametrize("decay", ["channel", "head", "none"])
@pytest.mark.parametrize("initial", [True, False])
def test_every_decay_with_and_without_initial_states(
    fast_backend: str, gain: str, decay: str, initial: bool
) -> None:
    case = rounded(make(gain, 100, 16, 24, batch=3, decay=decay, initial=initial), torch.float32)
    want = run(case, "reference", torch.float64)
    assert_close(run(case, fast_backend, torch.float32), want, 1e-5)


@pytest.mark.parametrize("decay", ["channel", "head", "none"])
def test_pure_addition(fast_backend: str, decay: str) -> None:
    case = rounded(make("diagonal", 150, 16, 24, batch=2, decay=decay), torch.float32)
    case.keyless = True
    want = run(case, "reference", torch.float64)
    assert_close(run(case, fast_backend, torch.float32), want, 1e-5)


@pytest.mark.parametrize("gain", GAINS)
@pytest.mark.parametrize(
    "lengths",
    [[70], [1, 1, 1], [1, 63, 64, 65, 1, 130], [300, 5, 5, 5, 2], [0, 20, 0, 0, 44, 0]],
    ids=str,
)
def test_packed_sequences(fast_backend: str, gain: str, lengths: list[int]) -> None:
    case = rounded(make(gain, sum(lengths), 16, 24, lengths=lengths), torch.float32)
    want = run(case, "reference", torch.float64)
    assert_close(run(case, fast_backend, torch.float32), want, 1e-5)


@pytest.mark.parametrize("gain", GAINS)
def test_packing_equals_one_by_one(backend: str, gain: str) -> None:
    """Sequences packed into one row do not see one another."""
    lengths = [3, 80, 1, 66]
    packed = make(gain, sum(lengths), 16, 24, lengths=lengths)
    together = run(packed, backend, torch.float64)
    start = 0
    for i, length in enumerate(lengths):
        alone = Case(gain, {})
        for name, x in packed.tensors.items():
            if name in ("initial_cov", "initial_state"):
                alone = alone.change(**{name: x[i : i + 1]})
            elif name == "info_scale":
                alone = alone.change(**{name: x})
            else:
                alone = alone.change(**{name: x[:, start : start + length]})
        single = run(alone, backend, torch.float64, gradients=False)
        for name in ("gain", "prior", "out"):
            piece = together[name][:, start : start + length]
            assert distance(piece, single[name]) < 1e-10
        for name in ("cov", "state"):
            assert distance(together[name][i : i + 1], single[name]) < 1e-10
        start += length


@pytest.mark.parametrize("gain", GAINS)
@pytest.mark.parametrize("split", [1, 63, 64, 100, 199])
def test_split_in_two_calls(backend: str, gain: str, split: int) -> None:
    """A sequence cut anywhere, states handed over, gives what one call gives, gradients included."""
    case = make(gain, 200, 16, 24)
    whole = run(case, backend, torch.float64, gradients=False)
    x = {n: t.requires_grad_() for n, t in case.tensors.items() if t is not None}
    one = _both(gain, x, slice(None), x["initial_cov"], x["initial_state"], backend)
    weights = torch.randn_like(one[2])
    want = torch.autograd.grad((one[2] * weights).sum() + one[3].sum(), list(x.values()))

    first = _both(gain, x, slice(0, split), x["initial_cov"], x["initial_state"], backend)
    second = _both(gain, x, slice(split, None), first[1], first[3], backend)
    out = torch.cat((first[2], second[2]), 1)
    got = torch.autograd.grad((out * weights).sum() + second[3].sum(), list(x.values()))
    assert distance(torch.cat((first[0], second[0]), 1), whole["gain"]) < 1e-10
    assert distance(out, whole["out"]) < 1e-10
    assert distance(second[3], whole["state"]) < 1e-10
    bound = 1e-9 if backend in ("reference", "torch") else 1e-5
    assert max(distance(a, b) for a, b in zip(got, want, strict=True)) < bound


def _both(
    gain: str,
    x: dict[str, torch.Tensor],
    part: slice,
    cov: torch.Tensor,
    state: torch.Tensor,
    backend: str,
) -> tuple[torch.Tensor, ...]:
    """gain, final covariance, out, final state of one piece."""
    g, cov = GAINS[gain](
        x["k"][:, part],
        x["log_decay"][:, part],
        x["process_noise"][:, part],
        x["obs_noise"][:, part],
        info_scale=x["info_scale"],
        initial_cov=cov,
        backend=backend,
    )
    out, state = delta_memory(
        x["q"][:, part],
        x["k"][:, part],
        x["v"][:, part],
        g,
        x["log_decay"][:, part],
        initial_state=state,
        backend=backend,
    )
    return g, cov, out, state


@pytest.mark.parametrize("gain", GAINS)
def test_token_by_token_is_decoding(backend: str, gain: str) -> None:
    case = make(gain, 9, 16, 24, batch=3)
    whole = run(case, backend, torch.float64, gradients=False)
    x = case.tensors
    cov, state = x["initial_cov"], x["initial_state"]
    for t in range(9):
        g, cov, out, state = _both(gain, x, slice(t, t + 1), cov, state, backend)
        assert distance(g, whole["gain"][:, t : t + 1]) < 1e-10
        assert distance(out, whole["out"][:, t : t + 1]) < 1e-10
    assert distance(state, whole["state"]) < 1e-10


def test_strided_inputs_and_custom_scale(fast_backend: str) -> None:
    """Inputs that are views into one projection, as a layer makes them."""
    torch.manual_seed(0)
    mixed = torch.randn(2, 90, 3, 4 * 16)
    q, k, v, g = mixed.split(16, dim=-1)
    k = k / k.norm(dim=-1, keepdim=True)
    g = 0.3 * k
    want = delta_memory(q, k, v, g, None, scale=0.7, backend="reference")
    got = delta_memory(q, k, v, g, None, scale=0.7, backend=fast_backend)
    assert max(distance(a, b) for a, b in zip(got, want, strict=True)) < 1e-5
