"""Makes `torch.library` operators of a backend's plain functions, once for all backends.

A backend brings a forward and a backward function that know nothing of autograd. The operator adds what
PyTorch needs around them: a schema, shapes without values (for `torch.compile`), the gradient, and that
autocast does not reach inside. Optional results are empty tensors, since an operator cannot return None.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kdn.ops.precision import state_dtype, without_autocast

GainForward = Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]]
MemoryForward = Callable[..., tuple[Tensor, Tensor, Tensor]]
Backward = Callable[..., tuple[Tensor, ...]]
KeptShape = Callable[..., tuple[int, ...]]


def wants_gradient(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def like(*inputs: Tensor | None) -> tuple[Tensor, ...]:
    """Room for the gradient of each input; empty for one that is not there."""
    there = next(x for x in inputs if x is not None)
    return tuple(there.new_empty(0) if x is None else x.new_empty(x.shape) for x in inputs)


def _only_given(inputs: tuple[Tensor | None, ...], grads: tuple[Tensor, ...]) -> list[Tensor | None]:
    return [None if x is None else d for x, d in zip(inputs, grads, strict=True)]


def sequence_count(x: Tensor, cu_seqlens: Tensor | None) -> int:
    return x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1


def covariance_shape(kind: str, k: Tensor, *front: int) -> tuple[int, ...]:
    """One covariance per entry of `front`: of K values, one value, or K × K."""
    width = k.shape[3]
    return (*front, *{"diagonal": (width,), "isotropic": (), "exact": (width, width)}[kind])


def gain_operator(
    backend: str,
    kind: str,
    forward: GainForward,
    backward: Backward,
    kept_shape: KeptShape,
    kept_dtype: torch.dtype | None = None,
    backward_reads_prior: bool = False,
) -> Callable[..., tuple[Tensor, Tensor, Tensor | None]]:
    """The gain `kind` of a backend, from

    forward(k, log_decay, process_noise, obs_noise, mu, initial_cov, cu_seqlens, with_prior, for_backward)
        → gain, final covariance, prior (with_prior), kept (for_backward)
    backward(d_gain, d_cov, d_prior, the same seven inputs, prior, kept)
        → gradients of the first six inputs, `like` them
    kept_shape(k, cu_seqlens) → the shape of `kept`, known from shapes alone; kept_dtype None is the states'.
    """

    @torch.library.custom_op(f"kdn_{backend}::{kind}_gain", mutates_args=())
    @without_autocast
    def operator(
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
        inputs = (k, log_decay, process_noise, obs_noise, mu, initial_cov, cu_seqlens)
        return forward(*inputs, with_prior, for_backward)

    @torch.library.custom_op(f"kdn_{backend}::{kind}_gain_backward", mutates_args=())
    @without_autocast
    def operator_backward(
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
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        inputs = (k, log_decay, process_noise, obs_noise, mu, initial_cov, cu_seqlens)
        dk, da, dw, dr, dm, dc = backward(d_gain, d_cov, d_prior, *inputs, prior, kept)
        return dk, da, dw, dr, dm, dc

    @operator.register_fake
    def _(
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
        cov = covariance_shape(kind, k, sequence_count(k, cu_seqlens), k.shape[2])
        prior = covariance_shape(kind, k, *k.shape[:3]) if with_prior else (0,)
        kept = kept_shape(k, cu_seqlens) if for_backward else (0,)
        return (
            k.new_empty(k.shape),
            k.new_empty(cov, dtype=mu.dtype),
            k.new_empty(prior, dtype=mu.dtype),
            k.new_empty(kept, dtype=kept_dtype or mu.dtype),
        )

    @operator_backward.register_fake
    def _(
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
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        dk, da, dw, dr, dm, dc = like(k, log_decay, process_noise, obs_noise, mu, initial_cov)
        return dk, da, dw, dr, dm, dc

    def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        *tensors, _, _ = inputs
        _, _, prior, kept = output
        ctx.mark_non_differentiable(kept)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, prior if backward_reads_prior else kept.new_empty(0), kept)

    def differentiate(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        d_gain, d_cov, d_prior, _ = grads
        saved = ctx.saved_tensors
        results = operator_backward(d_gain, d_cov, d_prior, *saved)
        return (*_only_given(saved[:6], results), None, None, None)

    operator.register_autograd(differentiate, setup_context=save)

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
        tensors = (k, log_decay, process_noise, obs_noise, info_scale, initial_cov)
        for_backward = wants_gradient(*tensors)
        with_prior = return_prior or (backward_reads_prior and for_backward)
        gain, cov, prior, _ = operator(*tensors, cu_seqlens, with_prior, for_backward)
        return gain, cov, prior if return_prior else None

    return gain


def memory_operator(
    backend: str, forward: MemoryForward, backward: Backward, kept_shape: KeptShape
) -> Callable[..., tuple[Tensor, Tensor]]:
    """The memory of a backend, from

    forward(q, k, v, gain, log_decay, scale, initial_state, cu_seqlens, for_backward)
        → out, final state, kept (for_backward)
    backward(d_out, d_state, q, k, v, gain, log_decay, scale, initial_state, cu_seqlens, kept)
        → gradients of q, k, v, gain, log_decay, initial_state, `like` them
    kept_shape(q, v, cu_seqlens) → the shape of `kept`, known from shapes alone.
    """

    @torch.library.custom_op(f"kdn_{backend}::memory", mutates_args=())
    @without_autocast
    def operator(
        q: Tensor,
        k: Tensor | None,
        v: Tensor,
        gain: Tensor,
        log_decay: Tensor | None,
        scale: float,
        initial_state: Tensor | None,
        cu_seqlens: Tensor | None,
        for_backward: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        return forward(q, k, v, gain, log_decay, scale, initial_state, cu_seqlens, for_backward)

    @torch.library.custom_op(f"kdn_{backend}::memory_backward", mutates_args=())
    @without_autocast
    def operator_backward(
        d_out: Tensor | None,
        d_state: Tensor | None,
        q: Tensor,
        k: Tensor | None,
        v: Tensor,
        gain: Tensor,
        log_decay: Tensor | None,
        scale: float,
        initial_state: Tensor | None,
        cu_seqlens: Tensor | None,
        kept: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        inputs = (q, k, v, gain, log_decay, scale, initial_state, cu_seqlens)
        dq, dk, dv, dg, da, ds = backward(d_out, d_state, *inputs, kept)
        return dq, dk, dv, dg, da, ds

    @operator.register_fake
    def _(
        q: Tensor,
        k: Tensor | None,
        v: Tensor,
        gain: Tensor,
        log_decay: Tensor | None,
        scale: float,
        initial_state: Tensor | None,
        cu_seqlens: Tensor | None,
        for_backward: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        dtype = state_dtype(q, k, v, gain, log_decay, initial_state)
        state = (sequence_count(q, cu_seqlens), *q.shape[2:], v.shape[3])
        kept = kept_shape(q, v, cu_seqlens) if for_backward else (0,)
        return v.new_empty(v.shape), q.new_empty(state, dtype=dtype), q.new_empty(kept, dtype=dtype)

    @operator_backward.register_fake
    def _(
        d_out: Tensor | None,
        d_state: Tensor | None,
        q: Tensor,
        k: Tensor | None,
        v: Tensor,
        gain: Tensor,
        log_decay: Tensor | None,
        scale: float,
        initial_state: Tensor | None,
        cu_seqlens: Tensor | None,
        kept: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        dq, dk, dv, dg, da, ds = like(q, k, v, gain, log_decay, initial_state)
        return dq, dk, dv, dg, da, ds

    def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        q, k, v, gain, log_decay, ctx.scale, initial_state, cu_seqlens, _ = inputs
        ctx.mark_non_differentiable(output[2])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, gain, log_decay, initial_state, cu_seqlens, output[2])

    def differentiate(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        d_out, d_state, _ = grads
        *inputs, initial_state, cu_seqlens, kept = ctx.saved_tensors
        results = operator_backward(d_out, d_state, *inputs, ctx.scale, initial_state, cu_seqlens, kept)
        *d_inputs, d_initial = _only_given((*inputs, initial_state), results)
        return (*d_inputs, None, d_initial, None, None)

    operator.register_autograd(differentiate, setup_context=save)

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
        tensors = (q, k, v, gain, log_decay)
        for_backward = wants_gradient(*tensors, initial_state)
        out, state, _ = operator(*tensors, scale, initial_state, cu_seqlens, for_backward)
        return out, state

    return delta_memory
