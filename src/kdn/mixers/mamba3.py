"""Mamba-3: an additive memory with a trapezoidal write, a rotating state and, in MIMO, several ranks a token.

Per head, with state h [N, P], keys B and queries C [N], values x [P], and R ranks r that all write into and
read from the one h (SISO: R = 1):

    Δ_t = softplus(dt + dt_bias)    α_t = exp(−Δ_t max(softplus(A), 1e-4))    λ_t = σ(trap)
    h_t = α_t R_t h_{t−1} + (1 − λ_t) Δ_t α_t R_t Σ_r B_{t−1,r} x_{t−1,r}ᵀ + λ_t Δ_t Σ_r B_{t,r} x_{t,r}ᵀ
    y_{t,r} = h_tᵀ C_{t,r} + D x_{t,r}

R_t turns N/4 pairs of channels by −Δ_t π tanh(angles), the rest stand still; B and C are RMSNorm(projection)
+ bias, the projection shared by all heads. Seen from axes that turn along, h does not rotate: B and C do,
after their bias, by the angle so far, Σ Δ π tanh(angles). That sum is taken in float64 and modulo 2π, since
float32 has lost the angle after some ten thousand tokens.

Two terms per token, one call of `delta_memory`: the left term of token t writes what token t−1 wrote already,
so the memory is given both together one token late, as t decays it,

    u_t = α_t u_{t−1} + α_t (λ_{t−1} Δ_{t−1} + (1 − λ_t) Δ_t) B_{t−1} x_{t−1}ᵀ
    h_t = u_t + λ_t Δ_t B_t x_tᵀ

and the read of the own term is added outside, λ_t Δ_t (C_t·B_t) x_t, whatever the rotation. So a token needs
its predecessor only: outputs do not depend on the future, even by rounding, and what a call leaves behind is
u and the last token's B, x and λΔ, which the next call goes on from as if nothing had been cut.

In MIMO the ranks follow each other in time, R positions of the memory per token, the decay at the first. The
read of rank r then lacks the ranks s > r of the token before; (C_{t,r}·B_{t−1,s}) v_{t,s} is added for them,
v being the value given to the memory.

Names and layouts of parameters, and which channels form a pair (neighbours in SISO, channel i and i + N/2 in
MIMO, the first N/4 of either kind), are those of the published mamba_ssm module.
"""

import math
from typing import NamedTuple, TypedDict, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kdn.mixers.parts import Linear, softplus_inverse
from kdn.ops import checks, delta_memory
from kdn.ops.layer import continued, last_inputs
from kdn.ops.precision import state_dtype

__all__ = ["Mamba3MIMO", "Mamba3SISO", "Mamba3State"]

SLOWEST_RATE = 1e-4  # a decay per unit of Δ that no head goes below


class Mamba3State(NamedTuple):
    """What Mamba-3 carries from call to call: u, the token that is not in u yet, and the angle so far."""

    memory: Tensor  # [B, H, N, P] float32
    last_b: Tensor  # [B, H, R, N], rotated
    last_x: Tensor  # [B, H, R, P]
    last_weight: Tensor  # [B, H] float32, λΔ
    angle: Tensor  # [B, H, N/4] float32, in [−π, π]


class Mamba3Options(TypedDict, total=False):
    """What both variants may be given."""

    layer_index: int
    expand: int  # value channels per hidden channel
    value_head_dim: int  # P
    state_dim: int | None  # N


class Mamba3(nn.Module):
    """What SISO and MIMO share; `mimo_rank` 1 has no MIMO parameters.

    There are H = expand · hidden_size / value_head_dim heads. `num_heads` and `head_dim` only say how large
    the recurrent state is to be: N solves H · N · P = num_heads · head_dim², the other mixers' size, unless
    `state_dim` gives it. `layer_index` is not used.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        head_dim: int,
        mimo_rank: int,
        *,
        layer_index: int = 0,
        expand: int = 2,
        value_head_dim: int = 64,
        state_dim: int | None = None,
    ) -> None:
        super().__init__()
        for name, size in {"expand": expand, "value_head_dim": value_head_dim}.items():
            if size < 1:
                raise ValueError(f"{name} must be ≥ 1, got {size}")
        inner = expand * hidden_size
        if inner % value_head_dim:
            raise ValueError(
                f"value_head_dim must divide expand * hidden_size = {inner}, got {value_head_dim}"
            )
        if state_dim is None:
            numbers = num_heads * head_dim**2
            if numbers % inner:
                raise ValueError(
                    f"no state_dim makes a state of num_heads * head_dim**2 = {numbers} numbers from "
                    f"expand * hidden_size = {inner} columns: pass state_dim"
                )
            state_dim = numbers // inner
        if state_dim < 4 or state_dim % 2:
            raise ValueError(f"state_dim must be even and ≥ 4, got {state_dim}")
        self.mimo_rank = mimo_rank  # R
        self.heads = inner // value_head_dim  # H
        self.value_head_dim = value_head_dim  # P
        self.state_dim = state_dim  # N
        self.pairs = state_dim // 4  # that rotate
        keys = mimo_rank * state_dim
        self.widths = [inner, inner, keys, keys, self.heads, self.heads, self.heads, self.pairs]
        self.in_proj = Linear(hidden_size, sum(self.widths), bias=False)  # z, x, B, C, dt, A, trap, angles
        self.dt_bias = nn.Parameter(torch.empty(self.heads))
        self.B_norm = nn.RMSNorm(state_dim, eps=1e-5)
        self.C_norm = nn.RMSNorm(state_dim, eps=1e-5)
        self.B_bias = nn.Parameter(torch.empty(self.heads, mimo_rank, state_dim))
        self.C_bias = nn.Parameter(torch.empty(self.heads, mimo_rank, state_dim))
        self.D = nn.Parameter(torch.empty(self.heads))
        if mimo_rank > 1:
            self.mimo_x = nn.Parameter(torch.empty(self.heads, mimo_rank, value_head_dim))
            self.mimo_z = nn.Parameter(torch.empty(self.heads, mimo_rank, value_head_dim))
            self.mimo_o = nn.Parameter(torch.empty(self.heads, mimo_rank, value_head_dim))
        self.out_proj = Linear(inner, hidden_size, bias=False)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """softplus(dt_bias) log-uniform in [1e-3, 1e-1]; biases and D one; ranks that average x and y."""
        low, high = math.log(1e-3), math.log(1e-1)
        self.dt_bias.copy_(softplus_inverse(torch.empty_like(self.dt_bias).uniform_(low, high).exp()))
        for ones in (self.B_bias, self.C_bias, self.D):
            nn.init.ones_(ones)
        if self.mimo_rank > 1:
            nn.init.constant_(self.mimo_x, 1 / self.mimo_rank)
            nn.init.ones_(self.mimo_z)
            nn.init.constant_(self.mimo_o, 1 / self.mimo_rank)

    def forward(
        self, x: Tensor, state: Mamba3State | None = None, cu_seqlens: Tensor | None = None
    ) -> tuple[Tensor, Mamba3State]:
        """x: [B, T, hidden] → y like x, and the state to go on from."""
        ranks, wide = self.mimo_rank, state_dtype(x)
        rows = checks.sequences(cu_seqlens, x.shape[0], x.shape[1])
        if state is None:
            state = self._start(rows, x.device, wide)
        elif state.memory.shape[0] != rows:
            raise ValueError(f"state must have {rows} rows, one per sequence, got {state.memory.shape[0]}")
        z, v, b, c, dt, a, trap, angles = self.in_proj(x).split(self.widths, dim=-1)
        narrow = v.dtype

        # [B, T, H]
        delta = F.softplus(dt.to(wide) + self.dt_bias)
        log_decay = -delta * F.softplus(a.to(wide)).clamp_min(SLOWEST_RATE)
        left, right = delta * torch.sigmoid(-trap.to(wide)), delta * torch.sigmoid(trap.to(wide))
        turns = delta[..., None] * (math.pi * torch.tanh(angles.to(wide)))[:, :, None]
        angle = _sum_of_turns(turns, state.angle, cu_seqlens).to(wide)

        # [B, T, R, N], the same for all heads, then [B, T, R, H, ·]
        b, c = self._normed(b.to(wide), self.B_norm), self._normed(c.to(wide), self.C_norm)
        turned = F.pad(angle, (0, self.state_dim // 2 - self.pairs))[:, :, None]  # the other pairs by 0
        cos, sin = turned.cos(), turned.sin()
        key = self._rotated(b, self.B_bias, cos, sin).to(narrow)
        query = self._rotated(c, self.C_bias, cos, sin).to(narrow)
        v = v.unflatten(-1, (self.heads, -1))[:, :, None]
        value = v if ranks == 1 else (v * self.mimo_x.transpose(0, 1)).to(narrow)

        key_before = _before(key, state.last_b.transpose(1, 2), cu_seqlens)
        weight = log_decay.exp() * (_before(right, state.last_weight, cu_seqlens) + left)
        written = weight[:, :, None, :, None] * _before(value, state.last_x.transpose(1, 2), cu_seqlens)
        written = written.to(narrow)
        read, memory = delta_memory(
            query.flatten(1, 2),
            None,
            written.flatten(1, 2),
            key_before.flatten(1, 2),
            F.pad(log_decay[:, :, None], (0, 0, 0, ranks - 1)).flatten(1, 2),
            scale=1.0,
            initial_state=state.memory,
            cu_seqlens=None if cu_seqlens is None else cu_seqlens * ranks,
        )

        y = torch.addcmul(read.unflatten(1, (-1, ranks)).to(wide), self._own(b, c, right), v.to(wide))
        z = z.unflatten(-1, (self.heads, -1))[:, :, None].to(wide)
        if ranks == 1:
            y = y * F.silu(z)
        else:
            missed = torch.einsum("btrhn,btshn->bthrs", query, key_before).triu(1)
            y = y + torch.einsum("bthrs,btshp->btrhp", missed, written)
            y = y * F.silu(z * self.mimo_z.transpose(0, 1)) * self.mimo_o.transpose(0, 1)
        end = Mamba3State(
            memory,
            _newest(key, state.last_b.transpose(1, 2), cu_seqlens).transpose(1, 2),
            _newest(value, state.last_x.transpose(1, 2), cu_seqlens).transpose(1, 2),
            _newest(right, state.last_weight, cu_seqlens),
            _newest(angle, state.angle, cu_seqlens),
        )
        return self.out_proj(y.sum(2).flatten(2).to(x.dtype)), end

    def _start(self, sequences: int, device: torch.device, dtype: torch.dtype) -> Mamba3State:
        """Nothing stored, and nothing before the first token."""
        n, p = self.state_dim, self.value_head_dim
        shapes = ((n, p), (self.mimo_rank, n), (self.mimo_rank, p), (), (self.pairs,))
        zeros = (torch.zeros(sequences, self.heads, *shape, device=device, dtype=dtype) for shape in shapes)
        return Mamba3State(*zeros)

    def _normed(self, x: Tensor, norm: nn.RMSNorm) -> Tensor:
        """B or C before the heads' biases: [B, T, R·N] → [B, T, R, N]."""
        x = x.unflatten(-1, (self.mimo_rank, self.state_dim))
        return F.rms_norm(x, (self.state_dim,), norm.weight.to(x.dtype), norm.eps)

    def _rotated(self, x: Tensor, bias: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """B or C of every head as the memory sees it: [B, T, R, N] → [B, T, R, H, N]."""
        x = x[:, :, :, None] + bias.transpose(0, 1)
        axis, grid = (-1, (-1, 2)) if self.mimo_rank == 1 else (-2, (2, -1))
        first, second = x.unflatten(-1, grid).unbind(axis)
        turned = (first * cos - second * sin, first * sin + second * cos)
        return torch.stack(turned, axis).flatten(-2)

    def _own(self, b: Tensor, c: Tensor, right: Tensor) -> Tensor:
        """What a token's x is multiplied by to give what y has of it beside the memory's read.

        Σ_s (λΔ C_r·B_s + D [r = s]) mimo_x_s, [B, T, R, H, P] (in SISO, [B, T, 1, H, 1]). One token's B and C
        have turned alike, so C_r·B_s follows from what all heads share and from their biases.
        """
        b_bias, c_bias = self.B_bias.to(b.dtype), self.C_bias.to(c.dtype)
        products = (
            (c @ b.mT)[:, :, None]
            + torch.einsum("btrn,hsn->bthrs", c, b_bias)
            + torch.einsum("btsn,hrn->bthrs", b, c_bias)
            + c_bias @ b_bias.mT
        )
        ranks = torch.eye(self.mimo_rank, device=b.device, dtype=b.dtype)
        own = right[..., None, None] * products + self.D[:, None, None] * ranks
        if self.mimo_rank == 1:
            return own.permute(0, 1, 3, 2, 4)
        return torch.einsum("bthrs,hsp->btrhp", own, self.mimo_x.to(own.dtype)).to(own.dtype)

    def state_size(self) -> int:
        """Numbers in the memory of one sequence; the last token's B, x and λΔ and the angles do not count."""
        return self.heads * self.state_dim * self.value_head_dim

    def flops_per_token(self) -> int:
        """Forward flops of the memory (decay, and a write and a read per rank) and of the products between
        ranks; elementwise work is not counted."""
        ranks = self.mimo_rank
        between = ranks**2 + ranks * (ranks - 1) // 2
        return 2 * self.state_size() * (1 + 2 * ranks) + 2 * self.heads * between * (
            self.state_dim + self.value_head_dim
        )


class Mamba3SISO(Mamba3):
    """Mamba-3 with one rank: every head writes one outer product per token and reads once."""

    def __init__(
        self, hidden_size: int, num_heads: int, head_dim: int, **options: Unpack[Mamba3Options]
    ) -> None:
        super().__init__(hidden_size, num_heads, head_dim, 1, **options)


class Mamba3MIMO(Mamba3):
    """Mamba-3 with `mimo_rank` keys, queries and values per head and token, for one state and one decay.

    x_r = mimo_x_r ⊙ x, and the output is Σ_r mimo_o_r ⊙ y_r ⊙ SiLU(mimo_z_r ⊙ z).
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        head_dim: int,
        *,
        mimo_rank: int = 4,
        **options: Unpack[Mamba3Options],
    ) -> None:
        if mimo_rank < 2:
            raise ValueError(f"mimo_rank must be ≥ 2, got {mimo_rank}: Mamba3SISO has one rank")
        super().__init__(hidden_size, num_heads, head_dim, mimo_rank, **options)


def _before(x: Tensor, last: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """What the token before had, [B, T, …]; before a sequence's first token, that is `last` [B or N, …]."""
    (seen,) = continued(x.flatten(2), last.flatten(1)[:, None], cu_seqlens, 2)
    return seen.unflatten(2, x.shape[2:])


def _newest(x: Tensor, last: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """What the last token of every sequence has, [B or N, …]; of one without tokens, `last`."""
    return last_inputs(x.flatten(2), last.flatten(1)[:, None], cu_seqlens, 2)[:, 0].unflatten(1, x.shape[2:])


def _sum_of_turns(turns: Tensor, start: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """start + Σ turns up to every token of a sequence, in [−π, π]: float64 [B, T, H, n]."""
    if cu_seqlens is None:
        total = start[:, None] + turns.double().cumsum(1)
    else:
        # One sum runs through all sequences, less what it is where each starts: a NaN must not get into it.
        total = turns.double().nan_to_num(0.0, 0.0, 0.0).cumsum(1)
        offsets = cu_seqlens.to(turns.device, torch.int64)
        sequence = torch.bucketize(torch.arange(turns.shape[1], device=turns.device), offsets[1:], right=True)
        before = F.pad(total, (0, 0, 0, 0, 1, 0))[0, offsets[:-1]]
        total = total + (start - before)[sequence]
    return total - 2 * math.pi * (total.detach() / (2 * math.pi)).round()
