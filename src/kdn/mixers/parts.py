"""What mixers are made of besides the operations: short convolutions, low-rank projections, normalisation.

Parameter names are those of flash-linear-attention where a part is the same, so its checkpoints load here.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = [
    "Linear",
    "ShortConvolution",
    "continued",
    "decay_parameters",
    "low_rank",
    "softplus_inverse",
    "unit",
]


class Linear(nn.Linear):
    """nn.Linear that decodes faster on CPUs: one row in bfloat16 is a product with a vector there.

    For a matrix of one row PyTorch takes the matrix product, which rearranges the weights first; its product
    with a vector reads them as they lie, in about half the time. Other rows, dtypes and devices, training
    and compiled graphs get nn.Linear.
    """

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight
        if (
            weight.dtype is torch.bfloat16
            and x.dtype is torch.bfloat16
            and x.numel() == self.in_features
            and x.is_cpu
            and not torch.is_grad_enabled()
            and not torch.compiler.is_compiling()
        ):
            row = x.reshape(-1)
            y = torch.mv(weight, row) if self.bias is None else torch.addmv(self.bias, weight, row)
            return y.view(*x.shape[:-1], -1)
        return F.linear(x, weight, self.bias)


def low_rank(width: int, rank: int, out: int, *, bias: bool = False) -> nn.Sequential:
    """width → rank → out; a bias on the second matrix if any."""
    return nn.Sequential(Linear(width, rank, bias=False), Linear(rank, out, bias=bias))


def unit(x: Tensor) -> Tensor:
    """Rows of length one (‖x‖² + 1e-6, so that zero stays zero)."""
    wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + 1e-6)).to(x.dtype)


def softplus_inverse(y: Tensor) -> Tensor:
    """x with softplus(x) = y."""
    return y + torch.log(-torch.expm1(-y))


@torch.no_grad()
def decay_parameters(a_log: Tensor, dt_bias: Tensor) -> None:
    """The start of log α = −exp(A)·softplus(· + dt_bias): exp(A) uniform in [1, 16], softplus(dt_bias)
    log-uniform in [1e-3, 1e-1]."""
    a_log.copy_(torch.empty_like(a_log).uniform_(1, 16).log())
    low, high = math.log(1e-3), math.log(1e-1)
    dt_bias.copy_(softplus_inverse(torch.empty_like(dt_bias).uniform_(low, high).exp()))


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


class ShortConvolution(nn.Module):
    """y_t = SiLU(Σ_j w_j ⊙ x_{t−j}), j < width: a causal convolution of each channel with itself."""

    def __init__(self, channels: int, width: int = 4, *, activation: bool = True) -> None:
        super().__init__()
        self.width = width
        self.activation = activation
        self.weight = nn.Parameter(torch.empty(channels, 1, width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        bound = self.width**-0.5  # as nn.Conv1d, whose fan-in is the width
        nn.init.uniform_(self.weight, -bound, bound)

    def forward(
        self, x: Tensor, history: Tensor | None = None, cu_seqlens: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """x: [B, T, D] → the same, and the history for the next call."""
        if cu_seqlens is None and x.shape[1] == 1 and history is not None:
            # One token, as in decoding: as few small operations as there can be.
            seen = torch.cat((history.to(x.dtype), x), 1)
            y = (seen * self.weight[:, 0].T.to(x.dtype)).sum(1, keepdim=True)
            return (F.silu(y) if self.activation else y), seen[:, 1:]
        weight = self.weight[:, 0].to(x.dtype)  # the newest token's is the last
        if cu_seqlens is None and x.shape[1] > 1 and self.width > 1:
            before = x.new_zeros(x.shape[0], self.width - 1, x.shape[2]) if history is None else history
            long = torch.cat((before.to(x.dtype), x), 1)
            y = F.conv1d(long.transpose(1, 2), weight[:, None], groups=x.shape[2]).transpose(1, 2)
        else:
            y = x * weight[:, -1]
            for j, earlier in enumerate(continued(x, history, cu_seqlens, self.width), start=1):
                y = y + earlier * weight[:, -1 - j]
        return (F.silu(y) if self.activation else y), last_inputs(x, history, cu_seqlens, self.width)
