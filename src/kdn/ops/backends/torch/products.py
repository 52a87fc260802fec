"""Decayed triangular products, for any decay at all.

For rows x_i and columns y_j of a chunk, all pairs i > j of

    M_ij = Σ_k x_ik y_jk Π_{l=j+1..i} α_lk

A product of decays cannot be split at one reference point per chunk: half of it would be an inverse and
overflow. It can be split *between* i and j. So the chunk is halved again and again: at the level with
halves of s tokens, pairs with j in a left half and i in the right half beside it meet at the boundary,

    M_ij = Σ_k (x_ik · decay from the boundary to i) (y_jk · decay from j to the boundary)

which is one small matrix product. Both factors are running products of α ≤ 1: nothing is divided, nothing
overflows, and what underflows is a pair whose product does too. After the last level the same factors
are the decays from the chunk's start and to its end, which the memory needs anyway.

The gradient of log α_l sums pairs i ≥ l > j; it is collected from the same halves, block by block,
without subtracting anything from anything, so it is as exact at a decay of −50 as at 0.

Shapes: x [R, C, n, K] (n kinds of rows, queries and keys, share their columns), y [R, C, K],
α [R, C, K or 1]; M [R, C, n, C], where only i > j is written.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Halves(NamedTuple):
    """One level: factors as they entered its matrix product. G = R·C/2s blocks."""

    x: Tensor  # [G, s, n, K] right halves, decayed from the boundary
    y: Tensor  # [G, s, K] left halves, decayed to the boundary
    left: Tensor  # [G, 1, K or 1] the whole left half's decay
    right: Tensor


def products(x: Tensor, y: Tensor, alpha: Tensor, keep: list[Halves] | None = None) -> Tensor:
    """M. Overwrites x with its rows decayed from the chunk's start, y with its columns to its end.

    `keep` collects what the backward pass needs.
    """
    rows, chunk, kinds, width = x.shape
    m = x.new_zeros(rows, chunk, kinds, chunk)
    x *= alpha[:, :, None]
    total = alpha  # of every block of the current size
    size = 1
    while size < chunk:
        blocks = rows * chunk // (2 * size)
        xs, ys = x.view(blocks, 2, size, kinds, width), y.view(blocks, 2, size, width)
        totals = total.reshape(blocks, 2, 1, -1)
        left, right = totals[:, 0], totals[:, 1]
        x_right, y_left = xs[:, 1], ys[:, 0]
        pairs = x_right.reshape(blocks, size * kinds, width) @ y_left.mT
        _block_view(m, size)[:] = pairs.view(rows, -1, size, kinds, size)
        if keep is not None:
            keep.append(Halves(x_right.clone(), y_left.clone(), left, right))
        x_right *= left[:, :, None]
        y_left *= right
        total = left * right
        size *= 2
    return m


def products_backward(
    d_m: Tensor,
    d_x: Tensor,
    d_y: Tensor,
    d_total: Tensor,
    x_alpha: Tensor,
    alpha: Tensor,
    kept: list[Halves],
) -> Tensor:
    """Gradient of log α [R, C, K or 1]; turns d_x, d_y in place into the gradients of the undecayed x, y.

    On entry d_x, d_y are the gradients of the fully decayed x and y, d_total [R, 1, K or 1] that of the
    log of the whole chunk's decay, and x_alpha is x α.
    """
    rows, chunk, kinds, width = d_x.shape
    d_log = d_total  # of the decay of every block: what all its tokens receive
    for level in reversed(range(len(kept))):
        size, half = 2**level, kept[level]
        blocks = half.x.shape[0]
        dx_right = d_x.view(blocks, 2, size, kinds, width)[:, 1]
        dy_left = d_y.view(blocks, 2, size, width)[:, 0]
        # Right rows were multiplied by the left half's decay, left columns by the right half's.
        dx_right *= half.left[:, :, None]
        dy_left *= half.right
        to_left = _reduce((half.x * dx_right).sum((1, 2)), alpha)
        to_right = _reduce((half.y * dy_left).sum(1), alpha)
        d_log = d_log.reshape(blocks, 1, -1) + torch.stack((to_left, to_right), 1)
        pairs = _block_view(d_m, size).reshape(blocks, size * kinds, size)
        dx_right += (pairs @ half.y).view_as(dx_right)
        dy_left += pairs.mT @ half.x.view(blocks, size * kinds, width)
    d_log = d_log.reshape(rows, chunk, -1) + _reduce((x_alpha * d_x).sum(2), alpha)
    d_x *= alpha[:, :, None]
    return d_log


def _reduce(x: Tensor, alpha: Tensor) -> Tensor:
    return x if alpha.shape[-1] == x.shape[-1] else x.sum(-1, keepdim=True)


def _block_view(m: Tensor, size: int) -> Tensor:
    """The blocks (right half, left half) of M's diagonal at one level, [R, C/2s, s, n, s]."""
    rows, chunk, kinds, _ = m.shape
    blocks = chunk // (2 * size)
    split = m.view(rows, blocks, 2, size, kinds, blocks, 2, size)[:, :, 1, :, :, :, 0]
    return split.diagonal(dim1=1, dim2=4).movedim(-1, 1)
