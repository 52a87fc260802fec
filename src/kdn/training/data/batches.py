"""What a training step reads.

The shards, one after another, are one stream of tokens. Sequence i of length T is

    inputs   stream[i·T … i·T + T − 1]        targets   stream[i·T + 1 … i·T + T]

so that sequences neither overlap nor leave gaps, and every token but the first is a target once. Training passes over
all of them in a new order each epoch: a permutation that is computed, not stored, from seed and epoch.

Packing says what happens where documents meet inside a sequence:

    concatenate   nothing: the sequence runs on over eos, as in one long text
    documents     a document is a sequence of its own (`cu_seqlens`): nothing leaks, nothing is predicted after eos

The stream of sequences is the same whatever the number of processes and the size of micro-batches. A step is the
next `sequences` of it, split over the ranks. How many were read, `position`, is all there is to save.
"""

import hashlib
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kdn.training.data import DataError
from kdn.training.data.shards import TokenShards

__all__ = ["Batch", "Batches", "Packing"]

Packing = Literal["concatenate", "documents"]
NO_TARGET = -100
AHEAD = 2  # batches that are read while the step computes
ROUNDS = 8


class Batch(NamedTuple):
    """input_ids, targets: [B, T] int64; targets[t] is the token after input t, −100 where none is to be predicted.

    Packed by documents, B is 1, the rows lie one after another, and cu_seqlens (int32 [N + 1]) says where each
    row and each document in it begins. position: where to continue after this batch; in the midst of a step
    that is still the step's beginning.
    """

    input_ids: Tensor
    targets: Tensor
    cu_seqlens: Tensor | None
    position: int


def permuted(indices: np.ndarray, count: int, seed: int, epoch: int) -> np.ndarray:
    """Where a seeded permutation of 0 … count − 1 takes these indices; it takes no memory.

    An index is cut into two halves of bits, and each in turn is xored with a hash of the other: whatever the
    hash, that can be undone, so it permutes 0 … 2^bits − 1. What lands at count or beyond goes through again until it
    is below: following the cycle of a permutation is a permutation of those below.
    """
    bits = max(2, (count - 1).bit_length())
    low = np.uint64(bits // 2)
    mask_low, mask_high = np.uint64(2 ** (bits // 2) - 1), np.uint64(2 ** (bits - bits // 2) - 1)
    digest = hashlib.blake2b(f"{seed} {epoch}".encode(), digest_size=8 * ROUNDS).digest()
    keys = np.frombuffer(digest, "<u8")

    def once(x: np.ndarray) -> np.ndarray:
        a, b = x >> low, x & mask_low
        for i in range(0, ROUNDS, 2):
            a = a ^ (_mixed(b ^ keys[i]) & mask_high)
            b = b ^ (_mixed(a ^ keys[i + 1]) & mask_low)
        return (a << low) | b

    out = once(np.asarray(indices, np.uint64))
    while (beyond := out >= count).any():
        out[beyond] = once(out[beyond])
    return out.astype(np.int64)


def _mixed(x: np.ndarray) -> np.ndarray:
    """The finalizer of splitmix64: every bit of the input changes about half of the output's."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _rows(
    shards: TokenShards,
    rows: Sequence[int],
    length: int,
    packing: Packing,
    position: int,
    count: int | None = None,
) -> Batch:
    """The batch of these sequences. What lies beyond the stream's end, or is sequence `count` or a later one, is eos
    without targets."""
    inputs = np.full((len(rows), length), shards.eos_token_id, np.int64)
    targets = np.full((len(rows), length), NO_TARGET, np.int64)
    bounds: list[Sequence[int] | np.ndarray] = []
    for row, sequence in enumerate(rows):
        bounds.append([row * length])
        if count is not None and sequence >= count:
            continue
        start = sequence * length
        stop = min(start + length + 1, shards.tokens)
        tokens = shards.read(start, stop)
        inputs[row, : len(tokens)] = tokens[:length]
        targets[row, : len(tokens) - 1] = tokens[1:]
        if packing == "documents":
            starts = shards.document_starts(start + 1, stop) - start  # in 1 … length
            targets[row, starts - 1] = NO_TARGET
            bounds.append(row * length + starts[starts < length])
    if packing == "concatenate":
        return Batch(torch.from_numpy(inputs), torch.from_numpy(targets), None, position)
    cu_seqlens = np.concatenate([*bounds, [inputs.size]]).astype(np.int32)
    return Batch(
        torch.from_numpy(inputs).view(1, -1),
        torch.from_numpy(targets).view(1, -1),
        torch.from_numpy(cu_seqlens),
        position,
    )


class Batches:
    """One rank's batches, without end; an iterator.

    length: T. sequences: how many a step reads in all ranks together. micro_batch: how many are in one batch; None
    is the rank's whole share. position: where to begin, as `Batches.position` or `Batch.position` said before.
    """

    def __init__(
        self,
        shards: TokenShards,
        *,
        length: int,
        sequences: int,
        seed: int = 0,
        packing: Packing = "concatenate",
        rank: int = 0,
        world: int = 1,
        micro_batch: int | None = None,
        position: int = 0,
    ) -> None:
        for name, value in (("length", length), ("sequences", sequences), ("world", world)):
            if value < 1:
                raise ValueError(f"{name} must be ≥ 1, got {value}")
        if not 0 <= rank < world:
            raise ValueError(f"rank must be in 0 … {world - 1}, got {rank}")
        if sequences % world:
            raise ValueError(f"sequences must be a multiple of the {world} processes, got {sequences}")
        _check_packing(packing)
        share = sequences // world
        micro_batch = share if micro_batch is None else micro_batch
        if micro_batch < 1 or share % micro_batch:
            raise ValueError(f"micro_batch must divide the {share} sequences of a rank, got {micro_batch}")
        if position < 0:
            raise ValueError(f"position must be ≥ 0, got {position}")
        self.per_epoch = (
            shards.tokens - 1
        ) // length  # the last sequence needs one token more, its last target
        if self.per_epoch < 1:
            raise DataError(
                f"{shards.folder} holds {shards.tokens} tokens, fewer than one sequence of {length} and its last target"
            )
        self.position = position
        self._shards, self._length, self._packing, self._seed = shards, length, packing, seed
        self._sequences, self._micro_batch = sequences, micro_batch
        self._start, self._first = position, position + rank * share
        self._micro_batches = share // micro_batch
        self._asked = 0
        self._pending: deque[Future[Batch]] = deque()
        # One thread: reading from a disk that is slow to answer must not make the step wait.
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="kdn-batches")

    @property
    def epoch(self) -> int:
        return self.position // self.per_epoch

    def __iter__(self) -> "Batches":
        return self

    def __next__(self) -> Batch:
        while len(self._pending) <= AHEAD:
            self._pending.append(self._reader.submit(self._batch, self._asked))
            self._asked += 1
        batch = self._pending.popleft().result()
        self.position = batch.position
        return batch

    def _batch(self, number: int) -> Batch:
        step, micro = divmod(number, self._micro_batches)
        first = self._first + step * self._sequences + micro * self._micro_batch
        places = np.arange(first, first + self._micro_batch)
        epochs = places // self.per_epoch
        rows = np.empty_like(places)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            rows[here] = permuted(places[here] % self.per_epoch, self.per_epoch, self._seed, int(epoch))
        done = (number + 1) // self._micro_batches
        position = self._start + done * self._sequences
        return _rows(self._shards, rows.tolist(), self._length, self._packing, position)

    @staticmethod
    def in_order(
        shards: TokenShards,
        *,
        length: int,
        packing: Packing = "concatenate",
        limit: int | None = None,
        micro_batch: int = 1,
        rank: int = 0,
        world: int = 1,
    ) -> Iterator[Batch]:
        """Sequence after sequence, once; the first `limit` of them. For validation.

        Every token but the first is a target once: the last sequence goes on past the end without targets. All ranks
        get equally many batches, all of one size; what is left over is filled up with sequences without targets.
        """
        _check_packing(packing)
        count = -(-(shards.tokens - 1) // length)
        if count < 1:
            raise DataError(f"{shards.folder} holds {shards.tokens} token, which leaves nothing to predict")
        count = count if limit is None else min(count, limit)
        starts = range(
            rank * micro_batch, -(-count // (world * micro_batch)) * world * micro_batch, world * micro_batch
        )
        return (
            _rows(shards, range(start, start + micro_batch), length, packing, start + micro_batch, count)
            for start in starts
        )


def _check_packing(packing: str) -> None:
    if packing not in ("concatenate", "documents"):
        raise ValueError(f"packing must be 'concatenate' or 'documents', got {packing!r}")
