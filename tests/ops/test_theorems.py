"""What the paper proves about its filters, as properties of what the package computes.

Letters are the paper's: κ the gain, P̂ p̂ b̂ the prior of a token, P p b what is retained after it,
z = kᵀP̂k and γ = r + z. Everything is float64 unless a test says otherwise.
"""

import numpy as np
import oracle
import pytest
import torch
from oracle import Array
from torch import Tensor

import kdn.ops
from kdn.ops import delta_memory, diagonal_gain, exact_gain, isotropic_gain

B, T, H, K, V = 2, 6, 3, 8, 5
GAINS = ("diagonal_gain", "isotropic_gain", "exact_gain")
every_gain = pytest.mark.parametrize("op", GAINS)


def draw(seed: int = 0, B: int = B, T: int = T, H: int = H, K: int = K) -> tuple[Tensor, ...]:
    """k, log_decay, ω per channel and r of an ordinary sequence."""
    rng = np.random.default_rng(seed)
    arrays = (
        rng.standard_normal((B, T, H, K)),
        -rng.exponential(0.3, (B, T, H, K)),
        0.01 + rng.exponential(0.5, (B, T, H, K)),
        0.1 + rng.exponential(1.0, (B, T, H)),
    )
    return tuple(map(torch.from_numpy, arrays))


def noise(op: str, omega: Tensor) -> Tensor:
    """The isotropic filter has one ω per head."""
    return omega.mean(-1) if op == "isotropic_gain" else omega


def effective_write(k: Tensor, gain: Tensor) -> Tensor:
    return (k * gain).sum(-1)


def close(a: Tensor | Array, b: Tensor | Array, tolerance: float = 1e-12) -> bool:
    a, b = np.asarray(a), np.asarray(b)
    return bool(np.linalg.norm(a - b) <= tolerance * np.linalg.norm(b))


# Kalman Associative Memory


@every_gain
def test_own_key_residual_shrinks_by_one_minus_the_effective_write(op: str, backend: str) -> None:
    """App. "Overwrite": v − Sᵀk = (1 − kᵀκ)(v − Ŝᵀk), at every token and for any gain rule."""
    k, log_decay, omega, r = draw()
    v = torch.randn(B, T, H, V, dtype=torch.float64)
    gain, _ = getattr(kdn.ops, op)(k, log_decay, noise(op, omega), r, backend=backend)
    # Reading with the key itself, unscaled, gives Sᵀk.
    read, _ = delta_memory(k, k, v, gain, log_decay, scale=1.0, backend=backend)
    state = None
    for t in range(T):
        now = slice(t, t + 1)
        predicted = torch.zeros(B, H, V, dtype=torch.float64)
        if state is not None:
            S_hat = log_decay[:, t].exp()[..., None] * state
            predicted = torch.einsum("bhk,bhkv->bhv", k[:, t], S_hat)
        before = v[:, t] - predicted
        left = 1 - effective_write(k, gain)[:, t, :, None]
        assert close(v[:, t] - read[:, t], left * before, 1e-11)
        _, state = delta_memory(
            *(x[:, now] for x in (k, k, v, gain, log_decay)), initial_state=state, backend=backend
        )


def test_exact_gain_minimises_the_expected_squared_error(backend: str) -> None:
    """Prop. 1: J(g) = d_v [tr P + γ‖g − κ‖²], so that κ is its unique minimum.

    J is evaluated from its definition, as the trace of the error covariance of S̃ − Ŝ − g δᵀ for a
    prior of covariance P̂ and observation noise r.
    """
    k, log_decay, omega, r = draw()
    gain, cov, prior = exact_gain(k, log_decay, omega, r, return_prior=True, backend=backend)
    k, kappa, r, P_hat = (x[:, -1].numpy() for x in (k, gain, r, prior))
    gamma = r + np.einsum("bhi,bhij,bhj->bh", k, P_hat, k)
    trace_P = np.trace(cov.numpy(), axis1=-2, axis2=-1)

    def J(g: Array) -> Array:
        A = np.eye(K) - g[..., :, None] * k[..., None, :]
        error = A @ P_hat @ A.swapaxes(-1, -2) + r[..., None, None] * g[..., :, None] * g[..., None, :]
        return V * np.trace(error, axis1=-2, axis2=-1)

    assert close(J(kappa), V * trace_P)
    rng = np.random.default_rng(0)
    for size in (1e-3, 1e-1, 1.0, 10.0):
        for _ in range(20):
            step = size * rng.standard_normal(kappa.shape)
            assert close(J(kappa + step), V * (trace_P + gamma * (step**2).sum(-1)), 1e-10)
            assert (J(kappa + step) > J(kappa)).all()


def test_exact_filter_is_the_conditional_law_of_the_memory(backend: str) -> None:
    """Prop. 1: S and P are mean and covariance of S̃_T given all values, without recursion."""
    k, log_decay, omega, r = draw()
    rng = np.random.default_rng(1)
    v, S_0 = rng.standard_normal((B, T, H, V)), rng.standard_normal((B, H, K, V))
    root = rng.standard_normal((B, H, K, K)) / np.sqrt(K)
    P_0 = root @ root.swapaxes(-1, -2) + 0.1 * np.eye(K)
    gain, cov = exact_gain(k, log_decay, omega, r, initial_cov=torch.from_numpy(P_0), backend=backend)
    _, state = delta_memory(
        k,
        k,
        torch.from_numpy(v),
        gain,
        log_decay,
        initial_state=torch.from_numpy(S_0),
        backend=backend,
    )
    for b, h in np.ndindex(B, H):
        k_, log_decay_, omega_, r_ = (x.numpy()[b, :, h] for x in (k, log_decay, omega, r))
        mean, covariance = oracle.batch_posterior(
            k_, v[b, :, h], np.exp(log_decay_), omega_, r_, S_0[b, h], P_0[b, h]
        )
        assert close(state[b, h], mean)
        assert close(cov[b, h], covariance)


# Diagonal


def kl(p: Array, P: Array) -> Array:
    """KL(N(m, diag p) ‖ N(m, P)) over the last axes."""
    Lambda = np.linalg.inv(P)
    trace = (np.diagonal(Lambda, axis1=-2, axis2=-1) * p).sum(-1)
    return 0.5 * (trace - np.log(p).sum(-1) + np.linalg.slogdet(P)[1] - p.shape[-1])


def one_step(backend: str) -> tuple[tuple[Tensor, ...], Tensor, Tensor]:
    """A token, a diagonal covariance before it, and the exact posterior covariance after it."""
    x = draw(seed=2, T=1)
    p = torch.from_numpy(np.random.default_rng(3).exponential(1.0, (B, H, K)))
    _, cov = exact_gain(*x, initial_cov=torch.diag_embed(p), backend=backend)
    return x, p, cov


def test_diagonal_update_is_the_reverse_kl_projection(backend: str) -> None:
    """Prop. 2: diag(p) minimises KL(q ‖ exact one-step posterior) over diagonal covariances."""
    x, before, posterior = one_step(backend)
    _, cov = diagonal_gain(*x, initial_cov=before, backend=backend)
    p, P = cov.numpy(), posterior.numpy()
    least = kl(p, P)
    h = 1e-4
    for i in range(K):
        up, down = (kl(p * np.exp(s * h * np.eye(K)[i]), P) for s in (1, -1))
        # KL is ½(Λ_ii p_i − log p_i) + …: in log p_i flat at the minimum, with curvature ½.
        assert np.abs(up - down).max() / (2 * h) < 1e-8
        assert np.allclose((up - 2 * least + down) / h**2, 0.5, atol=1e-4)
    rng = np.random.default_rng(4)
    for size in (1e-2, 0.1, 1.0):
        for _ in range(20):
            assert (kl(p * np.exp(size * rng.standard_normal(p.shape)), P) > least).all()


def test_diagonal_update_keeps_the_exact_posterior_mean(backend: str) -> None:
    """Prop. 2: from a diagonal prior the projection changes P and nothing about this token's S."""
    x, before, posterior = one_step(backend)
    gain, cov = diagonal_gain(*x, initial_cov=before, backend=backend)
    exact, _ = exact_gain(*x, initial_cov=torch.diag_embed(before), backend=backend)
    assert close(gain, exact)
    assert not close(torch.diag_embed(cov), posterior, 1e-2)


# Isotropic


def test_isotropic_update_is_the_harmonic_mean_of_the_posterior_eigenvalues(backend: str) -> None:
    """Prop. 4: b = K / Σ 1/λ_i(P*) for the exact posterior P* from b̂ I; and the mean is exact."""
    k, _, omega, r = draw(T=1)
    b_0 = torch.from_numpy(np.random.default_rng(5).exponential(1.0, (B, H)))
    eye = torch.eye(K, dtype=torch.float64)
    omega = omega[..., :1].expand_as(k)
    exact, P = exact_gain(k, None, omega, r, initial_cov=b_0[..., None, None] * eye, backend=backend)
    gain, b = isotropic_gain(k, None, omega[..., 0], r, initial_cov=b_0, backend=backend)
    assert close(b, K / (1 / np.linalg.eigvalsh(P.numpy())).sum(-1))
    assert close(gain, exact)
    least = kl(np.repeat(b.numpy()[..., None], K, -1), P.numpy())
    for factor in (0.5, 0.99, 1.01, 2.0):
        assert (kl(np.repeat(factor * b.numpy()[..., None], K, -1), P.numpy()) > least).all()


def test_isotropic_prediction_is_the_trace_projection(backend: str) -> None:
    """Eq. (iso-trace-projection): b̂ I is the nearest isotropic matrix to D P D + Ω."""
    k, log_decay, omega, r = draw(T=1)
    omega = omega[..., :1].expand_as(k)
    eye = np.eye(K)
    *_, P_hat = exact_gain(k, log_decay, omega, r, return_prior=True, backend=backend)
    *_, b_hat = isotropic_gain(k, log_decay, omega[..., 0], r, return_prior=True, backend=backend)
    P_hat, b_hat = P_hat.numpy(), b_hat.numpy()
    assert close(b_hat, np.trace(P_hat, axis1=-2, axis2=-1) / K)

    def distance(b: Array) -> Array:
        return np.linalg.norm(P_hat - b[..., None, None] * eye, axis=(-2, -1))

    for factor in (0.9, 0.999, 1.001, 1.1):
        assert (distance(factor * b_hat) > distance(b_hat)).all()


def test_trace_projection_is_idle_for_scalar_decay(backend: str) -> None:
    """App. "Isotropic": with one α per head D b D + Ω is isotropic already, however it is given."""
    k, log_decay, omega, r = draw(T=1)
    omega, log_decay = omega[..., :1].expand_as(k), log_decay[..., 0]
    per_channel = log_decay[..., None].expand_as(k)
    *_, P_hat = exact_gain(k, log_decay, omega, r, return_prior=True, backend=backend)
    for decay in (log_decay, per_channel):
        *_, b_hat = isotropic_gain(k, decay, omega[..., 0], r, return_prior=True, backend=backend)
        assert close(b_hat[..., None, None] * torch.eye(K, dtype=torch.float64), P_hat)


def test_isotropic_at_full_scale_keeps_the_exact_variance_along_the_key(backend: str) -> None:
    """At μ = K: b = kᵀP*k / ‖k‖², P* the exact posterior from the same isotropic prior."""
    k, log_decay, omega, r = draw(T=1)
    log_decay, omega = log_decay[..., 0], omega[..., :1].expand_as(k)
    _, P = exact_gain(k, log_decay, omega, r, backend=backend)
    _, b = isotropic_gain(k, log_decay, omega[..., 0], r, info_scale=K, backend=backend)
    k = k[:, 0]
    along = torch.einsum("bhi,bhij,bhj->bh", k, P, k) / (k * k).sum(-1)
    assert close(b, along)


# Information scale


def test_information_scale_leaves_the_current_write_alone(backend: str) -> None:
    """∂κ_t/∂μ_t = 0 and ∂S_t/∂μ_t = 0: information counts after the write."""
    k, log_decay, omega, r = draw(T=1)
    v = torch.randn(B, 1, H, V, dtype=torch.float64)
    for op in GAINS:
        mu = torch.full((H,), 2.0, dtype=torch.float64, requires_grad=True)
        gain, cov = getattr(kdn.ops, op)(k, log_decay, noise(op, omega), r, info_scale=mu, backend=backend)
        out, state = delta_memory(k, k, v, gain, log_decay, backend=backend)
        if state.requires_grad:
            loss = gain.sum() + out.sum() + state.sum()
            (gradient,) = torch.autograd.grad(loss, mu, retain_graph=True, allow_unused=True)
            assert gradient is None or (gradient == 0).all()
        (gradient,) = torch.autograd.grad(cov.sum(), mu)
        assert (gradient < 0).all(), "the covariance does depend on μ"


def test_information_scale_protects_at_the_next_token(backend: str) -> None:
    """∂p_t/∂μ_t = −p²k²/r, then ∂z and ∂(kᵀκ) of token t + 1 by the paper's formulas, all ≤ 0."""
    k, log_decay, omega, r = draw(T=2)
    now, after = ([x[:, t : t + 1] for x in (k, log_decay, omega, r)] for t in (0, 1))
    # One μ per sequence and head would mix up channels; a diagonal filter of one sequence does not.
    mu = torch.full((H,), 1.5, dtype=torch.float64, requires_grad=True)
    for b in range(B):
        _, p = diagonal_gain(*(x[b : b + 1] for x in now), info_scale=mu, backend=backend)
        later = [x[b : b + 1] for x in after]
        gain, _, p_hat = diagonal_gain(
            *later, info_scale=3.0, initial_cov=p, return_prior=True, backend=backend
        )
        k_0, r_0 = k[b, 0], r[b, 0, :, None]
        k_1, alpha_1, r_1 = k[b, 1], log_decay[b, 1].exp(), r[b, 1]
        z = (p_hat[0, 0] * k_1**2).sum(-1)
        write = effective_write(k_1, gain[0, 0])

        dp = -(k_0**2) / r_0 * p[0] ** 2
        dz = (alpha_1**2 * k_1**2 * dp).sum(-1)
        dwrite = r_1 / (r_1 + z) ** 2 * dz
        for i in range(K):
            assert close(slope(p[0, :, i], mu), dp[:, i].detach())
        assert close(slope(z, mu), dz.detach())
        assert close(slope(write, mu), dwrite.detach())
        assert (dp <= 0).all() and (dz <= 0).all() and (dwrite <= 0).all()


def slope(per_head: Tensor, mu: Tensor) -> Tensor:
    """∂ per_head[h] / ∂ mu[h]: heads do not see each other."""
    (gradient,) = torch.autograd.grad(per_head.sum(), mu, retain_graph=True)
    return gradient


@every_gain
def test_information_scale_weakens_every_later_write(op: str, backend: str) -> None:
    """∂(k_tᵀκ_t)/∂μ = 0 at the first token and ≤ 0 at all others, for one constant μ per head."""
    T = 12
    k, log_decay, omega, r = draw(B=1, T=T)
    mu = torch.tensor([0.5, 1.0, float(K)], dtype=torch.float64, requires_grad=True)
    gain, _ = getattr(kdn.ops, op)(k, log_decay, noise(op, omega), r, info_scale=mu, backend=backend)
    write = effective_write(k, gain)[0]
    assert (slope(write[0], mu) == 0).all()
    for t in range(1, T):
        assert (slope(write[t], mu) < 0).all()


# Balanced keys: the same energy on m of the channels


def balanced_key(m: int, channels: int, times: int) -> tuple[Tensor, Tensor, Tensor]:
    """k, ω = 0 and r = 1 for one unit key, said `times` times."""
    key = torch.zeros(channels, dtype=torch.float64)
    key[:m] = m**-0.5
    k = key.expand(1, times, 1, channels)
    return k, torch.zeros_like(k), torch.ones(1, times, 1, dtype=torch.float64)


@pytest.mark.parametrize("m", [1, 2, 8, 16])
@pytest.mark.parametrize(("p", "r"), [(1.0, 1.0), (0.3, 2.0), (5.0, 0.01)])
def test_balanced_key_retains_the_papers_variances(m: int, p: float, r: float, backend: str) -> None:
    """V_exact = rp/(r+p), V_proj(μ) = mrp/(mr+μp): more for m > 1, and the same at μ = m."""
    k, omega, one = balanced_key(m, channels=16, times=1)
    p_0 = torch.full((1, 1, 16), p, dtype=torch.float64)
    key = k[0, 0, 0]
    _, P = exact_gain(k, None, omega, r * one, initial_cov=torch.diag_embed(p_0), backend=backend)
    V_exact = float(key @ P[0, 0] @ key)
    assert V_exact == pytest.approx(r * p / (r + p), rel=1e-12)

    def V_proj(mu: float) -> float:
        _, cov = diagonal_gain(k, None, omega, r * one, info_scale=mu, initial_cov=p_0, backend=backend)
        return float((cov[0, 0] * key**2).sum())

    for mu in (1.0, 3.0, float(m)):
        assert V_proj(mu) == pytest.approx(m * r * p / (m * r + mu * p), rel=1e-12)
    assert V_proj(m) == pytest.approx(V_exact, rel=1e-12)
    assert m == 1 or V_proj(1.0) > V_exact


def test_repeated_balanced_key_is_rewritten_by_the_projection(backend: str) -> None:
    """m = 128, r = p = 1: the repeat writes 1/3 exactly, 0.498 projected, 1/3 again at μ = m."""
    k, omega, r = balanced_key(m=128, channels=128, times=2)

    def repeat(op: str, mu: float = 1.0) -> float:
        gain, _ = getattr(kdn.ops, op)(k, None, noise(op, omega), r, info_scale=mu, backend=backend)
        return float(effective_write(k, gain)[0, 1, 0])

    assert repeat("exact_gain") == pytest.approx(1 / 3, rel=1e-12)
    assert repeat("diagonal_gain") == pytest.approx(128 / 257, rel=1e-12)
    assert round(repeat("diagonal_gain"), 3) == 0.498
    assert repeat("diagonal_gain", mu=128) == pytest.approx(1 / 3, rel=1e-12)
    assert repeat("isotropic_gain", mu=128) == pytest.approx(1 / 3, rel=1e-12)


# The family


def kda(q: Array, k: Array, v: Array, log_decay: Array, beta: Array) -> tuple[Array, Array]:
    """S = (I − β k kᵀ) diag(α) S + β k vᵀ with the matrices written out, one sequence and head."""
    S, out = np.zeros((q.shape[-1], v.shape[-1])), []
    for q_t, k_t, v_t, log_alpha_t, beta_t in zip(q, k, v, log_decay, beta, strict=True):
        erase = np.eye(len(k_t)) - beta_t * np.outer(k_t, k_t)
        S = erase @ np.diag(np.exp(log_alpha_t)) @ S + beta_t * np.outer(k_t, v_t)
        out.append(S.T @ q_t / np.sqrt(len(q_t)))
    return np.array(out), S


def test_gain_along_the_key_gives_kda(backend: str) -> None:
    """Sec. 3.3: κ = βk is KDA for any β, and Isotropic KDN is KDA with β = b̂ / (r + b̂‖k‖²)."""
    k, log_decay, omega, r = draw(T=40)
    k = torch.nn.functional.normalize(k, dim=-1)
    rng = np.random.default_rng(6)
    q = torch.from_numpy(rng.standard_normal(k.shape))
    v = torch.from_numpy(rng.standard_normal((*k.shape[:3], V)))
    any_beta = torch.from_numpy(rng.uniform(0, 1, r.shape))
    kalman, _, b_hat = isotropic_gain(
        k, log_decay, omega[..., 0], r, info_scale=K, return_prior=True, backend=backend
    )
    for beta, gain in ((any_beta, any_beta[..., None] * k), (b_hat / (r + b_hat), kalman)):
        out, state = delta_memory(q, k, v, gain, log_decay, backend=backend)
        for b, h in np.ndindex(B, H):
            o, S = kda(*(x.numpy()[b, :, h] for x in (q, k, v, log_decay, beta)))
            assert close(out[b, :, h], o)
            assert close(state[b, h], S)


def test_with_one_channel_all_filters_are_the_scalar_kalman_filter(backend: str) -> None:
    """K = 1: diagonal, isotropic and exact covariances are one number and one recursion."""
    k, log_decay, omega, r = draw(T=600, K=1)
    mu = torch.tensor([0.5, 1.0, 7.0], dtype=torch.float64)
    gain, cov, prior = diagonal_gain(
        k, log_decay, omega, r, info_scale=mu, return_prior=True, backend=backend
    )
    for op in ("isotropic_gain", "exact_gain"):
        others = getattr(kdn.ops, op)(
            k, log_decay, noise(op, omega), r, info_scale=mu, return_prior=True, backend=backend
        )
        for ours, theirs in zip((gain, cov, prior), others, strict=True):
            assert close(theirs.reshape(ours.shape), ours)
