"""The oracle itself, against answers without recursion: regression, conditioning, closed forms."""

import numpy as np
import oracle
import pytest
from oracle import Array

B, T, H, K, V = 2, 7, 3, 4, 5


def tokens(seed: int = 0) -> dict[str, Array]:
    """k, log_decay, process_noise, obs_noise of a plausible layer, with q, v and a prior on top."""
    rng = np.random.default_rng(seed)
    root = rng.standard_normal((B, H, K, K)) / np.sqrt(K)
    return {
        "q": rng.standard_normal((B, T, H, K)),
        "k": rng.standard_normal((B, T, H, K)),
        "v": rng.standard_normal((B, T, H, V)),
        "log_decay": -rng.exponential(0.3, (B, T, H, K)),
        "omega": rng.exponential(0.5, (B, T, H, K)),
        "r": 0.1 + rng.exponential(1.0, (B, T, H)),
        "P_0": root @ root.swapaxes(-1, -2) + 0.1 * np.eye(K),
        "S_0": rng.standard_normal((B, H, K, V)),
    }


def close(a: Array, b: Array, tolerance: float = 1e-12) -> bool:
    return bool(np.linalg.norm(a - b) <= tolerance * np.linalg.norm(b))


def test_exact_filter_without_dynamics_is_ridge_regression() -> None:
    """D = I, Ω = 0: the posterior is Bayesian least squares on all (k, v) pairs at once."""
    x = tokens()
    k, v, r = x["k"], x["v"], x["r"]
    gain, cov, _ = oracle.exact_gain(k, None, 0 * x["omega"], r, initial_cov=x["P_0"])
    _, state = oracle.delta_memory(x["q"], k, v, gain, None, initial_state=x["S_0"])
    prior = np.linalg.inv(x["P_0"])
    precision = prior + np.einsum("bthi,bthj,bth->bhij", k, k, 1 / r)
    ridge = np.linalg.solve(precision, prior @ x["S_0"] + np.einsum("bthk,bthv,bth->bhkv", k, v, 1 / r))
    assert close(cov, np.linalg.inv(precision))
    assert close(state, ridge)


def test_information_scale_multiplies_each_precision_increment() -> None:
    """P_T⁻¹ = P_0⁻¹ + Σ μ k kᵀ / r without dynamics, with one μ per head."""
    x = tokens()
    mu = np.array([0.5, 1.0, 4.0])
    _, cov, _ = oracle.exact_gain(x["k"], None, 0 * x["omega"], x["r"], info_scale=mu, initial_cov=x["P_0"])
    seen = np.einsum("bthi,bthj,bth->bhij", x["k"], x["k"], 1 / x["r"])
    assert close(np.linalg.inv(cov), np.linalg.inv(x["P_0"]) + mu[:, None, None] * seen)


def test_exact_filter_is_joint_gaussian_conditioning() -> None:
    """With decay and drift the filter is the law of the last memory given all values at once."""
    x = tokens()
    gain, cov, _ = oracle.exact_gain(x["k"], x["log_decay"], x["omega"], x["r"], initial_cov=x["P_0"])
    _, state = oracle.delta_memory(x["q"], x["k"], x["v"], gain, x["log_decay"], initial_state=x["S_0"])
    for b, h in np.ndindex(B, H):
        names = ("k", "v", "log_decay", "omega", "r")
        k, v, log_decay, omega, r = (x[name][b, :, h] for name in names)
        mean, covariance = oracle.batch_posterior(
            k, v, np.exp(log_decay), omega, r, x["S_0"][b, h], x["P_0"][b, h]
        )
        assert close(state[b, h], mean)
        assert close(cov[b, h], covariance)


@pytest.mark.parametrize("mu", [1.0, 3.0])
def test_diagonal_is_exact_for_keys_on_single_channels(mu: float) -> None:
    """One-hot keys never correlate channels, so nothing is lost by keeping the diagonal."""
    x = tokens()
    rng = np.random.default_rng(1)
    k = np.eye(K)[rng.integers(K, size=(B, T, H))] * rng.standard_normal((B, T, H, 1))
    arguments = (k, x["log_decay"], x["omega"], x["r"])
    gain, cov, prior = oracle.exact_gain(*arguments, info_scale=mu)
    gain_d, cov_d, prior_d = oracle.diagonal_gain(*arguments, info_scale=mu)
    assert close(gain_d, gain)
    assert close(cov_d[..., None] * np.eye(K), cov)
    assert close(prior_d[..., None] * np.eye(K), prior)


def test_diagonal_is_the_papers_mobius_scan() -> None:
    """p_t = n_t / d_t with (n, d) carried by the product of the paper's 2×2 matrices."""
    x = tokens()
    mu = 2.5
    alpha2, u = np.exp(2 * x["log_decay"]), mu * x["k"] ** 2 / x["r"][..., None]
    rows = [[alpha2, x["omega"]], [u * alpha2, 1 + u * x["omega"]]]
    M = np.moveaxis(np.array(rows), (0, 1), (-2, -1))
    pair = np.ones((B, H, K, 2, 1))
    for t in range(T):
        pair = M[:, t] @ pair
    _, cov, _ = oracle.diagonal_gain(x["k"], x["log_decay"], x["omega"], x["r"], info_scale=mu)
    assert close(cov, pair[..., 0, 0] / pair[..., 1, 0])


def test_isotropic_without_dynamics_adds_the_mean_information_of_a_channel() -> None:
    """1/b_T = 1/b_0 + Σ μ ‖k‖² / (K r) when nothing decays or drifts."""
    x = tokens()
    mu, b_0 = np.array([1.0, 2.0, 4.0]), np.full((B, H), 0.7)
    _, cov, _ = oracle.isotropic_gain(
        x["k"], None, 0 * x["omega"][..., 0], x["r"], info_scale=mu, initial_cov=b_0
    )
    assert close(1 / cov, 1 / b_0 + mu * ((x["k"] ** 2).sum(-1) / (K * x["r"])).sum(1))


def test_memory_without_erase_key_is_decayed_linear_attention() -> None:
    """o_t = τ Σ_{s ≤ t} (q_t · (α_{s+1} … α_t ⊙ g_s)) v_s, written out over all pairs."""
    x = tokens()
    out, _ = oracle.delta_memory(x["q"], None, x["v"], x["k"], x["log_decay"], scale=0.3)
    total = x["log_decay"].cumsum(1)
    decay = np.exp(total[:, :, None] - total[:, None])
    scores = np.einsum("bthk,bshk,btshk->btsh", x["q"], x["k"], decay)
    scores *= np.tri(T)[None, :, :, None]
    assert close(out, 0.3 * np.einsum("btsh,bshv->bthv", scores, x["v"]))


def test_packed_sequences_are_separate_sequences() -> None:
    x = {name: value[:1] for name, value in tokens().items()}
    cu_seqlens, N = [0, 1, 4, 5, T], 4
    rng = np.random.default_rng(2)
    p_0, S_0 = rng.exponential(1.0, (N, H, K)), rng.standard_normal((N, H, K, V))
    arguments = (x["k"], x["log_decay"], x["omega"], x["r"])
    gain, cov, prior = oracle.diagonal_gain(*arguments, initial_cov=p_0, cu_seqlens=cu_seqlens)
    inputs = (x["q"], x["k"], x["v"], gain, x["log_decay"])
    out, state = oracle.delta_memory(*inputs, initial_state=S_0, cu_seqlens=cu_seqlens)
    for n in range(N):
        a, b = cu_seqlens[n], cu_seqlens[n + 1]
        one = oracle.diagonal_gain(*(y[:, a:b] for y in arguments), initial_cov=p_0[n : n + 1])
        for packed, alone in zip((gain[:, a:b], cov[n : n + 1], prior[:, a:b]), one, strict=True):
            assert np.array_equal(packed, alone)
        one = oracle.delta_memory(*(y[:, a:b] for y in inputs), initial_state=S_0[n : n + 1])
        assert np.array_equal(out[:, a:b], one[0])
        assert np.array_equal(state[n : n + 1], one[1])
