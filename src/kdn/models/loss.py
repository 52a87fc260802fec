"""Cross entropy of a language model's head that never holds all logits.

Tokens go through head and softmax in pieces. Gradients of hidden states and head are made in the forward
pass, where a piece's logits are at hand: no logits are kept or computed twice.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from kdn.ops.layer import softmax_loss_

__all__ = ["next_token_loss", "token_loss"]

PIECE = 2**25  # logits at a time: 64 MiB of bfloat16


class _HeadLoss(torch.autograd.Function):
    """Σ −log softmax(h Wᵀ)[label], h: [N, d], W: [vocabulary, d], labels: [N]."""

    @staticmethod
    def forward(
        ctx: Any, h: Tensor, weight: Tensor, labels: Tensor, low: torch.dtype | None, train: bool
    ) -> Tensor:
        w = weight if low is None else weight.to(low)
        # needs_input_grad is also true under no_grad, and evaluation should not pay for gradients.
        wants_h, wants_w = (train and needed for needed in ctx.needs_input_grad[:2])
        d_h = torch.empty_like(h) if wants_h else None
        wide = torch.promote_types(torch.float32, weight.dtype)
        d_w = torch.zeros_like(weight, dtype=wide) if wants_w else None
        total = torch.zeros((), dtype=wide, device=h.device)
        rows = min(max(1, PIECE // weight.shape[0]), h.shape[0])
        room = w.new_empty(rows, w.shape[0])  # one for all pieces: fresh memory costs as much as a product
        for at in range(0, h.shape[0], max(rows, 1)):
            piece = slice(at, at + rows)
            x = h[piece] if low is None else h[piece].to(low)
            logits = torch.mm(x, w.T, out=room[: x.shape[0]])
            total += softmax_loss_(logits, labels[piece], gradient=wants_h or wants_w).sum()
            if d_h is not None:
                d_h[piece] = logits @ w  # gradients by now
            if d_w is not None:
                d_w += logits.T @ x
        ctx.save_for_backward(d_h, None if d_w is None else d_w.to(weight.dtype))
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor | None, ...]:
        # d is 1 / count: rounded to bfloat16 it would put all gradients off by the same 0.4%.
        d_h, d_w = (None if x is None else (x.to(d.dtype) * d).to(x.dtype) for x in ctx.saved_tensors)
        return d_h, d_w, None, None, None


def next_token_loss(
    hidden: Tensor, weight: Tensor, labels: Tensor, *, count: Tensor | float | None = None
) -> Tensor:
    """Mean cross entropy of predicting labels[t + 1] from hidden[t]; see `token_loss`."""
    return token_loss(hidden, weight, F.pad(labels[:, 1:], (0, 1), value=-100), count=count)


def token_loss(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, count: Tensor | float | None = None
) -> Tensor:
    """Mean cross entropy of predicting targets[t] from hidden[t]; targets of −100 are left out.

    hidden: [B, T, d], targets: [B, T]. count: divide by this instead of by the number of targets (for
    gradients accumulated over several calls). 0 where there is nothing to predict. Differentiable once.
    """
    wanted = targets.reshape(-1)
    kept = wanted != -100
    h, wanted = hidden.reshape(-1, hidden.shape[-1])[kept], wanted[kept]
    device = hidden.device.type
    low = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    if low is None and h.dtype != weight.dtype:
        h = h.to(weight.dtype)
    total = _HeadLoss.apply(h, weight, wanted.to(h.device), low, torch.is_grad_enabled())
    count = wanted.numel() if count is None else count
    return total / (count + (count == 0))
