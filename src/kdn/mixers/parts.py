"""Modules that mixers and models are made of: linear layers, norms, short convolutions.

Parameter names are those of flash-linear-attention where a part is the same, so its checkpoints load here.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kdn.ops.layer import last_inputs, linear_of_row, rms_norm, short_convolution

__all__ = ["Linear", "RMSNorm", "ShortConvolution", "decay_parameters", "low_rank", "softplus_inverse"]


class Linear(nn.Linear):
    """nn.Linear that decodes faster on CPUs.

    For a matrix of one row PyTorch takes a matrix product, which rearranges the weights first; a product with a
    vector reads them once, as they lie. Other rows and devices, training, autocast and compiled graphs get nn.Linear.
    """

    def forward(self, x: Tensor) -> Tensor:
        if (
            not torch.is_grad_enabled()
            and not torch.compiler.is_compiling()  # a graph's sizes may be unknown,
            and torch._C._get_tracing_state() is None  # and a trace would take the answer for a constant
            and x.numel() == self.in_features
            and x.is_cpu
            and not torch.is_autocast_enabled("cpu")
        ):
            return linear_of_row(x, self.weight, self.bias)
        return F.linear(x, self.weight, self.bias)


class RMSNorm(nn.RMSNorm):
    """nn.RMSNorm in one pass. Under autocast its result has the dtype to which the products after it would cast it,
    each for itself."""

    def forward(self, x: Tensor) -> Tensor:
        if self.weight is None or self.eps is None or len(self.normalized_shape) != 1:
            return super().forward(x)
        device, dtype = x.device.type, x.dtype
        if dtype is torch.float32 and device != "meta" and torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
        return rms_norm(x, self.weight, self.eps, dtype=dtype)


def low_rank(width: int, rank: int, out: int, *, bias: bool = False) -> nn.Sequential:
    """width → rank → out; a bias on the second matrix if any."""
    return nn.Sequential(Linear(width, rank, bias=False), Linear(rank, out, bias=bias))


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
        self,
        x: Tensor,
        history: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        *,
        normalized: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """x: [B, T, D] or [B, T, H, K] → the same (with `normalized`, rows of length one along the last axis), and
        the history for the next call, [B or N, width − 1, D]."""
        rows = x if x.ndim == 4 else x[:, :, None]
        y = short_convolution(
            rows,
            self.weight[:, 0],
            history,
            cu_seqlens,
            activation=self.activation,
            normalized=normalized,
        )
        return y.view(x.shape), last_inputs(rows.flatten(2), history, cu_seqlens, self.width)
