"""The three gains: one description of their tensors for `kdn_{kind}_forward` and `kdn_{kind}_backward`."""

from collections.abc import Callable

import torch
from torch import Tensor

from kdn.ops.backends import torch as chunkwise
from kdn.ops.backends.cpu.library import Described, Gain, call, checkpoint_rows, chunk, served
from kdn.ops.checks import sequence_offsets
from kdn.ops.operators import covariance_shape, gain_operator, like, sequence_count

EXACT_CHUNK = 32  # as in native/exact.h, which keeps float64 matrices


def _operator(kind: str) -> Callable[..., tuple[Tensor, Tensor, Tensor | None]]:
    kept_dtype = torch.float64 if kind == "exact" else torch.float32

    def every() -> int:
        return EXACT_CHUNK if kind == "exact" else chunk()

    def kept_shape(k: Tensor, cu_seqlens: Tensor | None) -> tuple[int, ...]:
        return covariance_shape(kind, k, checkpoint_rows(k, cu_seqlens, every()), k.shape[2])

    def arguments(
        to: Described,
        k: Tensor,
        log_decay: Tensor | None,
        process_noise: Tensor,
        obs_noise: Tensor,
        mu: Tensor,
        initial_cov: Tensor | None,
        cu_seqlens: Tensor | None,
    ) -> Gain:
        if cu_seqlens is not None:
            sequence_offsets(cu_seqlens.tolist(), k.shape[1])
        return Gain(
            sequences=to.sequences(k, cu_seqlens),
            heads=k.shape[2],
            key=k.shape[3],
            k=to.rows(k),
            decay=to.rows(log_decay),
            noise=to.rows(process_noise),
            obs=to.rows(obs_noise),
            info_scale=to.plain(mu),
            initial=to.plain(initial_cov),
            first_chunk=to.first_chunks(k, cu_seqlens, every()),
        )

    def forward(
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
        to = Described()
        n = sequence_count(k, cu_seqlens)
        gain = k.new_empty(k.shape)
        cov = mu.new_empty(covariance_shape(kind, k, n, k.shape[2]))
        prior = mu.new_empty(covariance_shape(kind, k, *k.shape[:3]) if with_prior else (0,))
        kept = mu.new_empty(kept_shape(k, cu_seqlens) if for_backward else 0, dtype=kept_dtype)
        x = arguments(to, k, log_decay, process_noise, obs_noise, mu, initial_cov, cu_seqlens)
        x.gain, x.cov = to.rows(gain), to.plain(cov)
        x.prior = to.rows(prior if with_prior else None)
        x.checkpoints = to.plain(kept, kept_dtype) if for_backward else None
        call(f"kdn_{kind}_forward", x)
        return gain, cov, prior, kept

    def backward(
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
        prior: Tensor,
        kept: Tensor,
    ) -> tuple[Tensor, ...]:
        to = Described()
        d_k, d_decay, d_noise, d_obs, _, d_initial = like(
            k, log_decay, process_noise, obs_noise, mu, initial_cov
        )
        d_mu = mu.new_empty(sequence_count(k, cu_seqlens), k.shape[2])
        x = arguments(to, k, log_decay, process_noise, obs_noise, mu, initial_cov, cu_seqlens)
        x.checkpoints = to.plain(kept, kept_dtype)
        x.d_gain, x.d_prior, x.d_cov = to.rows(d_gain), to.rows(d_prior), to.plain(d_cov)
        x.d_k, x.d_noise, x.d_obs = to.rows(d_k), to.rows(d_noise), to.rows(d_obs)
        x.d_decay = to.rows(None if log_decay is None else d_decay)
        x.d_info_scale = to.plain(d_mu)
        d_start = None if initial_cov is None else mu.new_empty(initial_cov.shape)
        x.d_initial = to.plain(d_start)
        call(f"kdn_{kind}_backward", x)
        if initial_cov is not None and d_start is not None:
            d_initial = d_start.to(initial_cov.dtype)
        return d_k, d_decay, d_noise, d_obs, d_mu.sum(0), d_initial

    operator = gain_operator("cpu", kind, forward, backward, kept_shape, kept_dtype)

    def gain(
        k: Tensor,
        log_decay: Tensor | None,
        process_noise: Tensor,
        obs_noise: Tensor,
        info_scale: Tensor,
        initial_cov: Tensor | None,
        cu_seqlens: Tensor | None,
        return_prior: bool,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        inputs = (k, log_decay, process_noise, obs_noise, info_scale, initial_cov)
        if served(k, log_decay, process_noise, obs_noise) and info_scale.dtype == torch.float32:
            return operator(*inputs, cu_seqlens, return_prior)
        other: Callable[..., tuple[Tensor, Tensor, Tensor | None]]
        other = getattr(chunkwise, f"{kind}_gain")
        return other(*inputs, cu_seqlens, return_prior)

    return gain


diagonal_gain = _operator("diagonal")
isotropic_gain = _operator("isotropic")
exact_gain = _operator("exact")
