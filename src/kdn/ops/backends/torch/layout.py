"""How tokens become chunks: the same plan for equal batches and for packed sequences.

Every sequence is cut into chunks of C tokens, its last one padded. Chunks are ordered by *round*: first
the first chunk of every sequence, then the second of those that have one, and so on, with the longest
sequences first. So the chunks of one round are neighbours, the sequences still running are a prefix of
the states, and all that is serial in the whole backend is the loop over rounds.
"""

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from kdn.ops.checks import sequence_offsets


class Plan(NamedTuple):
    tokens: Tensor  # [rows, C] the token at every chunk position, in the flattened [B·T] axis
    valid: Tensor | None  # [rows, C] False at padding; None where there is none
    rounds: list[tuple[int, int]]  # (first row, number of rows) of every round
    order: Tensor  # [N] the sequence whose state is at each position
    chunk: int

    def gather(self, x: Tensor, first: int = 0, count: int | None = None) -> Tensor:
        """Rows of x [B, T, …] as [rows, C, …]; padding reads as 0."""
        index = self.tokens if count is None else self.tokens[first : first + count]
        out = x.reshape(-1, *x.shape[2:])[index]
        if self.valid is None:
            return out
        valid = self.valid if count is None else self.valid[first : first + count]
        return out.masked_fill_(~valid.reshape(*valid.shape, *[1] * (x.ndim - 2)), 0)

    def scatter(self, chunks: Tensor, out: Tensor, first: int = 0) -> None:
        """Write chunks [rows, C, …] to their tokens of `out` [B, T, …], dropping padding."""
        rows = slice(first, first + chunks.shape[0])
        index, flat = self.tokens[rows], out.view(-1, *out.shape[2:])
        if self.valid is None:
            flat[index.flatten()] = chunks.flatten(0, 1).to(out.dtype)
        else:
            valid = self.valid[rows]
            flat[index[valid]] = chunks[valid].to(out.dtype)


def chunk_size(x: Tensor, cu_seqlens: Tensor | None, longest: int) -> int:
    """Tokens per chunk for x [B, T, …]: at most `longest`, a power of two, known from shapes alone.

    Many short sequences among a few long ones: a chunk near the mean length wastes little padding (not
    below 16: most of the sequences may be empty).
    """
    time = x.shape[1]
    mean = time if cu_seqlens is None else max(16, -(-time // (cu_seqlens.shape[0] - 1)))
    chunk = 1
    while chunk < longest and chunk < mean:  # comparisons: a compiled graph then serves many lengths
        chunk *= 2
    return chunk


def most_chunks(x: Tensor, cu_seqlens: Tensor | None, chunk: int) -> int:
    """An upper bound on the number of chunks, known from shapes alone (exact for equal batches)."""
    batch, time = x.shape[:2]
    if cu_seqlens is None:
        return batch * -(-time // chunk)
    return time // chunk + cu_seqlens.shape[0] - 1


def plan(x: Tensor, cu_seqlens: Tensor | None, longest_chunk: int) -> Plan:
    """Cut the time axis of x [B, T, …] into chunks."""
    batch, time = x.shape[:2]
    if cu_seqlens is None:
        starts, lengths = [b * time for b in range(batch)], [time] * batch
    else:
        offsets = cu_seqlens.tolist()
        sequence_offsets(offsets, time)
        starts = offsets[:-1]
        lengths = [b - a for a, b in pairwise(offsets)]
    chunk = chunk_size(x, cu_seqlens, longest_chunk)
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    firsts: list[int] = []
    sizes: list[int] = []
    rounds = []
    for start in range(0, max(lengths), chunk):
        running = [i for i in order if lengths[i] > start]
        rounds.append((len(firsts), len(running)))
        firsts += [starts[i] + start for i in running]
        sizes += [lengths[i] - start for i in running]
    position = torch.arange(chunk, device=x.device)
    index = torch.tensor(firsts, device=x.device)[:, None] + position
    valid = None
    if any(size < chunk for size in sizes):
        valid = position < torch.tensor(sizes, device=x.device)[:, None]
        index = index.where(valid, 0)
    return Plan(index, valid, rounds, torch.tensor(order, device=x.device), chunk)
