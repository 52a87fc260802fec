"""Softmax attention with rotary positions: the full kind, and the sliding window that hybrids use.

    o_t = Σ_s softmax_s(D^−½ q̂_tᵀ k̂_s) v_s      q̂_t = R(t) q_t,  k̂_s = R(s) k_s      t − w < s ≤ t

The window w counts the token itself; without one, every earlier token is seen. R(t) turns the channel
pair (i, i + D/2) by the angle t·θ^(−2i/D). t is the token's position in its own sequence, so it goes on
from the state.

Memory is linear in time. Full attention is one call of PyTorch's fused kernel. A window's first w tokens
are too; after them, BLOCK queries at a time look at the w keys before them through one small mask that
all of these blocks share, so the work is linear as well.

Shapes: B sequences, T tokens of this call, S kept ones, H heads, D channels; tensors are B T H D.
"""

import math
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from kdn.mixers.parts import Linear
from kdn.ops.checks import sequence_offsets

__all__ = ["Attention", "AttentionState"]

# Queries that share a mask. Each costs window + BLOCK keys where window would do: a quarter more at 2,048.
BLOCK = 512

# Where attention has no window, the context that `flops_per_token` counts.
CONTEXT = 4096

# A turn is 2^64 steps: position × frequency in 64-bit integers drops whole turns by overflowing, and what is
# left is as exact at position 10^6 as at 1. In float32 the angle is off by 0.005 at position 100,000.
STEPS_PER_TURN = 2**64


class AttentionState(NamedTuple):
    """What later tokens can see. With a window w, S ≤ w − 1: the next token brings the w-th key itself.

    Rows end together and begin apart: row b's keys are the last min(position[b], S), what stands before
    them is never read. Keys are already rotated. Both have the dtype of the projections.
    """

    k: Tensor  # B S H D
    v: Tensor  # B S H D
    position: Tensor  # B, int64: how many tokens the sequence has had


class Attention(nn.Module):
    """Causal softmax attention over the last `window` tokens, or over all with `window=None`."""

    frequency: Tensor

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        head_dim: int,
        *,
        layer_index: int = 0,
        window: int | None = None,
        rope_theta: float = 10000.0,
    ) -> None:
        super().__init__()
        if head_dim % 2:
            raise ValueError(f"head_dim must be even (positions turn pairs of channels), got {head_dim}")
        if window is not None and window < 1:
            raise ValueError(f"window must be ≥ 1 (it counts the token itself) or None, got {window}")
        if rope_theta < 1:
            raise ValueError(f"rope_theta must be ≥ 1, got {rope_theta}")
        self.num_heads = num_heads
        self.head_dim = head_dim
        self.layer_index = layer_index
        self.window = window
        self.rope_theta = rope_theta
        inner = num_heads * head_dim
        self.q_proj = Linear(hidden_size, inner, bias=False)
        self.k_proj = Linear(hidden_size, inner, bias=False)
        self.v_proj = Linear(hidden_size, inner, bias=False)
        self.o_proj = Linear(inner, hidden_size, bias=False)
        # Integers, so that casting the module to bfloat16 leaves the positions alone.
        self.register_buffer("frequency", torch.empty(head_dim // 2, dtype=torch.int64), persistent=False)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Fill in the rotary frequencies: no checkpoint holds them. Linear layers initialise themselves."""
        pairs = self.head_dim // 2
        turns = [self.rope_theta ** (-i / pairs) / math.tau for i in range(pairs)]
        self.frequency.copy_(torch.tensor([round(turn * STEPS_PER_TURN) for turn in turns]))

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}, head_dim={self.head_dim}, window={self.window}"

    def state_size(self) -> int:
        """Keys and values of a full window, 2·w·H·D; without a window 0: they grow with the sequence."""
        return 0 if self.window is None else 2 * self.window * self.num_heads * self.head_dim

    def flops_per_token(self) -> int:
        """Scores and weighted sum over a full window, 4·w·H·D, and rotating q and k, 8·H·D.

        Without a window the context counted is CONTEXT. Exponentials, and what masks hide, are not counted.
        """
        return (4 * (self.window or CONTEXT) + 8) * self.num_heads * self.head_dim

    def forward(
        self, x: Tensor, state: AttentionState | None = None, cu_seqlens: Tensor | None = None
    ) -> tuple[Tensor, AttentionState]:
        """x: B T hidden_size. With `cu_seqlens` (N + 1 offsets) B is 1 and the state has N rows."""
        q = self.q_proj(x).unflatten(-1, (self.num_heads, self.head_dim))
        k = self.k_proj(x).unflatten(-1, (self.num_heads, self.head_dim))
        v = self.v_proj(x).unflatten(-1, (self.num_heads, self.head_dim))
        if cu_seqlens is None:
            y, state = self._batch(q, k, v, state)
        else:
            y, state = self._packed(q, k, v, state, cu_seqlens)
        return self.o_proj(y.flatten(-2)), state

    def _batch(
        self, q: Tensor, k: Tensor, v: Tensor, state: AttentionState | None
    ) -> tuple[Tensor, AttentionState]:
        batch, time = q.shape[:2]
        tokens = torch.arange(time, device=q.device)
        if state is None:
            q, k = rotate(q, k, tokens[None], self.frequency)
            y = attend(q, k, v, self.window, None)
            position = torch.full((batch,), time, device=q.device)
            return y, AttentionState(self._kept(k), self._kept(v), position)
        if state.position.shape[0] != batch:
            raise ValueError(f"state must have {batch} rows, one per sequence, got {state.position.shape[0]}")
        q, k = rotate(q, k, state.position[:, None] + tokens, self.frequency)
        k = torch.cat([state.k.to(k.dtype), k], 1)
        v = torch.cat([state.v.to(v.dtype), v], 1)
        y = attend(q, k, v, self.window, state.k.shape[1] - state.position)
        return y, AttentionState(self._kept(k), self._kept(v), state.position + time)

    def _packed(
        self, q: Tensor, k: Tensor, v: Tensor, state: AttentionState | None, cu_seqlens: Tensor
    ) -> tuple[Tensor, AttentionState]:
        """One sequence after the other, each with the keys that its row of the state holds."""
        batch, time = q.shape[:2]
        if batch != 1:
            raise ValueError(f"cu_seqlens packs all sequences into one row: B must be 1, got {batch}")
        offsets = cu_seqlens.tolist()
        sequence_offsets(offsets, time)
        lengths = [end - start for start, end in pairwise(offsets)]
        count = torch.tensor(lengths, device=q.device)
        before = torch.zeros_like(count) if state is None else state.position
        if before.shape[0] != len(lengths):
            raise ValueError(f"state must have {len(lengths)} rows, one per sequence, got {before.shape[0]}")
        shift = (before - count.cumsum(0) + count).repeat_interleave(count, output_size=time)
        q, k = rotate(q, k, (torch.arange(time, device=q.device) + shift)[None], self.frequency)
        keys, values = list(k.split(lengths, 1)), list(v.split(lengths, 1))
        if state is not None:
            starts = (state.k.shape[1] - before).clamp(min=0).tolist()
            past_k, past_v = state.k.to(k.dtype).split(1), state.v.to(v.dtype).split(1)
            for n, start in enumerate(starts):
                keys[n] = torch.cat([past_k[n][:, start:], keys[n]], 1)
                values[n] = torch.cat([past_v[n][:, start:], values[n]], 1)
        queries = q.split(lengths, 1)
        y = [attend(*qkv, self.window, None) for qkv in zip(queries, keys, values, strict=True)]
        kept_k = align_right([self._kept(x) for x in keys])
        kept_v = align_right([self._kept(x) for x in values])
        return torch.cat(y, 1), AttentionState(kept_k, kept_v, before + count)

    def _kept(self, x: Tensor) -> Tensor:
        """The last window − 1 of keys or values, which is all that the next token can see of them."""
        if self.window is None:
            return x
        start = max(0, x.shape[1] - (self.window - 1))
        # Dropping one token, as decoding does, leaves a view on what the next call copies anyway. Dropping
        # many would keep all of them alive behind the view.
        return x[:, start:].clone() if start > 1 else x[:, start:]


def rotate(q: Tensor, k: Tensor, position: Tensor, frequency: Tensor) -> tuple[Tensor, Tensor]:
    """Turn the channel pairs (x, x') of q and k (B T H D) by φ: (x cos φ − x' sin φ, x' cos φ + x sin φ).

    position: [B or 1, T] int64. frequency: [D/2] int64, in steps of 2^−64 turns per token.
    """
    precision = torch.promote_types(q.dtype, torch.float32)
    angle = (position[..., None] * frequency).to(precision) * (math.tau / STEPS_PER_TURN)
    cos, sin = angle.cos()[:, :, None], angle.sin()[:, :, None]

    def turned(x: Tensor) -> Tensor:
        a, b = x.to(precision).chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)

    return turned(q), turned(k)


def attend(q: Tensor, k: Tensor, v: Tensor, window: int | None, first: Tensor | None) -> Tensor:
    """Attention of the T queries at the end of the P + T keys.

    q: B T H D. k, v: B P+T H D, where P < window. first: B, row b's keys before index first[b] ≤ P are
    not its own; None where all are.
    """
    time, total = q.shape[1], k.shape[1]
    reach = total if window is None else min(window, total)
    if total > time:
        return banded(q, k, v, reach, first)
    head = softmax_attention(q[:, :reach], k[:, :reach], v[:, :reach], is_causal=True)
    if reach == time:
        return head
    return torch.cat([head, banded(q[:, reach:], k, v, reach, None)], 1)


def banded(q: Tensor, k: Tensor, v: Tensor, reach: int, first: Tensor | None) -> Tensor:
    """As `attend`, each query seeing `reach` keys with its own, for P > 0 earlier keys.

    Blocks of queries go through spans of at least `reach` tokens, each with the keys of the span before
    it. Without spans the gradient of every block would be padded with zeros to the whole length.
    """
    time, past = q.shape[1], k.shape[1] - q.shape[1]
    if time == 1 and past < reach:
        # Decoding: the token sees all that was kept, except what is not its row's.
        return softmax_attention(q, k, v, None if first is None else own(first, past + 1))
    size = min(BLOCK, time)
    # Row j, column x: query j of a block and the key that is reach − x tokens before the block's first.
    visible = torch.ones(size, reach + size, dtype=torch.bool, device=q.device).tril(reach).triu(1)
    band = torch.zeros_like(visible, dtype=q.dtype).masked_fill(~visible, -math.inf)

    spans = q.split(-(-reach // BLOCK) * BLOCK, 1)
    sizes = [queries.shape[1] for queries in spans]
    sizes[0] += past
    keys, values = k.split(sizes, 1), v.split(sizes, 1)
    outputs = []
    for n, queries in enumerate(spans):
        span_k, span_v = keys[n], values[n]
        if n > 0:
            span_k = torch.cat([keys[n - 1][:, -reach:], span_k], 1)
            span_v = torch.cat([values[n - 1][:, -reach:], span_v], 1)
            first = None
        before = span_k.shape[1] - queries.shape[1]
        for block in queries.split(size, 1):
            start, end = max(0, before - reach), before + block.shape[1]
            mask = band[: block.shape[1], reach - (before - start) : reach + block.shape[1]]
            arguments = (block, span_k[:, start:end], span_v[:, start:end], mask)
            before = end
            if first is None:
                outputs.append(softmax_attention(*arguments))
                continue
            # These masks differ by block and row. The backward pass makes them again: keeping them for it
            # would take T × S numbers in all.
            outputs.append(
                checkpoint(
                    softmax_attention_of_rows,
                    *arguments,
                    first - start,
                    use_reentrant=False,
                    preserve_rng_state=False,
                )
            )
    return torch.cat(outputs, 1)


def softmax_attention_of_rows(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, first: Tensor) -> Tensor:
    """Attention through a mask (queries × keys) that also hides the keys before each row's first."""
    return softmax_attention(q, k, v, mask.where(own(first, k.shape[1]), -math.inf))


def own(first: Tensor, keys: int) -> Tensor:
    """Which of `keys` keys are a row's own, from its first: B 1 1 keys."""
    return (torch.arange(keys, device=first.device) >= first[:, None])[:, None, None]


def softmax_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, is_causal: bool = False
) -> Tensor:
    """PyTorch's fused attention, for tensors B T H D."""
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=is_causal).transpose(1, 2)


def align_right(rows: list[Tensor]) -> Tensor:
    """One tensor [N, S, …] from N of shape [1, ≤ S, …], with zeros before the short ones."""
    size = max(row.shape[1] for row in rows)
    padded = [torch.cat([row.new_zeros(1, size - row.shape[1], *row.shape[2:]), row], 1) for row in rows]
    return torch.cat(padded)
