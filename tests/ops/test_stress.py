"""Inputs that break kernels: every case of DESIGN.md's "Numerics", and random ones.

The truth is `reference` in float64 on the same numbers, rounded to the inputs' precision before. Results
and gradients must be finite and within 1e-4 of it (‖a − b‖/‖b‖), 1e-2 for 16-bit inputs.

What is asked for has to be answerable. Every case here is well conditioned: moving each input by one part
in 2²⁴ moves no result or gradient of the float64 truth by more than 3e-5 for identical or alternating keys
without decay, 5e-6 elsewhere (`truth_moves`; the property test holds every example against it). Left out
for that reason are: uneven ω without any decay, where a diagonal memory may grow as fast as it likes; a
state, or its gradient, of one or two channels overwritten many times, 1 − kᵀg being smaller than the
rounding of g; and values far smaller than the initial state they replace.
"""

import functools
from collections.abc import Callable

import numpy as np
import pytest
import torch
from cases import GAINS, Case, distance, make, rounded, run
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from kdn.ops import delta_memory

T, K, V = 270, 16, 12  # crosses the gain's chunk of 256 and the memory's of 64, divisible by neither
FLOOR = 0.01  # the least r of a KDN layer

Truth = dict[str, Tensor]


def uniform(shape: torch.Size | tuple[int, ...], seed: int = 3) -> Tensor:
    return torch.rand(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


# --- the cases: each changes the mild inputs of `make` ---


def decays(pattern: Callable[[Tensor], Tensor]) -> Callable[[Case], Case]:
    return lambda case: case.change(log_decay=-pattern(case.tensors["log_decay"]))


def in_blocks(x: Tensor) -> Tensor:
    """50 and 0 in turn, ten tokens each: every sub-block of a chunk has both."""
    return (50.0 * (torch.arange(x.shape[1]) // 10 % 2).double()[None, :, None, None]).expand_as(x)


def some_channels(x: Tensor) -> Tensor:
    """Channels that forget everything beside channels that forget nothing."""
    return 50 * uniform(x.shape) * (torch.arange(x.shape[-1]) % 2)


def keys(
    length: float | None = 1.0, period: int | None = None, r: float | None = None, decay: bool = True
) -> Callable[[Case], Case]:
    """Keys of one length (None: from 1e-3 to 100), the first `period` of them over and over."""

    def change(case: Case) -> Case:
        k, noise, log_decay = (case.tensors[name] for name in ("k", "obs_noise", "log_decay"))
        if period is not None:
            k = k[:, torch.arange(k.shape[1]) % period]
        lengths = 10 ** (5 * uniform(k.shape[:3]) - 3) if length is None else torch.tensor([length])
        noise = noise if r is None else torch.full_like(noise, r)
        return case.change(
            k=k * lengths[..., None], obs_noise=noise, log_decay=log_decay if decay else 0 * log_decay
        )

    return change


def drift(least: float, *, mixed: bool = False, decay: float | None = None) -> Callable[[Case], Case]:
    """ω = least everywhere; `mixed`: 100 at one place in ten."""

    def change(case: Case) -> Case:
        w, log_decay = case.tensors["process_noise"], case.tensors["log_decay"]
        low = torch.full_like(w, least)
        return case.change(
            process_noise=low.where(uniform(w.shape) > 0.1, 100) if mixed else low,
            log_decay=log_decay if decay is None else torch.full_like(log_decay, -decay),
        )

    return change


def huge_values(case: Case) -> Case:
    return case.change(v=1e30 * case.tensors["v"])


STRESSES: dict[str, Callable[[Case], Case]] = {
    "decay 50 everywhere": decays(lambda x: torch.full_like(x, 50)),
    "decay 0 or 50, at random": decays(lambda x: 50.0 * (uniform(x.shape) < 0.3)),
    "decay 0 or 50, blockwise": decays(in_blocks),
    "decay up to 20": decays(lambda x: 20 * uniform(x.shape)),
    "decay up to 50": decays(lambda x: 50 * uniform(x.shape)),
    "decay about 20": decays(lambda x: 18 + 4 * uniform(x.shape)),
    "decay up to 50 in some channels": decays(some_channels),
    "decay up to 50, per head": decays(lambda x: 50 * uniform(x.shape[:3])),
    "keys of norm 10": keys(10),
    "keys of norm 10, r at its floor": keys(10, r=FLOOR),
    "keys of norm 100": keys(100),
    "keys of norm 100, r at its floor": keys(100, r=FLOOR),
    "keys of norm 0.001": keys(1e-3),
    "keys of norm 0.001, r at its floor": keys(1e-3, r=FLOOR),
    "keys of all norms": keys(None),
    "identical keys": keys(period=1),
    "identical keys, no decay": keys(period=1, decay=False),
    "identical keys, no decay, r at its floor": keys(period=1, decay=False, r=FLOOR),
    "alternating keys": keys(period=2),
    "alternating keys, no decay, r at its floor": keys(period=2, decay=False, r=FLOOR),
    "ω = 0": drift(0),
    "ω = 0, no decay": drift(0, decay=0),
    "ω = 1e-12": drift(1e-12),
    "ω = 1e-12, no decay": drift(1e-12, decay=0),
    "ω = 1e-30": drift(1e-30),
    "ω = 1e-30, no decay": drift(1e-30, decay=0),
    "ω = 0 or 100": drift(0, mixed=True, decay=1),
    "ω = 1e-12 or 100": drift(1e-12, mixed=True, decay=1),
    "ω = 1e-30 or 100": drift(1e-30, mixed=True, decay=1),
    "r at its floor": keys(r=FLOOR),
    "huge values": huge_values,
}


# --- running and comparing ---


def assert_near(got: Truth, want: Truth, bound: float, dtype: torch.dtype = torch.float32) -> None:
    """Finite and within `bound`, but for numbers that the precision cannot hold at all.

    −50 per token leaves ∂p₀ ≈ e⁻¹⁰⁰: below float32's normal numbers, as other results are below
    float16's smallest. Such numbers may be anything as small as that.
    """
    assert got.keys() == want.keys()
    kind = torch.finfo(dtype)
    held = max(torch.finfo(torch.float32).tiny, kind.tiny * kind.eps if dtype == torch.float16 else 0.0)
    wrong = {}
    for name, truth in want.items():
        x, truth = got[name].double(), truth.double()
        if not x.isfinite().all():
            wrong[name] = "not finite"
        elif (x - truth).norm() > bound * truth.norm() + held * truth.numel() ** 0.5:
            wrong[name] = f"{distance(x, truth):.1e}"
    assert not wrong, f"beyond {bound:.0e}: {wrong}"


def of_output(case: Case, backend: str, dtype: torch.dtype) -> Truth:
    """Gradients of the memory's output alone, as in training.

    In `run`, the cotangents of the variances themselves drown what reaches r, ω, μ and decay through the
    gain. The weights have one sign here, so that no gradient is a sum of random signs.
    """
    leaves = {n: None if x is None else x.to(dtype).requires_grad_() for n, x in case.tensors.items()}
    gain, _ = GAINS[case.gain](
        leaves["k"],
        leaves["log_decay"],
        leaves["process_noise"],
        leaves["obs_noise"],
        info_scale=leaves["info_scale"],
        initial_cov=leaves["initial_cov"],
        backend=backend,
    )
    q, k, v = (leaves[n] for n in "qkv")
    out, _ = delta_memory(
        q, k, v, gain, leaves["log_decay"], initial_state=leaves["initial_state"], backend=backend
    )
    weights = 0.5 + uniform(out.shape, seed=case.cotangents).float().to(dtype)
    inputs = {n: x for n, x in leaves.items() if x is not None}
    grads = torch.autograd.grad((out * weights).sum(), list(inputs.values()))
    return {f"∂{name}": g for name, g in zip(inputs, grads, strict=True)}


def stressed(gain: str, stress: str, dtype: torch.dtype = torch.float32) -> Case:
    return rounded(STRESSES[stress](make(gain, T, K, V)), dtype)


@functools.cache
def truth(gain: str, stress: str) -> Truth:
    return run(stressed(gain, stress), "reference", torch.float64)


@functools.cache
def truth_of_output(gain: str, stress: str) -> Truth:
    return of_output(stressed(gain, stress), "reference", torch.float64)


# --- the tests ---


@pytest.mark.parametrize("gain", GAINS)
@pytest.mark.parametrize("stress", STRESSES)
def test_float32(fast_backend: str, gain: str, stress: str) -> None:
    got = run(stressed(gain, stress), fast_backend, torch.float32)
    assert_near(got, truth(gain, stress), 1e-4)


@pytest.mark.parametrize("gain", GAINS)
@pytest.mark.parametrize("stress", STRESSES)
def test_float32_gradients_of_the_output(fast_backend: str, gain: str, stress: str) -> None:
    got = of_output(stressed(gain, stress), fast_backend, torch.float32)
    assert_near(got, truth_of_output(gain, stress), 1e-4)


@pytest.mark.parametrize("gain", GAINS)
def test_thousands_of_tokens_without_decay(fast_backend: str, gain: str) -> None:
    """One head with drift, one without: there p̂ falls as 1/t and the memory averages everything it saw."""
    case = make(gain, 2001, 8, 6)
    w, log_decay = case.tensors["process_noise"].clone(), case.tensors["log_decay"]
    w[:, :, 0] = 0
    case = rounded(case.change(log_decay=0 * log_decay, process_noise=w), torch.float32)
    assert_near(run(case, fast_backend, torch.float32), run(case, "reference", torch.float64), 1e-4)


LENGTHS: list[int | list[int]] = [1, 2, 31, 63, 65, 127, 255, 257, 513, [1, 1, 250, 0, 3], [64, 256, 65]]


@pytest.mark.parametrize("gain", GAINS)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("stress", ["decay 0 or 50, at random", "identical keys", "ω = 1e-30 or 100"])
def test_lengths_that_no_chunk_divides(
    fast_backend: str, gain: str, lengths: int | list[int], stress: str
) -> None:
    """One token, a token more or less than a chunk, and packed sequences, under stress."""
    packed = lengths if isinstance(lengths, list) else None
    time = sum(packed) if packed else lengths
    case = rounded(STRESSES[stress](make(gain, time, 8, 6, lengths=packed)), torch.float32)
    assert_near(run(case, fast_backend, torch.float32), run(case, "reference", torch.float64), 1e-4)


# --- 16-bit inputs ---

# A gain is rounded to the precision of its keys between the two operations. What that alone does to the
# memory is not the operations' error, so each is given the same numbers as its truth.


def differentiated(results: Truth, leaves: Truth) -> Truth:
    """The results and the gradients of their sum, each weighted by one fixed cotangent of one sign."""
    loss = torch.zeros((), dtype=torch.float64)
    for i, x in enumerate(results.values()):
        loss = loss + (x * (0.5 + uniform(x.shape, seed=i)).to(torch.bfloat16).to(x.dtype)).sum()
    grads = torch.autograd.grad(loss, list(leaves.values()))
    return results | {f"∂{name}": g for name, g in zip(leaves, grads, strict=True)}


def leaves_of(case: Case, names: tuple[str, ...], dtype: torch.dtype) -> Truth:
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    states = ("initial_cov", "initial_state", "info_scale")
    given = {n: case.tensors[n] for n in names if case.tensors[n] is not None}
    return {n: x.to(wide if n in states else dtype).requires_grad_() for n, x in given.items()}


def packing(case: Case) -> Tensor | None:
    return None if case.lengths is None else torch.tensor([0, *case.lengths]).cumsum(0)


def gain_alone(case: Case, backend: str, dtype: torch.dtype) -> Truth:
    names = ("k", "log_decay", "process_noise", "obs_noise", "info_scale", "initial_cov")
    leaves = leaves_of(case, names, dtype)
    arguments = {"log_decay": None} | leaves
    gain, cov, prior = GAINS[case.gain](
        **arguments, cu_seqlens=packing(case), return_prior=True, backend=backend
    )
    return differentiated({"gain": gain, "cov": cov, "prior": prior}, leaves)


def memory_alone(case: Case, backend: str, dtype: torch.dtype) -> Truth:
    leaves = leaves_of(case, ("q", "k", "v", "gain", "log_decay", "initial_state"), dtype)
    arguments = {"log_decay": None} | leaves
    out, state = delta_memory(**arguments, cu_seqlens=packing(case), backend=backend)
    return differentiated({"out": out, "state": state}, leaves)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("gain", GAINS)
@pytest.mark.parametrize("stress", STRESSES)
def test_16_bit_inputs(fast_backend: str, gain: str, stress: str, dtype: torch.dtype) -> None:
    case = STRESSES[stress](make(gain, 70, 8, 6))
    if dtype == torch.float16 and stress == "huge values":
        case = case.change(v=case.tensors["v"] * 1e-27)  # float16 ends at 65504, and so do gradients
    case = rounded(case, dtype)
    got, want = gain_alone(case, fast_backend, dtype), gain_alone(case, "reference", torch.float64)
    assert got["gain"].dtype == got["∂k"].dtype == dtype
    assert got["cov"].dtype == got["prior"].dtype == torch.float32
    assert_near(got, want, 1e-2, dtype)

    case = case.change(gain=want["gain"].detach().to(dtype).double())
    got, want = memory_alone(case, fast_backend, dtype), memory_alone(case, "reference", torch.float64)
    assert got["out"].dtype == got["∂v"].dtype == dtype and got["state"].dtype == torch.float32
    assert_near(got, want, 1e-2, dtype)


# --- random shapes and magnitudes ---


def moved(case: Case) -> Case:
    """Each input off by about one part in 2²⁴, the last bit of float32."""
    generator = torch.Generator().manual_seed(1)

    def move(x: Tensor) -> Tensor:
        return x * (1 + 2**-24 * torch.randn(x.shape, dtype=torch.float64, generator=generator))

    return case.change(**{n: None if x is None else move(x) for n, x in case.tensors.items()})


def truth_moves(operation: Callable[..., Truth], case: Case, truth: Truth) -> float:
    """How far the last bit of the inputs moves the truth: no float32 computation can be asked for less."""
    other = operation(moved(case), "reference", torch.float64)
    return max(distance(other[n].float(), x.float()) for n, x in truth.items())


@st.composite
def cases(draw: st.DrawFn, gain: str) -> Case:
    """Shapes, packing and magnitudes, each from one end of its range to the other.

    From 16 channels on: with fewer, 64 tokens overwrite so much of a state that its remains, and its
    gradient, are below the rounding of what was there when the chunk began.
    """
    time, width = draw(st.sampled_from([1, 2, 17, 64, 65, 90, 140])), draw(st.sampled_from([16, 24, 33]))
    heads, values = draw(st.integers(1, 3)), draw(st.sampled_from([1, 5, 16]))
    lengths = None
    if draw(st.booleans()):
        cuts = sorted(draw(st.lists(st.integers(0, time), max_size=4)))
        lengths = np.diff([0, *cuts, time]).tolist()
    case = make(
        gain,
        time,
        width,
        values,
        batch=1 if lengths else draw(st.integers(1, 3)),
        heads=heads,
        decay=draw(st.sampled_from(["channel", "head", "none"])),
        lengths=lengths,
        initial=draw(st.booleans()),
        seed=draw(st.integers(0, 1000)),
    )
    log_decay, w, r = (case.tensors[name] for name in ("log_decay", "process_noise", "obs_noise"))
    if log_decay is not None:
        strongest, share = draw(st.sampled_from([0, 0.1, 1, 20, 50])), draw(st.sampled_from([0.3, 1]))
        log_decay = -strongest * uniform(log_decay.shape) * (uniform(log_decay.shape, seed=4) < share)
    magnitude = draw(st.sampled_from([1, 1e15]))  # of values and states alike
    state = case.tensors["initial_state"]
    case = case.change(
        log_decay=log_decay,
        process_noise=w * draw(st.sampled_from([0, 1e-30, 1e-12, 1e-3, 1, 100])),
        obs_noise=torch.full_like(r, FLOOR) if draw(st.booleans()) else r,
        info_scale=draw(st.sampled_from([1, width])) * torch.ones(heads, dtype=torch.float64),
        v=magnitude * case.tensors["v"],
        initial_state=None if state is None else magnitude * state,
    )
    length = draw(st.sampled_from([1e-3, 1, 10, 100, None]))
    period = draw(st.sampled_from([None, None, 1, 2]))
    return rounded(keys(length, period)(case), torch.float32)


@pytest.mark.parametrize("gain", GAINS)
@settings(
    max_examples=20,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_any_shape_and_magnitude(fast_backend: str, gain: str, data: st.DataObject) -> None:
    case = data.draw(cases(gain))
    want = gain_alone(case, "reference", torch.float64)
    assume(truth_moves(gain_alone, case, want) < 1e-5)
    assert_near(gain_alone(case, fast_backend, torch.float32), want, 1e-4)

    case = case.change(gain=want["gain"].detach().float().double())
    want = memory_alone(case, "reference", torch.float64)
    assume(truth_moves(memory_alone, case, want) < 1e-5)
    assert_near(memory_alone(case, fast_backend, torch.float32), want, 1e-4)
