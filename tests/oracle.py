"""The paper's filters and memory in float64 NumPy, one token after another.

Written from the paper's text alone and sharing no code with the package, so that agreement with it
means something. Letters are the paper's: alpha = exp(log_decay), omega, r, mu, kappa (the gain),
hats for what is predicted before the write. Shapes are those of `kdn.ops`; the gains always return
(gain, final covariance, prior of every token), the memory (out, final state).
"""

from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]


def _per_sequence(
    run: Callable[..., tuple[Array, ...]],
    tokens: Sequence[Array | None],
    initial: Array,
    cu_seqlens: ArrayLike | None,
) -> tuple[Array, ...]:
    """`run(*tokens, initial)` -> (final, *per token), each packed sequence as a batch of one."""
    if cu_seqlens is None:
        return run(*tokens, initial)
    bounds = pairwise(np.asarray(cu_seqlens).tolist())
    runs = [
        run(*(None if x is None else x[:, a:b] for x in tokens), initial[n : n + 1])
        for n, (a, b) in enumerate(bounds)
    ]
    final, *per_token = zip(*runs, strict=True)
    return np.concatenate(final), *(np.concatenate(x, axis=1) for x in per_token)


def _states(batch: int, cu_seqlens: ArrayLike | None) -> int:
    return batch if cu_seqlens is None else len(np.asarray(cu_seqlens)) - 1


def _alpha(log_decay: Array | None, shape: tuple[int, ...]) -> Array:
    """alpha for every token, head and channel, whether the decay is none, scalar or per channel."""
    if log_decay is None:
        return np.ones(shape)
    alpha = np.exp(log_decay)
    return np.broadcast_to(alpha[..., None] if alpha.ndim == 3 else alpha, shape)


def diagonal_gain(
    k: Array,
    log_decay: Array | None,
    process_noise: Array,
    obs_noise: Array,
    *,
    info_scale: ArrayLike = 1.0,
    initial_cov: Array | None = None,
    cu_seqlens: ArrayLike | None = None,
) -> tuple[Array, Array, Array]:
    """p̂ = α² p + ω;  κ = p̂ k / (r + Σ p̂ k²);  p = p̂ / (1 + u p̂),  u = μ k² / r."""
    B, _, H, K = k.shape
    mu = np.broadcast_to(np.asarray(info_scale, dtype=np.float64), (H,))[:, None]
    p_0 = np.ones((_states(B, cu_seqlens), H, K)) if initial_cov is None else initial_cov

    def run(k: Array, alpha: Array, omega: Array, r: Array, p: Array) -> tuple[Array, ...]:
        kappa, prior = np.empty(k.shape), np.empty(k.shape)
        for t in range(k.shape[1]):
            k_t, r_t = k[:, t], r[:, t, :, None]
            p_hat = alpha[:, t] ** 2 * p + omega[:, t]
            gamma = r_t + (p_hat * k_t**2).sum(-1, keepdims=True)
            kappa[:, t], prior[:, t] = p_hat * k_t / gamma, p_hat
            u = mu * k_t**2 / r_t
            p = p_hat / (1 + u * p_hat)
        return p, kappa, prior

    tokens = (k, _alpha(log_decay, k.shape), process_noise, obs_noise)
    cov, gain, prior = _per_sequence(run, tokens, p_0, cu_seqlens)
    return gain, cov, prior


def isotropic_gain(
    k: Array,
    log_decay: Array | None,
    process_noise: Array,
    obs_noise: Array,
    *,
    info_scale: ArrayLike = 1.0,
    initial_cov: Array | None = None,
    cu_seqlens: ArrayLike | None = None,
) -> tuple[Array, Array, Array]:
    """b̂ = a b + ω, a = mean α²;  κ = b̂ k / (r + b̂ ‖k‖²);  b = b̂ / (1 + u b̂), u = μ ‖k‖² / (K r)."""
    B, _, H, K = k.shape
    mu = np.broadcast_to(np.asarray(info_scale, dtype=np.float64), (H,))
    b_0 = np.ones((_states(B, cu_seqlens), H)) if initial_cov is None else initial_cov

    def run(k: Array, alpha: Array, omega: Array, r: Array, b: Array) -> tuple[Array, ...]:
        kappa, prior = np.empty(k.shape), np.empty(r.shape)
        for t in range(k.shape[1]):
            k_t, r_t = k[:, t], r[:, t]
            norm2 = (k_t**2).sum(-1)
            a = (alpha[:, t] ** 2).mean(-1)
            b_hat = a * b + omega[:, t]
            beta = b_hat / (r_t + b_hat * norm2)
            kappa[:, t], prior[:, t] = beta[..., None] * k_t, b_hat
            u = mu * norm2 / (K * r_t)
            b = b_hat / (1 + u * b_hat)
        return b, kappa, prior

    tokens = (k, _alpha(log_decay, k.shape), process_noise, obs_noise)
    cov, gain, prior = _per_sequence(run, tokens, b_0, cu_seqlens)
    return gain, cov, prior


def exact_gain(
    k: Array,
    log_decay: Array | None,
    process_noise: Array,
    obs_noise: Array,
    *,
    info_scale: ArrayLike = 1.0,
    initial_cov: Array | None = None,
    cu_seqlens: ArrayLike | None = None,
) -> tuple[Array, Array, Array]:
    """P̂ = D P D + Ω;  κ = P̂ k / (r + kᵀP̂ k);  P⁻¹ = P̂⁻¹ + μ k kᵀ / r.

    The last line is the Kalman update of an observation with noise r / μ, and is computed as that:
    P̂ itself may be singular.
    """
    B, _, H, K = k.shape
    mu = np.broadcast_to(np.asarray(info_scale, dtype=np.float64), (H,))[:, None, None]
    eye = np.eye(K)
    N = _states(B, cu_seqlens)
    P_0 = np.broadcast_to(eye, (N, H, K, K)) if initial_cov is None else initial_cov

    def run(k: Array, alpha: Array, omega: Array, r: Array, P: Array) -> tuple[Array, ...]:
        kappa, prior = np.empty(k.shape), np.empty((*k.shape, K))
        for t in range(k.shape[1]):
            k_t, r_t = k[:, t, :, :, None], r[:, t, :, None, None]
            alpha_t = alpha[:, t]
            P_hat = alpha_t[..., :, None] * P * alpha_t[..., None, :]
            P_hat = P_hat + omega[:, t, :, None, :] * eye
            Pk = P_hat @ k_t
            z = k_t.swapaxes(-1, -2) @ Pk
            kappa[:, t], prior[:, t] = (Pk / (r_t + z))[..., 0], P_hat
            P = P_hat - mu * (Pk @ Pk.swapaxes(-1, -2)) / (r_t + mu * z)
        return P, kappa, prior

    tokens = (k, _alpha(log_decay, k.shape), process_noise, obs_noise)
    cov, gain, prior = _per_sequence(run, tokens, P_0, cu_seqlens)
    return gain, cov, prior


def delta_memory(
    q: Array,
    k: Array | None,
    v: Array,
    gain: Array,
    log_decay: Array | None,
    *,
    scale: float | None = None,
    initial_state: Array | None = None,
    cu_seqlens: ArrayLike | None = None,
) -> tuple[Array, Array]:
    """Ŝ = D S;  S = Ŝ + κ (v − Ŝᵀk)ᵀ, or Ŝ + κ vᵀ with no erase key;  o = τ Sᵀq."""
    B, _, H, K = q.shape
    V = v.shape[-1]
    tau = K**-0.5 if scale is None else scale
    S_0 = np.zeros((_states(B, cu_seqlens), H, K, V)) if initial_state is None else initial_state

    def run(q: Array, k: Array | None, v: Array, kappa: Array, alpha: Array, S: Array) -> tuple[Array, ...]:
        out = np.empty(v.shape)
        for t in range(v.shape[1]):
            S_hat = alpha[:, t, :, :, None] * S
            delta = v[:, t, :, None, :]
            if k is not None:
                delta = delta - k[:, t, :, None, :] @ S_hat
            S = S_hat + kappa[:, t, :, :, None] * delta
            out[:, t] = tau * (q[:, t, :, None, :] @ S)[..., 0, :]
        return S, out

    tokens = (q, k, v, gain, _alpha(log_decay, q.shape))
    state, out = _per_sequence(run, tokens, S_0, cu_seqlens)
    return out, state


def batch_posterior(
    k: Array, v: Array, alpha: Array, omega: Array, r: Array, S_0: Array, P_0: Array
) -> tuple[Array, Array]:
    """Mean and covariance of the last latent memory given all values at once, without recursion.

    One sequence and one head: k, alpha, omega [T, K], v [T, V], r [T], S_0 [K, V], P_0 [K, K].
    Memories and values are jointly Gaussian, linear in the sources (S̃_0, W_1 … W_T, e_1 … e_T);
    that joint is built whole and conditioned by the textbook formula.
    """
    T, K = k.shape
    # F[t] maps the stacked (S̃_0, W_1, …, W_T), of covariance Q, to the latent memory of token t.
    F = np.zeros((T, K, (T + 1) * K))
    for t in range(T):
        F[t, :, :K] = np.diag(alpha[: t + 1].prod(0))
        for s in range(t + 1):
            F[t, :, (s + 1) * K : (s + 2) * K] = np.diag(alpha[s + 1 : t + 1].prod(0))
    Q = np.zeros(((T + 1) * K, (T + 1) * K))
    Q[:K, :K] = P_0
    Q[K:, K:] = np.diag(omega.ravel())
    G = np.einsum("tk,tkn->tn", k, F)
    cross = F[-1] @ Q @ G.T
    weights = np.linalg.solve(G @ Q @ G.T + np.diag(r), cross.T).T
    mean_v = (k * alpha.cumprod(0)) @ S_0
    mean = alpha.prod(0)[:, None] * S_0 + weights @ (v - mean_v)
    return mean, F[-1] @ Q @ F[-1].T - weights @ cross.T
