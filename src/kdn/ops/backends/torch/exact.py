"""The exact filter: dense covariance, sequential over tokens, backward by hand.

    P̂ = (α αᵀ) ⊙ P₋ + diag(ω)      h = P̂ k      z = kᵀh      g = h/(r + z)
    P = P̂ − c h hᵀ                  c = μ/(r + μ z)

All of it in float64. A matrix of float32 holds variances down to 10⁻⁷ of its largest only, and a token
leaves r/‖k‖² along its key: with r = 0.01 and a key of norm 100 the next gain for that key would already
be wrong in its second digit. Where even float64 has nothing left (z ≤ 0 by rounding) the direction
counts as known: no gain, no update.

There is no chunk form: the recursion of P is a Riccati equation of the whole matrix. Cost per token and
head: about 8 K² flop forward and three times that backward, and as many passes over K² numbers; memory:
one P every `EVERY` tokens, plus `EVERY` of them while going back.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from kdn.ops.backends.torch.layout import Plan, most_chunks, plan
from kdn.ops.operators import gain_operator, like

EVERY = 32  # about √T at the lengths where the exact filter is affordable


class _Tokens(NamedTuple):
    """The inputs in plan order, one token per row: [B·T, H, …]."""

    k: Tensor
    alpha: Tensor  # [..., K or 1]
    w: Tensor
    r: Tensor  # [..., 1]


def _tokens(
    cut: Plan,
    k: Tensor,
    log_decay: Tensor | None,
    process_noise: Tensor,
    obs_noise: Tensor,
) -> _Tokens:
    keys, w, r = (cut.gather(x)[:, 0].double() for x in (k, process_noise, obs_noise[..., None]))
    if log_decay is None:
        return _Tokens(keys, torch.ones_like(r), w, r)
    log_decay = log_decay if log_decay.ndim == 4 else log_decay[..., None]
    return _Tokens(keys, cut.gather(log_decay)[:, 0].double().exp(), w, r)


def _times(matrix: Tensor, vector: Tensor) -> Tensor:
    return (matrix @ vector[..., None])[..., 0]


def _outer(x: Tensor, y: Tensor) -> Tensor:
    return x[..., :, None] * y[..., None, :]


def _step(cov: Tensor, x: _Tokens, mu: Tensor) -> tuple[Tensor, ...]:
    """P₋ [N, H, K, K], one round of tokens → P̂, h, z, c, P."""
    prior = cov * _outer(x.alpha, x.alpha)
    prior.diagonal(dim1=-2, dim2=-1).add_(x.w)
    h = _times(prior, x.k)
    z = (h * x.k).sum(-1, keepdim=True)
    h, z = h.where(z > 0, 0), z.clamp(min=0)
    c = mu / (x.r + mu * z)
    return prior, h, z, c, prior - _outer(c * h, h)


def _rounds(x: _Tokens, round_: tuple[int, int]) -> _Tokens:
    first, count = round_
    return _Tokens(*(part[first : first + count] for part in x))


def _segments(cut: Plan) -> list[list[tuple[int, int]]]:
    return [cut.rounds[i : i + EVERY] for i in range(0, len(cut.rounds), EVERY)]


def _symmetric(x: Tensor) -> Tensor:
    return (x + x.mT) / 2


def _exact(
    k: Tensor,
    log_decay: Tensor | None,
    process_noise: Tensor,
    obs_noise: Tensor,
    mu: Tensor,
    initial_cov: Tensor | None,
    cu_seqlens: Tensor | None,
    with_prior: bool,
    for_backward: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """gain, final covariance, prior (if asked), P at the start of every segment (for_backward)."""
    cut = plan(k, cu_seqlens, 1)
    x = _tokens(cut, k, log_decay, process_noise, obs_noise)
    heads, width = k.shape[2:]
    if initial_cov is None:
        cov = torch.eye(width, dtype=torch.float64, device=k.device)
        cov = cov.repeat(len(cut.order), heads, 1, 1)
    else:
        cov = _symmetric(initial_cov[cut.order].double())
    gain, scale = torch.empty_like(x.k), mu.double()[:, None]
    kept, used = cov.new_empty(_kept_shape(k, cu_seqlens) if for_backward else 0), 0
    priors = k.new_empty((len(x.k), heads, width, width) if with_prior else 0, dtype=mu.dtype)
    for rounds in _segments(cut):
        if for_backward:
            kept[used : used + rounds[0][1]] = cov[: rounds[0][1]]
            used += rounds[0][1]
        for first, count in rounds:
            now = _rounds(x, (first, count))
            prior, h, z, _, posterior = _step(cov[:count], now, scale)
            cov[:count] = posterior
            gain[first : first + count] = h / (now.r + z)
            if with_prior:
                priors[first : first + count] = prior
    gain_out = k.new_empty(k.shape)
    cut.scatter(gain[:, None], gain_out)
    prior_out = priors
    if with_prior:
        prior_out = priors.new_empty(*k.shape, width)
        cut.scatter(priors[:, None], prior_out)
    cov_out = torch.empty_like(cov, dtype=mu.dtype)
    cov_out[cut.order] = cov.to(mu.dtype)
    return gain_out, cov_out, prior_out, kept


def _exact_backward(
    d_gain: Tensor | None,
    d_cov: Tensor | None,
    d_prior: Tensor | None,
    k: Tensor,
    log_decay: Tensor | None,
    process_noise: Tensor,
    obs_noise: Tensor,
    mu: Tensor,
    initial_cov: Tensor | None,
    cu_seqlens: Tensor | None,
    prior_out: Tensor,
    kept: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of k, log_decay, process_noise, obs_noise, mu, initial_cov (empty where there is none)."""
    cut = plan(k, cu_seqlens, 1)
    x = _tokens(cut, k, log_decay, process_noise, obs_noise)
    heads, width = k.shape[2:]
    dg = None if d_gain is None else cut.gather(d_gain)[:, 0].double()
    dp = None if d_prior is None else cut.gather(d_prior)[:, 0].double()
    if d_cov is None:
        d = kept.new_zeros(len(cut.order), heads, width, width)
    else:
        d = _symmetric(d_cov[cut.order].double())
    d_k, d_w, d_r = torch.empty_like(x.k), torch.empty_like(x.w), torch.empty_like(x.r)
    scale = mu.double()[:, None]
    d_log, d_mu = torch.empty_like(x.alpha), torch.zeros_like(scale[:, 0])
    last = sum(rounds[0][1] for rounds in _segments(cut))
    for rounds in reversed(_segments(cut)):
        entering = kept[last - rounds[0][1] : last]
        last -= rounds[0][1]
        steps = []
        for first, count in rounds:
            entering = entering[:count]
            prior, h, z, c, posterior = _step(entering, _rounds(x, (first, count)), scale)
            steps.append((entering, prior, h, z, c))
            entering = posterior
        for (first, count), (before, prior, h, z, c) in zip(reversed(rounds), reversed(steps), strict=True):
            now, rows = _rounds(x, (first, count)), slice(first, first + count)
            d_posterior = d[:count]
            d_h = _times(d_posterior, h)
            d_c = -(h * d_h).sum(-1, keepdim=True)
            d_h *= -2 * c
            d_gamma = torch.zeros_like(z)
            if dg is not None:
                gamma = now.r + z
                d_gamma = -(dg[rows] * h).sum(-1, keepdim=True) / gamma**2
                d_h += dg[rows] / gamma
            d_z = d_gamma - d_c * c**2
            d_r[rows] = d_gamma - d_c * c**2 / scale
            d_mu += (d_c * now.r * c**2).sum((0, 2)) / scale[:, 0] ** 2
            d_h = (d_h + d_z * now.k).where(z > 0, 0)
            d_k[rows] = d_z * h + _times(prior, d_h)
            d_posterior += _symmetric(_outer(d_h, now.k))  # now ∂P̂
            if dp is not None:
                d_posterior += _symmetric(dp[rows])
            d_w[rows] = d_posterior.diagonal(dim1=-2, dim2=-1)
            d_posterior *= _outer(now.alpha, now.alpha)  # now ∂P₋
            d_alpha = 2 * (d_posterior * before).sum(-1)
            d_log[rows] = d_alpha if d_log.shape[-1] == width else d_alpha.sum(-1, keepdim=True)
    out_k, out_decay, out_w, out_r, _, out_cov = like(k, log_decay, process_noise, obs_noise, mu, initial_cov)
    cut.scatter(d_k[:, None], out_k)
    cut.scatter(d_w[:, None], out_w)
    cut.scatter(d_r[:, None, :, 0], out_r)
    if log_decay is not None:
        cut.scatter((d_log if log_decay.ndim == 4 else d_log[..., 0])[:, None], out_decay)
    if initial_cov is not None:
        out_cov[cut.order] = d.to(out_cov.dtype)
    return out_k, out_decay, out_w, out_r, d_mu.to(mu.dtype), out_cov


def _kept_shape(k: Tensor, cu_seqlens: Tensor | None) -> tuple[int, ...]:
    return most_chunks(k, cu_seqlens, EVERY), k.shape[2], k.shape[3], k.shape[3]


exact_gain = gain_operator("torch", "exact", _exact, _exact_backward, _kept_shape, kept_dtype=torch.float64)
