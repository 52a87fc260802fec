"""The public functions: the four operations' equations, shapes, defaults and errors.

Nothing is computed here. Arguments are checked (`checks.py`), completed, and handed to a backend.
Layout is [batch, time, heads, channels]; B, T, H, K, V below. With `cu_seqlens` (N+1 offsets, first 0,
last T) B is 1, the time axis holds N sequences one after the other, and covariances and states have N
in place of B. Inputs may be float16, bfloat16, float32 or float64; covariances and states are float32
(float64 if any input is).
"""

from torch import Tensor

from kdn.ops import checks, registry
from kdn.ops.precision import state_dtype

__all__ = ["delta_memory", "diagonal_gain", "exact_gain", "isotropic_gain"]


def _gain(
    name: str,
    k: Tensor,
    log_decay: Tensor | None,
    process_noise: Tensor,
    obs_noise: Tensor,
    info_scale: float | Tensor,
    initial_cov: Tensor | None,
    cu_seqlens: Tensor | None,
    return_prior: bool,
    backend: str | None,
) -> tuple[Tensor, ...]:
    checks.gain_arguments(name, k, log_decay, process_noise, obs_noise, info_scale, initial_cov, cu_seqlens)
    tensors = (k, log_decay, process_noise, obs_noise, info_scale, initial_cov)
    dtype = state_dtype(*tensors)
    heads = k.shape[2]
    mu = checks.per_head(info_scale, heads, dtype, k.device)
    operation = getattr(registry.choose(backend, k.device), name)
    gain, cov, prior = operation(
        k, log_decay, process_noise, obs_noise, mu, initial_cov, cu_seqlens, return_prior
    )
    return (gain, cov, prior) if return_prior else (gain, cov)


def diagonal_gain(
    k: Tensor,
    log_decay: Tensor | None,
    process_noise: Tensor,
    obs_noise: Tensor,
    *,
    info_scale: float | Tensor = 1.0,
    initial_cov: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    return_prior: bool = False,
    backend: str | None = None,
) -> tuple[Tensor, ...]:
    """Kalman gain with one variance per key channel.

        p̂_t = α_t² ⊙ p_{t−1} + ω_t          predict
        g_t = p̂_t ⊙ k_t / (r_t + Σ p̂_t k_t²)   the gain, from the variance before the write
        p_t = p̂_t / (1 + (μ/r_t) k_t² ⊙ p̂_t)   what the token's evidence leaves

    k: B T H K. log_decay (log α ≤ 0): B T H K, B T H or None (α = 1). process_noise ω ≥ 0: B T H K.
    obs_noise r > 0: B T H. info_scale μ > 0: a number, or a tensor that broadcasts to H.
    initial_cov p_0: B H K, None is 1.

    Returns the gain (B T H K, dtype of k) and the final p (B H K); with `return_prior`, also p̂ of every
    token (B T H K). Raises ValueError or TypeError naming the argument that does not fit.
    """
    return _gain(
        "diagonal_gain",
        k,
        log_decay,
        process_noise,
        obs_noise,
        info_scale,
        initial_cov,
        cu_seqlens,
        return_prior,
        backend,
    )


def isotropic_gain(
    k: Tensor,
    log_decay: Tensor | None,
    process_noise: Tensor,
    obs_noise: Tensor,
    *,
    info_scale: float | Tensor = 1.0,
    initial_cov: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    return_prior: bool = False,
    backend: str | None = None,
) -> tuple[Tensor, ...]:
    """Kalman gain with one variance per head.

        b̂_t = mean(α_t²) b_{t−1} + ω_t                    predict, projected on its trace
        g_t = b̂_t k_t / (r_t + b̂_t ‖k_t‖²)
        b_t = b̂_t / (1 + (μ/r_t) (‖k_t‖²/K) b̂_t)

    Shapes as in `diagonal_gain`, except process_noise: B T H, and initial_cov, the final b: B H, and the
    prior b̂: B T H.
    """
    return _gain(
        "isotropic_gain",
        k,
        log_decay,
        process_noise,
        obs_noise,
        info_scale,
        initial_cov,
        cu_seqlens,
        return_prior,
        backend,
    )


def exact_gain(
    k: Tensor,
    log_decay: Tensor | None,
    process_noise: Tensor,
    obs_noise: Tensor,
    *,
    info_scale: float | Tensor = 1.0,
    initial_cov: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    return_prior: bool = False,
    backend: str | None = None,
) -> tuple[Tensor, ...]:
    """The Kalman filter's own gain, with the dense key-space covariance.

        P̂_t = D_t P_{t−1} D_t + diag(ω_t)
        g_t = P̂_t k_t / (r_t + k_tᵀ P̂_t k_t)
        P_t = P̂_t − P̂_t k_t k_tᵀ P̂_t · μ / (r_t + μ k_tᵀ P̂_t k_t)     (μ = 1: the filter of the paper)

    Shapes as in `diagonal_gain`, except initial_cov, the final P: B H K K (its symmetric part is what
    counts), and the prior P̂: B T H K K. Sequential on every backend: K² work and memory traffic per
    token and head, no parallelism over time (see docs/exact.md).
    """
    return _gain(
        "exact_gain",
        k,
        log_decay,
        process_noise,
        obs_noise,
        info_scale,
        initial_cov,
        cu_seqlens,
        return_prior,
        backend,
    )


def delta_memory(
    q: Tensor,
    k: Tensor | None,
    v: Tensor,
    gain: Tensor,
    log_decay: Tensor | None,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """The one memory: decay, erase what is read at k, write the residual along the gain, read at q.

        S_t = (I − g_t k_tᵀ) D_t S_{t−1} + g_t v_tᵀ      o_t = τ S_tᵀ q_t      D_t = diag(exp(log_decay_t))

    q, gain: B T H K. k: B T H K, or None for pure addition. v: B T H V. log_decay: B T H K, B T H or
    None (no decay). scale τ: None is K ** −0.5. initial_state: B H K V, None is zero.

    Returns the outputs (B T H V, dtype of v) and the final state (B H K V). One token at a time, with
    `initial_state` the state that the last call returned, gives what one call over all tokens gives.
    """
    checks.memory_arguments(q, k, v, gain, log_decay, scale, initial_state, cu_seqlens)
    tau = q.shape[-1] ** -0.5 if scale is None else float(scale)
    operation = registry.choose(backend, q.device).delta_memory
    result: tuple[Tensor, Tensor] = operation(q, k, v, gain, log_decay, tau, initial_state, cu_seqlens)
    return result
