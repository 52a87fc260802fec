"""The diagonal and isotropic gains: one Möbius scan over channels, forward and backward by hand.

Both track independent variances p, X of them per head (K for diagonal, 1 for isotropic), by

    p̂_t = a_t p_{t−1} + ω_t        p_t = p̂_t / (1 + u_t p̂_t)        u_t = μ e_t / (r_t K/X)

where e is k² per channel (diagonal) or ‖k‖² (isotropic) and a is α² or its mean. The gain is
g = p̂ k/γ with γ = r + Σ p̂ e. As a map of (n, d), p = n/d, the recursion is linear: h = a n + ω d,
then (n, d) ← (h, d + u h). Three passes:

    1  every chunk's product of 2×2 matrices, all chunks at once          (summary)
    2  the state entering every chunk, chunk after chunk                  (carry)
    3  every token's p̂ from there, all chunks at once                     (replay)

(n, d) is homogeneous: after every product, matrices and vectors are divided by their largest entry, so
nothing overflows however small ω is. The entries are ≥ 0 and d never vanishes, since d ← d + u h ≥ d.

The backward pass is an affine scan in reverse, in the same three passes. With ∂p̂ what reaches p̂_t from
the gain and ∂p_t what reaches p_t from later tokens,

    ∂p̂_t ← ∂p̂_t + c_t ∂p_t        ∂p_{t−1} = a_t ∂p̂_t        c_t = dp_t/dp̂_t = 1/(1 + u_t p̂_t)²
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from kdn.ops.backends.torch.layout import Plan, chunk_size, most_chunks, plan
from kdn.ops.operators import gain_operator, like

CHUNK = 256


class _Chunks(NamedTuple):
    """The inputs cut into chunks, and what both passes derive from them. Axes: [rows, C, H, K or X]."""

    k: Tensor
    alpha2: Tensor  # [..., K or 1] α², before isotropic's mean
    a: Tensor  # [..., X or 1]
    w: Tensor
    r: Tensor  # [..., 1]
    e: Tensor
    evidence: Tensor  # [..., 1] μ / (r K/X)
    u: Tensor


def _cut(
    cut: Plan,
    k: Tensor,
    log_decay: Tensor | None,
    process_noise: Tensor,
    obs_noise: Tensor,
    mu: Tensor,
    diagonal: bool,
) -> _Chunks:
    dtype, width = mu.dtype, k.shape[-1]
    keys = cut.gather(k).to(dtype)
    if log_decay is None:
        alpha2 = keys.new_ones(1, 1, 1, 1).expand(*keys.shape[:3], 1)
    else:
        log_decay = log_decay if log_decay.ndim == 4 else log_decay[..., None]
        alpha2 = cut.gather(log_decay).to(dtype).mul(2).exp_()
    w = cut.gather(process_noise if diagonal else process_noise[..., None]).to(dtype)
    r = cut.gather(obs_noise[..., None]).to(dtype)
    if cut.valid is not None:  # any positive number: padding has k = 0, ω = 0 and α = 1
        r = r.masked_fill(~cut.valid[..., None, None], 1)
    if diagonal:
        e, a, share = keys * keys, alpha2, 1
    else:
        e, a, share = _sum(keys * keys), alpha2.mean(-1, keepdim=True), width
    evidence = mu[:, None] / (r * share)
    return _Chunks(keys, alpha2, a, w, r, e, evidence, e * evidence)


def _sum(x: Tensor) -> Tensor:
    return x.sum(-1, keepdim=True)


# --- the scan: a, w, u [rows, C, H, X] in plan order ---


def _priors(c: _Chunks, p0: Tensor, cut: Plan, room: int) -> tuple[Tensor, Tensor, Tensor]:
    """p0 [N, H, X] → p̂ of every token, p entering every chunk [room ≥ rows, H, X], final p [N, H, X]."""
    final = p0.clone()
    entering = p0.new_empty(room, *p0.shape[1:])
    if len(cut.rounds) == 1:
        entering[: len(c.w)] = p0[: len(c.w)]
    else:
        matrix_n, matrix_d = _summaries(c)
        n, d = p0.clone(), torch.ones_like(p0)
        for first, count in cut.rounds:
            rows = slice(first, first + count)
            torch.div(n[:count], d[:count], out=entering[rows])
            h = matrix_n[0, rows] * n[:count] + matrix_n[1, rows] * d[:count]
            d = matrix_d[0, rows] * n[:count] + matrix_d[1, rows] * d[:count]
            largest = torch.maximum(h, d)
            n, d = h / largest, d / largest
    prior, p = torch.empty_like(c.w), entering[: len(c.w)]
    for t in range(cut.chunk):
        torch.addcmul(c.w[:, t], c.a[:, t], p, out=prior[:, t])
        p = prior[:, t] / (c.u[:, t] * prior[:, t] + 1)
    for first, count in cut.rounds:
        final[:count] = p[first : first + count]
    return prior, entering, final


def _summaries(c: _Chunks) -> tuple[Tensor, Tensor]:
    """Each chunk's matrix [[n0, n1], [d0, d1]], as n, d [2, rows, H, X]."""
    n = torch.zeros_like(c.w[:, 0]).expand(2, -1, -1, -1).contiguous()
    d = torch.zeros_like(n)
    n[0], d[1] = 1, 1
    for t in range(c.w.shape[1]):
        h = torch.addcmul(c.w[:, t] * d, c.a[:, t], n)
        d.addcmul_(c.u[:, t], h)
        largest = torch.maximum(h, d).amax(0)
        n = h.div_(largest)
        d.div_(largest)
    return n, d


def _reverse(a: Tensor, c: Tensor, x: Tensor, final: Tensor, cut: Plan) -> Tensor:
    """Turn, in place, x from the gain's ∂p̂ to the whole ∂p̂, and c to c ∂p; return ∂p_0 [N, H, X].

    `final` is the gradient of the final p.
    """
    left = final.clone()
    entering = torch.empty_like(x[:, 0])
    if len(cut.rounds) == 1:
        entering.copy_(final[: entering.shape[0]])
    else:
        slope, offset = torch.ones_like(entering), torch.zeros_like(entering)
        for t in reversed(range(cut.chunk)):
            offset = torch.addcmul(x[:, t], c[:, t], offset).mul_(a[:, t])
            slope.mul_(c[:, t]).mul_(a[:, t])
        for first, count in reversed(cut.rounds):
            rows = slice(first, first + count)
            entering[rows] = left[:count]
            left[:count] = torch.addcmul(offset[rows], slope[rows], left[:count])
    p = entering
    for t in reversed(range(cut.chunk)):
        c[:, t].mul_(p)
        x[:, t].add_(c[:, t])
        p = a[:, t] * x[:, t]
    if len(cut.rounds) == 1:
        left[: p.shape[0]] = p
    return left


# --- the operators ---


def _initial(cov: Tensor | None, k: Tensor, cut: Plan, dtype: torch.dtype, diagonal: bool) -> Tensor:
    """p_0 [N, H, X] in plan order."""
    width = k.shape[-1] if diagonal else 1
    if cov is None:
        return k.new_ones(len(cut.order), k.shape[2], width, dtype=dtype)
    return (cov if diagonal else cov[..., None])[cut.order].to(dtype)


def _gain(
    diagonal: bool,
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
    """gain, final covariance, prior, and the covariance entering every chunk."""
    cut = plan(k, cu_seqlens, CHUNK)
    c = _cut(cut, k, log_decay, process_noise, obs_noise, mu, diagonal)
    p0 = _initial(initial_cov, k, cut, mu.dtype, diagonal)
    prior, entering, final = _priors(c, p0, cut, most_chunks(k, cu_seqlens, cut.chunk))
    inverse = (_sum(prior * c.e) + c.r).reciprocal_()
    gain_out = k.new_empty(k.shape)
    cut.scatter((prior * inverse).mul_(c.k) if diagonal else prior * inverse * c.k, gain_out)
    if not diagonal:
        prior, final = prior[..., 0], final[..., 0]
    prior_out = k.new_empty(process_noise.shape if with_prior else 0, dtype=mu.dtype)
    if with_prior:
        cut.scatter(prior, prior_out)
    cov_out = final.new_empty(final.shape)
    cov_out[cut.order] = final
    if not for_backward:
        entering = entering.new_empty(0)
    return gain_out, cov_out, prior_out, entering


def _gain_backward(
    diagonal: bool,
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
    entering: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of k, log_decay, process_noise, obs_noise, mu, initial_cov (empty where there is none)."""
    cut, dtype = plan(k, cu_seqlens, CHUNK), mu.dtype
    c = _cut(cut, k, log_decay, process_noise, obs_noise, mu, diagonal)
    prior = cut.gather(prior_out if diagonal else prior_out[..., None])
    shrink = (c.u * prior).add_(1).reciprocal_()  # 1/(1 + u p̂)
    before = torch.empty_like(prior)  # p_{t−1}
    before[:, 0] = entering[: len(before)]
    torch.mul(prior[:, :-1], shrink[:, :-1], out=before[:, 1:])
    inverse = (_sum(prior * c.e) + c.r).reciprocal_()  # 1/γ

    if d_gain is None:
        d_k = torch.zeros_like(c.k)
        d_gamma = torch.zeros_like(c.r)
        x = torch.zeros_like(prior)
    else:
        dg = cut.gather(d_gain).to(dtype)
        dg_k = dg * c.k
        dg_k = dg_k if diagonal else _sum(dg_k)
        d_k = dg.mul_(inverse).mul_(prior)
        d_gamma = -_sum(dg_k * prior) * inverse.square()
        if diagonal:
            x = dg_k.mul_(inverse).addcmul_(d_gamma, c.e)
        else:  # the same, (γ − p̂ e)/γ² being r/γ²: for a long key the difference would have no digits left
            x = dg_k.mul_(c.r).mul_(inverse).mul_(inverse)
    if d_prior is not None:
        x += cut.gather(d_prior if diagonal else d_prior[..., None]).to(dtype)
    final = torch.zeros(len(cut.order), *prior.shape[2:], dtype=dtype, device=k.device)
    if d_cov is not None:
        final += (d_cov if diagonal else d_cov[..., None])[cut.order]

    slope = shrink.square_()
    left = _reverse(c.a, slope, x, final, cut)
    d_u = slope.mul_(prior).mul_(prior).neg_()  # slope now holds c ∂p
    d_e = (d_u * c.evidence).addcmul_(d_gamma, prior)
    d_k.addcmul_(d_e, c.k, value=2)
    d_r = d_gamma - _sum(d_u * c.u) / c.r
    d_mu = (d_u * c.u).sum((0, 1, 3)) / mu
    d_a = before.mul_(x)

    out_k, out_decay, out_w, out_r, _, out_cov = like(k, log_decay, process_noise, obs_noise, mu, initial_cov)
    cut.scatter(d_k, out_k)
    cut.scatter(x if diagonal else x[..., 0], out_w)
    cut.scatter(d_r[..., 0], out_r)
    if log_decay is not None:
        share = 1 if diagonal else c.alpha2.shape[-1]
        d_log = d_a * c.alpha2 * (2 / share)
        cut.scatter(d_log if log_decay.ndim == 4 else d_log.sum(-1), out_decay)
    if initial_cov is not None:
        out_cov[cut.order] = (left if diagonal else left[..., 0]).to(initial_cov.dtype)
    return out_k, out_decay, out_w, out_r, d_mu, out_cov


def _kept_shape(diagonal: bool) -> Callable[..., tuple[int, ...]]:
    def shape(k: Tensor, cu_seqlens: Tensor | None) -> tuple[int, ...]:
        rows = most_chunks(k, cu_seqlens, chunk_size(k, cu_seqlens, CHUNK))
        return rows, k.shape[2], k.shape[3] if diagonal else 1

    return shape


def _operator(diagonal: bool) -> Callable[..., tuple[Tensor, Tensor, Tensor | None]]:
    return gain_operator(
        "torch",
        "diagonal" if diagonal else "isotropic",
        partial(_gain, diagonal),
        partial(_gain_backward, diagonal),
        _kept_shape(diagonal),
        backward_reads_prior=True,
    )


diagonal_gain = _operator(diagonal=True)
isotropic_gain = _operator(diagonal=False)
