"""The memory: describes its tensors to `kdn_memory_forward` and `kdn_memory_backward`."""

import torch
from torch import Tensor

from kdn.ops.backends import torch as chunkwise
from kdn.ops.backends.cpu.library import Described, Memory, call, checkpoint_rows, chunk, served
from kdn.ops.checks import sequence_offsets
from kdn.ops.operators import like, memory_operator, sequence_count


def _arguments(
    to: Described,
    q: Tensor,
    k: Tensor | None,
    v: Tensor,
    gain: Tensor,
    log_decay: Tensor | None,
    scale: float,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
) -> Memory:
    if cu_seqlens is not None:
        sequence_offsets(cu_seqlens.tolist(), q.shape[1])
    return Memory(
        sequences=to.sequences(q, cu_seqlens),
        heads=q.shape[2],
        key=q.shape[3],
        value=v.shape[3],
        q=to.rows(q),
        k=to.rows(k),
        v=to.rows(v),
        gain=to.rows(gain),
        decay=to.rows(log_decay),
        scale=scale,
        initial=to.plain(initial_state),
        first_chunk=to.first_chunks(q, cu_seqlens, chunk()),
    )


def _kept_shape(q: Tensor, v: Tensor, cu_seqlens: Tensor | None) -> tuple[int, ...]:
    return checkpoint_rows(q, cu_seqlens, chunk()), *q.shape[2:], v.shape[3]


def _forward(
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
    to = Described()
    out = v.new_empty(v.shape)
    state = q.new_empty(sequence_count(q, cu_seqlens), *q.shape[2:], v.shape[3], dtype=torch.float32)
    kept = q.new_empty(_kept_shape(q, v, cu_seqlens) if for_backward else 0, dtype=torch.float32)
    x = _arguments(to, q, k, v, gain, log_decay, scale, initial_state, cu_seqlens)
    x.out, x.state = to.rows(out), to.plain(state)
    x.checkpoints = to.plain(kept) if for_backward else None
    call("kdn_memory_forward", x)
    return out, state, kept


def _backward(
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
) -> tuple[Tensor, ...]:
    to = Described()
    grads = like(q, k, v, gain, log_decay, initial_state)
    d_q, d_k, d_v, d_gain, d_decay, d_initial = grads
    x = _arguments(to, q, k, v, gain, log_decay, scale, initial_state, cu_seqlens)
    x.checkpoints = to.plain(kept)
    x.d_out, x.d_state = to.rows(d_out), to.plain(d_state)
    x.d_q, x.d_v, x.d_gain = to.rows(d_q), to.rows(d_v), to.rows(d_gain)
    x.d_k = to.rows(None if k is None else d_k)
    x.d_decay = to.rows(None if log_decay is None else d_decay)
    d_start = None if initial_state is None else torch.empty_like(d_initial, dtype=torch.float32)
    x.d_initial = to.plain(d_start)
    call("kdn_memory_backward", x)
    if d_start is not None:
        d_initial.copy_(d_start)
    return grads


_operator = memory_operator("cpu", _forward, _backward, _kept_shape)


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
    arguments = (q, k, v, gain, log_decay, scale, initial_state, cu_seqlens)
    if not served(q, k, v, gain, log_decay):
        return chunkwise.delta_memory(*arguments)
    if initial_state is not None and initial_state.dtype == torch.float64:
        return chunkwise.delta_memory(*arguments)
    return _operator(*arguments)
