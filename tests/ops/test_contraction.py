"""The guarantee that no other delta rule has: kᵀκ lies in [0, 1), whatever the key.

kᵀκ = z / (r + z) with z = kᵀP̂k is a fraction by construction, for keys of any length, said again
and again, under any drift and decay; so a write never overshoots at its own key. Floating point
rounds to at most a few ulp above 1 where r vanishes beside z.
"""

from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

import kdn.ops

ULP = 8
GAINS = ("diagonal_gain", "isotropic_gain", "exact_gain")
property_test = settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


class Sequence(NamedTuple):
    k: Tensor
    log_decay: Tensor
    process_noise: Tensor
    obs_noise: Tensor


@st.composite
def sequences(draw: st.DrawFn, dtype: torch.dtype, decades: int) -> Sequence:
    """Keys of norms within 10^±decades: one norm, all norms mixed, or one key over and over."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    B, H = 1, 2
    T, K = draw(st.sampled_from([1, 2, 5, 40])), draw(st.sampled_from([1, 4, 16, 33]))
    k = rng.standard_normal((B, T, H, K))
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    kind = draw(st.sampled_from(["one norm", "mixed norms", "one key"]))
    # Half of the draws near 1: that is where r, z and rounding errors meet.
    reach = draw(st.sampled_from([8, decades]))
    exponent = draw(st.floats(-reach, reach))
    if kind == "mixed norms":
        exponent = rng.uniform(-reach, reach, (B, T, H, 1))
    if kind == "one key":
        k = np.broadcast_to(k[:, :1], k.shape)
    k = k * 10.0**exponent

    drift, decay = draw(st.sampled_from([0.0, 1e-9, 1.0, 1e3])), draw(st.sampled_from([0, 0.1, 50]))
    r = draw(st.sampled_from([0.01, 1.0, 100.0]))
    arrays = (
        k,
        -decay * rng.uniform(0, 1, (B, T, H, K)),
        drift * rng.exponential(1.0, (B, T, H, K)),
        r * (1 + rng.exponential(1.0, (B, T, H))),
    )
    return Sequence(*(torch.tensor(x, dtype=dtype) for x in arrays))


def check_contraction(op: str, x: Sequence, mu: float, backend: str) -> None:
    """kᵀκ ∈ [0, 1] up to a few ulp, below 1 where r shows beside z, and κ points along k."""
    omega = x.process_noise.mean(-1) if op == "isotropic_gain" else x.process_noise
    gain, cov, prior = getattr(kdn.ops, op)(
        x.k, x.log_decay, omega, x.obs_noise, info_scale=mu, return_prior=True, backend=backend
    )
    assert gain.dtype == prior.dtype == x.k.dtype
    for result in (gain, cov, prior):
        assert result.isfinite().all()
    k, kappa, P_hat, r = (y.double().numpy() for y in (x.k, gain, prior, x.obs_noise))
    eps, tiny = torch.finfo(gain.dtype).eps, torch.finfo(gain.dtype).tiny

    if op == "exact_gain":
        z = np.einsum("bthi,bthij,bthj->bth", k, P_hat, k)
        spectrum = np.linalg.eigvalsh(P_hat)
        least, most = spectrum[..., 0], spectrum[..., -1]
        # A dense matrix holds no variance smaller than eps of its largest. A key so long that such
        # a variance would still outweigh r gets some gain in the range; there is no more to ask.
        resolved = (least > 0) & (100 * eps * most * (k * k).sum(-1) < r)
        terms = np.maximum(1, np.abs(k * kappa).sum(-1))
        lower = -ULP * eps * terms
    else:
        p_hat = P_hat[..., None] if op == "isotropic_gain" else P_hat
        z, least = (p_hat * k**2).sum(-1), p_hat.min(-1)
        resolved, terms, lower = np.full(z.shape, True), np.ones(z.shape), np.zeros(z.shape)

    write = (k * kappa).sum(-1)
    assert (write >= lower).all()
    assert (write <= 1 + ULP * eps * terms).all()
    assert (write < 1)[resolved & (r / (r + z) > 100 * eps)].all()

    norm = np.linalg.norm(k, axis=-1)
    along = (k / norm[..., None] * kappa).sum(-1)
    representable = np.minimum(np.minimum(least, z), z / (r + z) / norm) > 1e3 * tiny
    assert (along > 0)[resolved & representable].all()


# Norms are in the range where the information of one token, μ‖k‖²/r, is a finite number.


@pytest.mark.parametrize("op", GAINS)
@property_test
@given(x=sequences(torch.float64, decades=100), mu=st.sampled_from([1.0, 128.0]))
def test_contraction_in_float64(op: str, x: Sequence, mu: float, backend: str) -> None:
    check_contraction(op, x, mu, backend)


@pytest.mark.parametrize("op", GAINS)
@property_test
@given(x=sequences(torch.float32, decades=12), mu=st.sampled_from([1.0, 128.0]))
def test_contraction_in_float32(op: str, x: Sequence, mu: float, backend: str) -> None:
    check_contraction(op, x, mu, backend)
