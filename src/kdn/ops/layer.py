"""What stands around the memory in a model: steps without a recurrence, each in one pass over the data.

    short_convolution   in front of q, k and v, with SiLU and unit length
    softplus_decay      log α from a projection
    rms_norm            in front of a layer; with a gate, after the memory
    swiglu              in the feed-forward
    linear_of_row       each projection, while one sequence decodes
    softmax_loss_       at the head, with its gradient

They are no operations of their own right: any PyTorch code does the same, and here it stands. But a backend may have
kernels for them (functions of these names, optional, as for `decode`), and should: done one small step after
another, they cost a CPU as much time as the memory does.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kdn.ops import registry
from kdn.ops.precision import state_dtype

__all__ = [
    "continued",
    "last_inputs",
    "linear_of_row",
    "rms_norm",
    "short_convolution",
    "softmax_loss_",
    "softplus_decay",
    "swiglu",
    "unit",
]

UNIT_EPS = 1e-6  # under the root, so that zero stays zero


def _kernel(name: str, device: torch.device, *arguments: Any) -> Tensor | None:
    """What the device's backend makes of it; None where it has no kernel for these tensors."""
    found = getattr(registry.choose(None, device), name, None)
    return None if found is None else found(*arguments)


def short_convolution(
    x: Tensor,
    weight: Tensor,
    history: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    *,
    activation: bool = True,
    normalized: bool = False,
) -> Tensor:
    """y_t = f(Σ_j w_{W−1−j} ⊙ x_{t−j}): SiLU (with `activation`), then rows of length one (with `normalized`).

    x: B T H K. weight: [H·K, W], the newest token's last. history: [B or N, W − 1, H·K], the inputs before this
    call, the newest last; None is zeros. Returns y like x.
    """
    eps = UNIT_EPS if normalized else 0.0
    done = _kernel("short_convolution", x.device, x, weight, history, cu_seqlens, activation, eps)
    if done is not None:
        return done
    width, rows, taps = weight.shape[1], x.flatten(-2), weight.to(x.dtype)
    if cu_seqlens is None and x.shape[1] == 1 and history is not None:
        # One token, as in decoding: as few small operations as there can be.
        y = (torch.cat((history.to(x.dtype), rows), 1) * taps.T).sum(1, keepdim=True)
    elif cu_seqlens is None and x.shape[1] > 1 and width > 1:
        before = rows.new_zeros(x.shape[0], width - 1, rows.shape[2]) if history is None else history
        long = torch.cat((before.to(x.dtype), rows), 1).transpose(1, 2)
        y = F.conv1d(long, taps[:, None], groups=rows.shape[2]).transpose(1, 2)
    else:
        y = rows * taps[:, -1]
        for j, earlier in enumerate(continued(rows, history, cu_seqlens, width), start=1):
            y = y + earlier * taps[:, -1 - j]
    y = (F.silu(y) if activation else y).unflatten(-1, x.shape[2:])
    return unit(y) if normalized else y


def unit(x: Tensor) -> Tensor:
    """Rows of length one (‖x‖² + 1e-6, so that zero stays zero)."""
    wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + UNIT_EPS)).to(x.dtype)


def softplus_decay(f: Tensor, a_log: Tensor, bias: Tensor) -> Tensor:
    """log α = −exp(A)·softplus(f + bias), in at least float32. f: B T H K. a_log: H. bias: H·K."""
    wide = state_dtype(f)
    rate = a_log.to(wide).exp()
    done = _kernel("softplus_decay", f.device, f, rate, bias)
    if done is not None:
        return done
    return -rate[:, None] * F.softplus(f.to(wide) + bias.view(f.shape[2:]))


def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    gate: Tensor | None = None,
    *,
    silu: bool = False,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """x / √(mean x² + eps) ⊙ weight along the last axis, and with a gate times σ(gate), or SiLU(gate).

    x, gate: B T H V or B T V. weight: V. Computed in at least float32; the result is of `dtype`, or x's.
    """
    dtype = dtype or x.dtype
    if x.ndim in (3, 4):
        wide = x if x.ndim == 4 else x[:, :, None]
        opening = gate if gate is None or gate.ndim == 4 else gate[:, :, None]
        done = _kernel("rms_norm", x.device, wide, weight, opening, eps, silu, dtype)
        if done is not None:
            return done.view(x.shape)
    # The weight is cast, since PyTorch's fused kernel wants one dtype (under autocast there are two).
    y = F.rms_norm(x, (x.shape[-1],), weight.to(x.dtype), eps)
    if gate is not None:
        y = y * (F.silu(gate) if silu else gate.sigmoid())
    return y.to(dtype)


def linear_of_row(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """F.linear of one row, without gradients. x: [..., n] with n numbers in all, of the weight's dtype."""
    done = _kernel("linear_of_row", x.device, x, weight, bias)
    if done is not None:
        return done
    if x.dtype is weight.dtype is torch.bfloat16 and x.shape[-1] == x.numel() == weight.shape[1]:
        # PyTorch's matrix product rearranges the weights first, its product with a vector does not: half the time.
        row = x.reshape(-1)
        y = torch.mv(weight, row) if bias is None else torch.addmv(bias, weight, row)
        return y.view(*x.shape[:-1], -1)
    return F.linear(x, weight, bias)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """SiLU(gate) ⊙ up."""
    if gate.ndim == 3 and gate.dtype == up.dtype:
        done = _kernel("swiglu", gate.device, gate, up)
        if done is not None:
            return done
    return F.silu(gate) * up


@torch.no_grad()
def softmax_loss_(logits: Tensor, labels: Tensor, *, gradient: bool) -> Tensor:
    """−log softmax(logits)[label], in at least float32; with `gradient`, logits become softmax − onehot in place.

    logits: [N, V]. labels: [N]. Without `gradient`, what is left in logits means nothing.
    """
    if labels.shape != logits.shape[:1]:
        raise ValueError(
            f"labels must be [{logits.shape[0]}], one per row of logits, got {list(labels.shape)}"
        )
    done = _kernel("softmax_loss_", logits.device, logits, labels, gradient)
    if done is not None:
        return done
    label = labels[:, None]
    log_p = logits.log_softmax(-1, dtype=state_dtype(logits))
    loss = -log_p.gather(-1, label)[:, 0]
    if gradient:
        logits.copy_(log_p.exp_().scatter_add_(-1, label, log_p.new_full(label.shape, -1.0)))
    return loss


def continued(x: Tensor, history: Tensor | None, cu_seqlens: Tensor | None, width: int) -> list[Tensor]:
    """x as seen 1, 2, … width − 1 tokens ago, each [B, T, D]; before a sequence's start, its history.

    history: [B or N, width − 1, D], the inputs before this call, the newest last; None is zeros.
    """
    back = width - 1
    if cu_seqlens is None:
        before = x.new_zeros(x.shape[0], back, x.shape[2]) if history is None else history.to(x.dtype)
        long = torch.cat((before, x), 1)
        return [long[:, back - j : back - j + x.shape[1]] for j in range(1, width)]
    # Packed: token t of sequence n sees t − j where that is its own, else the history's row.
    time = torch.arange(x.shape[1], device=x.device)
    offsets = cu_seqlens.to(x.device, torch.int64)
    sequence = torch.bucketize(time, offsets[1:], right=True)
    position = time - offsets[sequence]
    seen = []
    for j in range(1, width):
        own = (position >= j)[None, :, None]
        earlier = F.pad(x, (0, 0, j, 0))[:, : x.shape[1]]
        if history is None:
            seen.append(earlier.masked_fill(~own, 0))
            continue
        old = history.to(x.dtype)[sequence, (back + position - j).clamp(0, back - 1)][None]
        seen.append(torch.where(own, earlier, old))
    return seen


def last_inputs(x: Tensor, history: Tensor | None, cu_seqlens: Tensor | None, width: int) -> Tensor:
    """The newest width − 1 inputs of every sequence, [B or N, width − 1, D]."""
    back = width - 1
    if back == 0:
        return x.new_empty(x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1, 0, x.shape[2])
    if cu_seqlens is None:
        before = x.new_zeros(x.shape[0], back, x.shape[2]) if history is None else history.to(x.dtype)
        return torch.cat((before, x[:, -back:]), 1)[:, -back:]
    offsets = cu_seqlens.to(x.device, torch.int64)
    # Row i of the result is `back − i` tokens before the end; before the start, it is a row of the history.
    at = offsets[1:, None] - torch.arange(back, 0, -1, device=x.device)
    own = (at >= offsets[:-1, None])[..., None]
    inside = x[0, at.clamp(0, x.shape[1] - 1)]
    if history is None:
        return torch.where(own, inside, torch.zeros_like(inside))
    length = (offsets[1:] - offsets[:-1])[:, None]
    row = (torch.arange(back, device=x.device) + length).clamp_max(back - 1)
    old = history.to(x.dtype).gather(1, row[..., None].expand(-1, -1, x.shape[2]))
    return torch.where(own, inside, old)
