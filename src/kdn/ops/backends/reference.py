"""The paper's equations, token by token: slow, short, and what every other backend is tested against.

Letters are the paper's: S memory, P covariance (p its diagonal, b its only value), a hat for the value
before the write, α decay, ω process noise, r observation noise, μ information scale, κ gain, k key.
Gradients are autograd's own, through the loop. Arithmetic is in float64 if any input is, else float32.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from kdn.ops.precision import state_dtype, without_autocast

RANK = 0

Gain = tuple[Tensor, Tensor, Tensor | None]
Step = Callable[..., tuple[Tensor, Tensor, Tensor]]


def unavailable(device: torch.device) -> str | None:
    return None


# --- The three gains: one token each. k, α [B, H, K]; r [B, H, 1]; μ [H, 1]. Returns κ, P_t, P̂_t. ---


def _diagonal(
    p: Tensor, k: Tensor, α: Tensor, ω: Tensor, r: Tensor, μ: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    p_hat = α**2 * p + ω
    κ = p_hat * k / (r + (p_hat * k**2).sum(-1, keepdim=True))
    u = μ * k**2 / r
    return κ, p_hat / (1 + u * p_hat), p_hat


def _isotropic(
    b: Tensor, k: Tensor, α: Tensor, ω: Tensor, r: Tensor, μ: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    norm2 = (k**2).sum(-1)
    b_hat = (α**2).mean(-1) * b + ω
    β = b_hat / (r[..., 0] + b_hat * norm2)
    u = (μ / r)[..., 0] * norm2 / k.shape[-1]
    return β[..., None] * k, b_hat / (1 + u * b_hat), b_hat


def _exact(P: Tensor, k: Tensor, α: Tensor, ω: Tensor, r: Tensor, μ: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    P_hat = α[..., :, None] * P * α[..., None, :] + torch.diag_embed(ω)
    Pk = (P_hat @ k[..., None])[..., 0]
    z = (k * Pk).sum(-1, keepdim=True)
    # Rounding can leave z ≤ 0 where a long key has been seen before: such a direction counts as known.
    Pk, z = Pk.where(z > 0, 0), z.clamp(min=0)
    κ = Pk / (r + z)
    # At μ = 1 this is the paper's P = (I − κ kᵀ) P̂.
    P = P_hat - (μ / (r + μ * z))[..., None] * Pk[..., :, None] * Pk[..., None, :]
    return κ, P, P_hat


# --- The loops over tokens ---


def _filter(
    step: Step,
    initial: Callable[[int], Tensor],
    k: Tensor,
    log_decay: Tensor | None,
    process_noise: Tensor,
    obs_noise: Tensor,
    info_scale: Tensor,
    initial_cov: Tensor | None,
    cu_seqlens: Tensor | None,
    return_prior: bool,
) -> Gain:
    dtype = state_dtype(k, log_decay, process_noise, obs_noise, info_scale, initial_cov)
    α, μ = _decay(log_decay, k, dtype), info_scale[:, None]
    keys, ω, r = k.to(dtype), process_noise.to(dtype), obs_noise.to(dtype)[..., None]
    pieces, n = _pieces(k, cu_seqlens)
    covs = (initial(n) if initial_cov is None else initial_cov).to(dtype)
    gains, priors, finals = [], [], []
    for rows, tokens in pieces:
        P = covs[rows]
        for t in tokens:
            κ, P, P_hat = step(P, keys[:, t], α[:, t], ω[:, t], r[:, t], μ)
            gains.append(κ)
            if return_prior:
                priors.append(P_hat)
        finals.append(P)
    prior = torch.stack(priors, 1) if return_prior else None
    return torch.stack(gains, 1).to(k.dtype), torch.cat(finals), prior


@without_autocast
def delta_memory(
    q: Tensor,
    k: Tensor | None,
    v: Tensor,
    gain: Tensor,
    log_decay: Tensor | None,
    scale: float,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor]:
    dtype = state_dtype(q, k, v, gain, log_decay, initial_state)
    α = _decay(log_decay, gain, dtype)[..., None]
    # As columns [K, 1] and rows [1, V], so that products below read like the equations.
    queries, κ = (x.to(dtype)[..., None] for x in (q, gain))
    values = v.to(dtype)[..., None, :]
    keys = torch.zeros_like(κ) if k is None else k.to(dtype)[..., None]
    pieces, n = _pieces(q, cu_seqlens)
    if initial_state is None:
        states = values.new_zeros(n, q.shape[2], q.shape[3], v.shape[3])
    else:
        states = initial_state.to(dtype)
    outputs, finals = [], []
    for rows, tokens in pieces:
        S = states[rows]
        for t in tokens:
            S_hat = α[:, t] * S
            residual = values[:, t] - keys[:, t].mT @ S_hat
            S = S_hat + κ[:, t] * residual
            outputs.append(scale * (queries[:, t].mT @ S)[..., 0, :])
        finals.append(S)
    return torch.stack(outputs, 1).to(v.dtype), torch.cat(finals)


def _decay(log_decay: Tensor | None, like: Tensor, dtype: torch.dtype) -> Tensor:
    """α as [B, T, H, K], whatever shape log α came in."""
    if log_decay is None:
        return torch.ones_like(like, dtype=dtype)
    α = log_decay.to(dtype).exp()
    return (α[..., None] if α.ndim == 3 else α).expand(like.shape)


def _pieces(x: Tensor, cu_seqlens: Tensor | None) -> tuple[list[tuple[slice, range]], int]:
    """The runs of the loop, each as (rows of the states, tokens), and the number of sequences."""
    batch, time = x.shape[:2]
    if cu_seqlens is None:
        return [(slice(None), range(time))], batch
    ends: list[int] = cu_seqlens.tolist()
    runs = [(slice(i, i + 1), range(ends[i], ends[i + 1])) for i in range(len(ends) - 1)]
    return runs, len(runs)


# --- The public names ---


@without_autocast
def diagonal_gain(
    k: Tensor,
    log_decay: Tensor | None,
    process_noise: Tensor,
    obs_noise: Tensor,
    info_scale: Tensor,
    initial_cov: Tensor | None,
    cu_seqlens: Tensor | None,
    return_prior: bool,
) -> Gain:
    def initial(n: int) -> Tensor:
        return k.new_ones(n, *k.shape[2:])

    arguments = (k, log_decay, process_noise, obs_noise, info_scale, initial_cov, cu_seqlens)
    return _filter(_diagonal, initial, *arguments, return_prior)


@without_autocast
def isotropic_gain(
    k: Tensor,
    log_decay: Tensor | None,
    process_noise: Tensor,
    obs_noise: Tensor,
    info_scale: Tensor,
    initial_cov: Tensor | None,
    cu_seqlens: Tensor | None,
    return_prior: bool,
) -> Gain:
    def initial(n: int) -> Tensor:
        return k.new_ones(n, k.shape[2])

    arguments = (k, log_decay, process_noise, obs_noise, info_scale, initial_cov, cu_seqlens)
    return _filter(_isotropic, initial, *arguments, return_prior)


@without_autocast
def exact_gain(
    k: Tensor,
    log_decay: Tensor | None,
    process_noise: Tensor,
    obs_noise: Tensor,
    info_scale: Tensor,
    initial_cov: Tensor | None,
    cu_seqlens: Tensor | None,
    return_prior: bool,
) -> Gain:
    heads, width = k.shape[2:]

    def initial(n: int) -> Tensor:
        return torch.eye(width, device=k.device).expand(n, heads, width, width)

    if initial_cov is not None:
        initial_cov = (initial_cov + initial_cov.mT) / 2
    arguments = (k, log_decay, process_noise, obs_noise, info_scale, initial_cov, cu_seqlens)
    return _filter(_exact, initial, *arguments, return_prior)
