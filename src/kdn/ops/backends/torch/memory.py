"""The memory, chunkwise: compact WY within chunks, a short recurrence between them.

Within a chunk with incoming state S, cumulative decays Γ and decays to its end, and writing K̄, Q̄ for
keys and queries decayed from the start, Ḡ for gains decayed to the end:

    (I + T) R = V − K̄ S          T = tril(k_i·g_j, −1), decayed between j and i
    O = Q̄ S + A R                A = tril(τ q_i·g_j), likewise
    S ← γ ⊙ S + Ḡᵀ R

Row i of R is the residual that token i writes. (I + T)⁻¹ comes from a unit-triangular solve by
substitution, whose intermediate values are residuals too and stay bounded where those of a series or
doubling inverse do not (repeated keys).

The forward pass keeps the state entering every chunk, K V/C numbers per token and head, and nothing
else; the backward pass recomputes the rest. Both go through the sequence in segments of a few chunks,
so that temporaries stay small, in cache on a CPU, and do not grow with the sequence.
"""

import torch
from torch import Tensor

from kdn.ops.backends.torch.layout import Plan, chunk_size, most_chunks, plan
from kdn.ops.backends.torch.products import Halves, products, products_backward
from kdn.ops.operators import like, memory_operator
from kdn.ops.precision import state_dtype

CHUNK = 64  # 32 does as well; a power of two
_SEGMENT_NUMBERS = {"cpu": 1 << 20}  # in one [chunks, H, C, K] temporary; other devices:
_SEGMENT_NUMBERS_ELSEWHERE = 1 << 26


class _Segment:
    """A few consecutive rounds: their inputs as [R, C, …] with R = chunks · heads, and their factors."""

    def __init__(
        self,
        cut: Plan,
        rounds: list[tuple[int, int]],
        q: Tensor,
        k: Tensor | None,
        v: Tensor,
        gain: Tensor,
        log_decay: Tensor | None,
        scale: float,
        dtype: torch.dtype,
        keep: list[Halves] | None = None,
    ) -> None:
        self.first = rounds[0][0]
        self.count = rounds[-1][0] + rounds[-1][1] - self.first
        self.heads, self.cut, self.dtype = q.shape[2], cut, dtype
        self.v, self.gain = self.load(v), self.load(gain)
        self.q = self.load(q).mul_(scale)
        self.k = None if k is None else self.load(k)
        if log_decay is None:
            self.alpha = self.v.new_ones(1, 1, 1).expand(*self.v.shape[:2], 1)
        else:
            self.alpha = self.load(log_decay if log_decay.ndim == 4 else log_decay[..., None]).exp_()
        rows = [self.q] if self.k is None else [self.q, self.k]
        self.x = torch.stack(rows, dim=2)
        self.x_alpha = self.x * self.alpha[:, :, None] if keep is not None else None
        self.y = self.gain.clone()
        m = products(self.x, self.y, self.alpha, keep)
        self.total = self.alpha.prod(1)[..., None]  # [R, K or 1, 1]
        # A with its diagonal: a query reads what its own token wrote.
        self.a = m[:, :, 0]
        self.a.diagonal(dim1=1, dim2=2).copy_((self.q * self.gain).sum(-1))
        if self.k is None:
            self.inverse = None
        else:
            chunk = m.shape[1]
            identity = torch.eye(chunk, dtype=dtype, device=m.device).expand(m.shape[0], -1, -1)
            self.inverse = torch.linalg.solve_triangular(
                m[:, :, 1], identity, upper=False, unitriangular=True
            )

    def load(self, x: Tensor) -> Tensor:
        """[B, T, H, X] → this segment's [R, C, X], in the working precision."""
        chunks = self.cut.gather(x, self.first, self.count)
        return chunks.to(self.dtype).transpose(1, 2).contiguous().flatten(0, 1)

    def store(self, x: Tensor, out: Tensor) -> None:
        chunks = x.view(self.count, self.heads, *x.shape[1:]).transpose(1, 2)
        self.cut.scatter(chunks, out, self.first)

    def rows(self, round_: tuple[int, int]) -> slice:
        """The R axis of one round."""
        start = (round_[0] - self.first) * self.heads
        return slice(start, start + round_[1] * self.heads)


def _segments(cut: Plan, numbers_per_chunk: int, device: torch.device) -> list[list[tuple[int, int]]]:
    budget = _SEGMENT_NUMBERS.get(device.type, _SEGMENT_NUMBERS_ELSEWHERE)
    segments: list[list[tuple[int, int]]] = []
    used = budget
    for round_ in cut.rounds:
        need = round_[1] * numbers_per_chunk
        if used + need > budget:
            segments.append([])
            used = 0
        segments[-1].append(round_)
        used += need
    return segments


def _ordered_state(initial: Tensor | None, cut: Plan, q: Tensor, v: Tensor, dtype: torch.dtype) -> Tensor:
    """States [N·H, K, V] in plan order; a copy, since the loops write to it."""
    if initial is None:
        n = len(cut.order) * q.shape[2]
        return q.new_zeros(n, q.shape[3], v.shape[3], dtype=dtype)
    return initial[cut.order].to(dtype).flatten(0, 1).contiguous()


def _state_out(state: Tensor, cut: Plan, dtype: torch.dtype) -> Tensor:
    """The reverse: [N, H, K, V] in the caller's order."""
    state = state.unflatten(0, (len(cut.order), -1))
    out = torch.empty_like(state, dtype=dtype)
    out[cut.order] = state.to(dtype)
    return out


def _memory(
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
    """out, final state, and (for_backward) the state entering every chunk [rows, H, K, V]."""
    dtype = state_dtype(q, k, v, gain, log_decay, initial_state)
    cut = plan(q, cu_seqlens, CHUNK)
    heads, width = q.shape[2:]
    state = _ordered_state(initial_state, cut, q, v, dtype)
    out = v.new_empty(v.shape)
    kept = q.new_empty(_kept_shape(q, v, cu_seqlens) if for_backward else 0, dtype=dtype)
    for rounds in _segments(cut, heads * cut.chunk * width, q.device):
        part = _Segment(cut, rounds, q, k, v, gain, log_decay, scale, dtype)
        read = torch.empty_like(part.v)
        for round_ in rounds:
            rows = part.rows(round_)
            entering = state[: rows.stop - rows.start]
            if for_backward:
                kept[round_[0] : round_[0] + round_[1]] = entering.unflatten(0, (-1, heads))
            decayed = part.x[rows].flatten(1, 2) @ entering
            decayed = decayed.unflatten(1, (cut.chunk, -1))  # Q̄ S and K̄ S
            residual = part.v[rows]
            if part.inverse is not None:
                residual = part.inverse[rows] @ (residual - decayed[:, :, 1])
            torch.baddbmm(decayed[:, :, 0], part.a[rows], residual, out=read[rows])
            entering.mul_(part.total[rows]).baddbmm_(part.y[rows].mT, residual)
        part.store(read, out)
    return out, _state_out(state, cut, dtype), kept


def _memory_backward(
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
    """Gradients of q, k, v, gain, log_decay, initial_state (empty where there is none)."""
    dtype = state_dtype(q, k, v, gain, log_decay, initial_state)
    cut = plan(q, cu_seqlens, CHUNK)
    heads, width = q.shape[2:]
    ds = _ordered_state(d_state, cut, q, v, dtype)
    d_q, d_k, d_v, d_gain, d_decay, d_initial = like(q, k, v, gain, log_decay, initial_state)
    for rounds in reversed(_segments(cut, heads * cut.chunk * width, q.device)):
        halves: list[Halves] = []
        part = _Segment(cut, rounds, q, k, v, gain, log_decay, scale, dtype, keep=halves)
        dv, dx, dy, d_m, d_total = _segment_backward(part, rounds, d_out, ds, kept)
        # What the diagonal of A gave: its pair has no decay.
        d_own = d_m[:, :, 0].diagonal(dim1=1, dim2=2)[..., None]
        assert part.x_alpha is not None
        d_log = products_backward(d_m, dx, dy, d_total, part.x_alpha, part.alpha, halves)
        part.store(dx[:, :, 0].addcmul_(d_own, part.gain).mul_(scale), d_q)
        part.store(dy.addcmul_(d_own, part.q), d_gain)
        part.store(dv, d_v)
        if k is not None:
            part.store(dx[:, :, 1], d_k)
        if log_decay is not None:
            part.store(d_log, d_decay if log_decay.ndim == 4 else d_decay[..., None])
    if initial_state is not None:
        d_initial = _state_out(ds, cut, initial_state.dtype)
    return d_q, d_k, d_v, d_gain, d_decay, d_initial


def _segment_backward(
    part: _Segment,
    rounds: list[tuple[int, int]],
    d_out: Tensor | None,
    ds: Tensor,
    kept: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """∂v, ∂(Q̄, K̄), ∂Ḡ, ∂(A, T), and ∂ log γ [R, 1, K or 1]; takes ds from the segment's end to its start."""
    state = kept[part.first : part.first + part.count].flatten(0, 1)
    do = torch.zeros_like(part.v) if d_out is None else part.load(d_out)
    residual = part.v
    if part.inverse is not None:
        residual = part.inverse @ torch.baddbmm(part.v, part.x[:, :, 1], state, alpha=-1)
    dr = part.a.mT @ do
    d_entering = part.x[:, :, 0].mT @ do
    leaving = torch.empty_like(state)  # ∂ of the state leaving each chunk
    for round_ in reversed(rounds):
        rows = part.rows(round_)
        running = ds[: rows.stop - rows.start]
        leaving[rows] = running
        dr[rows].baddbmm_(part.y[rows], running)
        if part.inverse is not None:
            dr[rows] = part.inverse[rows].mT @ dr[rows]
            d_entering[rows].baddbmm_(part.x[rows][:, :, 1].mT, dr[rows], alpha=-1)
        running.mul_(part.total[rows]).add_(d_entering[rows])
    # dr is now ∂v: through the solve where there is one.
    dx, d_m = torch.empty_like(part.x), do.new_zeros(*part.x.shape[:3], part.x.shape[1])
    dx[:, :, 0] = do @ state.mT
    d_m[:, :, 0] = do @ residual.mT
    if part.inverse is not None:
        dx[:, :, 1] = -(dr @ state.mT)
        d_m[:, :, 1] = -(dr @ residual.mT)
    d_total = (state * leaving).sum(-1, keepdim=True)
    if part.total.shape[1] == 1:
        d_total = d_total.sum(1, keepdim=True)
    return dr, dx, residual @ leaving.mT, d_m, (d_total * part.total).mT


def _kept_shape(q: Tensor, v: Tensor, cu_seqlens: Tensor | None) -> tuple[int, ...]:
    rows = most_chunks(q, cu_seqlens, chunk_size(q, cu_seqlens, CHUNK))
    return rows, *q.shape[2:], v.shape[3]


delta_memory = memory_operator("torch", _memory, _memory_backward, _kept_shape)
