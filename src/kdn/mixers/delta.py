"""The delta-rule mixers: one layer, eight ways to decide what is forgotten, erased and written. (The last three, the
KDNs, are in kalman.py.)

All share q, k and v projections with short convolutions, the memory, and a gated RMSNorm before the output
projection. A system is what its `write` prepares for `delta_memory`:

    system             log α            erased    gain                       value
    linear-attention   0                nothing   k                          v
    deltanet           0                k         β k                        v
    gated-deltanet     per head         k         β k                        v
    kda                per channel      k         β k                        v
    gdn2               per channel      b ⊙ k     k                          w ⊙ v
    kdn-isotropic      per channel      k         isotropic_gain(k, ω, r)    v
    kdn-diagonal       per channel      k         diagonal_gain(k, ω, r)     v
    kdn-exact          per channel      k         exact_gain(k, ω, r)        v

Adding one is a class with its projections and a `write` of a few lines.
"""

from typing import NamedTuple, TypedDict, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kdn.mixers.parts import Linear, ShortConvolution, decay_parameters, low_rank, softplus_inverse
from kdn.ops import checks, decode, delta_memory
from kdn.ops.layer import rms_norm, softplus_decay, unit
from kdn.ops.precision import state_dtype

__all__ = [
    "GDN2",
    "KDA",
    "DeltaNet",
    "DeltaState",
    "GatedDeltaNet",
    "LinearAttention",
    "Write",
]


class DeltaState(NamedTuple):
    """What a delta-rule mixer carries from call to call."""

    memory: Tensor  # [B, H, K, V] float32
    cov: Tensor | None  # [B, H, K], [B, H] or [B, H, K, K] float32; None where no uncertainty is tracked
    conv: tuple[Tensor, Tensor, Tensor] | None  # the last inputs of q's, k's and v's convolutions


class Write(NamedTuple):
    """What one call writes: the arguments of the memory, and of the Kalman gain where there is one."""

    erase: Tensor | None  # [B, T, H, K]; None: nothing is erased
    value: Tensor  # [B, T, H, V]
    log_decay: Tensor | None  # [B, T, H, K], [B, T, H] or None
    gain: Tensor | None  # [B, T, H, K]; None: the Kalman gain of the noises below
    process_noise: Tensor | None = None
    obs_noise: Tensor | None = None


class LayerOptions(TypedDict, total=False):
    """What every delta-rule layer may be given."""

    layer_index: int
    expand_v: float  # value channels per key channel
    conv_size: int  # tokens a short convolution sees; 0: none
    norm_eps: float


class ChannelDecayOptions(LayerOptions, total=False):
    decay: str  # "softplus" or "sigmoid"


class DeltaMixer(nn.Module):
    """The layer that all delta-rule systems share; subclasses define `write`."""

    kalman: str | None = None  # which covariance is tracked: diagonal, isotropic or exact
    multiply_adds = 4  # per number in the memory and token: decay, read at the key, write, read
    silu_gate = False  # the output gate is a SiLU; else a sigmoid

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        head_dim: int,
        *,
        layer_index: int = 0,
        expand_v: float = 1.0,
        conv_size: int = 4,
        norm_eps: float = 1e-5,
    ) -> None:
        super().__init__()
        self.hidden_size, self.num_heads, self.head_dim = hidden_size, num_heads, head_dim
        self.value_dim = round(head_dim * expand_v)
        if self.value_dim < 1:
            raise ValueError(f"expand_v must leave a head of {head_dim} one value channel, got {expand_v}")
        if conv_size < 0:
            raise ValueError(f"conv_size must be ≥ 1, or 0 for no convolution, got {conv_size}")
        self.layer_index, self.conv_size, self.norm_eps = layer_index, conv_size, norm_eps
        keys, values = num_heads * head_dim, num_heads * self.value_dim
        self.q_proj = Linear(hidden_size, keys, bias=False)
        self.k_proj = Linear(hidden_size, keys, bias=False)
        self.v_proj = Linear(hidden_size, values, bias=False)
        if conv_size:
            self.q_conv1d = ShortConvolution(keys, conv_size)
            self.k_conv1d = ShortConvolution(keys, conv_size)
            self.v_conv1d = ShortConvolution(values, conv_size)
        self.o_norm = nn.RMSNorm(self.value_dim, eps=norm_eps)
        self.o_proj = Linear(values, hidden_size, bias=False)

    # --- what a system defines ---

    def write(self, x: Tensor, k: Tensor, v: Tensor) -> Write:
        raise NotImplementedError(f"{type(self).__name__} must say what it writes")

    def gate(self, x: Tensor) -> Tensor | None:
        """What multiplies the normalised output, [B, T, H·V], before its sigmoid or SiLU."""
        return None

    def reset_parameters(self) -> None:
        """Set parameters that PyTorch's layers do not initialise themselves."""

    # --- what all share ---

    def forward(
        self, x: Tensor, state: DeltaState | None = None, cu_seqlens: Tensor | None = None
    ) -> tuple[Tensor, DeltaState]:
        """x: [B, T, hidden] → y like x, and the state to go on from."""
        q, k, v, conv = self.queries_keys_values(x, state, cu_seqlens)
        w = self.write(x, k, v)
        if x.shape[1] == 1 and cu_seqlens is None and state is not None and not torch.is_grad_enabled():
            out, memory, cov = self._step(q, w, state)
        else:
            gain, cov = self.gain(k, w, state, cu_seqlens)
            out, memory = delta_memory(
                q,
                w.erase,
                w.value,
                gain,
                w.log_decay,
                initial_state=None if state is None else state.memory,
                cu_seqlens=cu_seqlens,
            )
        return self.read_out(x, out), DeltaState(memory, cov, conv)

    def queries_keys_values(
        self, x: Tensor, state: DeltaState | None = None, cu_seqlens: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, Tensor, Tensor] | None]:
        """q, k (unit length) and v as [B, T, H, ·], and the convolutions' new histories."""
        rows = checks.sequences(cu_seqlens, x.shape[0], x.shape[1])
        if state is not None and state.memory.shape[0] != rows:
            raise ValueError(f"state must have {rows} rows, one per sequence, got {state.memory.shape[0]}")
        q, k, v = (self.by_head(project(x)) for project in (self.q_proj, self.k_proj, self.v_proj))
        if not self.conv_size:
            return unit(F.silu(q)), unit(F.silu(k)), F.silu(v), None
        old = (None, None, None) if state is None or state.conv is None else state.conv
        q, conv_q = self.q_conv1d(q, old[0], cu_seqlens, normalized=True)
        k, conv_k = self.k_conv1d(k, old[1], cu_seqlens, normalized=True)
        v, conv_v = self.v_conv1d(v, old[2], cu_seqlens)
        return q, k, v, (conv_q, conv_k, conv_v)

    def by_head(self, x: Tensor) -> Tensor:
        """[B, T, H·X] → [B, T, H, X]"""
        return x.unflatten(-1, (self.num_heads, -1))

    def gain(
        self, k: Tensor, w: Write, state: DeltaState | None = None, cu_seqlens: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """The gain of every token, and the covariance after the last one."""
        assert w.gain is not None
        return w.gain, None

    def read_out(self, x: Tensor, out: Tensor) -> Tensor:
        """From the memory's answers [B, T, H, V] to the layer's output."""
        gate = self.gate(x)
        y = rms_norm(
            out,
            self.o_norm.weight,
            self.norm_eps,
            None if gate is None else self.by_head(gate),
            silu=self.silu_gate,
            dtype=x.dtype,
        )
        return self.o_proj(y.flatten(-2))

    def _step(self, q: Tensor, w: Write, state: DeltaState) -> tuple[Tensor, Tensor, Tensor | None]:
        """One token without gradients. The states given are not touched: a caller may branch from them."""
        memory = state.memory.clone()
        out = decode(q, w.erase, w.value, w.log_decay, state=memory, gain=w.gain)
        return out, memory, None

    def state_size(self) -> int:
        """Numbers in the memory and covariance of one sequence; convolution inputs are not counted."""
        return self.num_heads * self.head_dim * self.value_dim

    def flops_per_token(self) -> int:
        """Forward flops of the memory and the convolutions; elementwise work is not counted."""
        widths = self.num_heads * (2 * self.head_dim + self.value_dim)
        memory = self.num_heads * self.head_dim * self.value_dim
        return 2 * (self.multiply_adds * memory + self.conv_size * widths)


class LinearAttention(DeltaMixer):
    """Pure addition: S ← S + k vᵀ."""

    multiply_adds = 2

    def write(self, x: Tensor, k: Tensor, v: Tensor) -> Write:
        return Write(erase=None, value=v, log_decay=None, gain=k)


class DeltaNet(DeltaMixer):
    """S ← (I − β k kᵀ) S + β k vᵀ, β = σ(w·x) (twice that with `allow_neg_eigval`)."""

    multiply_adds = 3
    silu_gate = True

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        head_dim: int,
        *,
        allow_neg_eigval: bool = False,
        output_gate: bool = False,
        **layer: Unpack[LayerOptions],
    ) -> None:
        super().__init__(hidden_size, num_heads, head_dim, **layer)
        self.allow_neg_eigval = allow_neg_eigval
        self.b_proj = Linear(hidden_size, num_heads, bias=False)
        if output_gate:
            self.g_proj = Linear(hidden_size, num_heads * self.value_dim, bias=False)

    def strength(self, x: Tensor) -> Tensor:
        """β, [B, T, H, 1]."""
        beta = self.b_proj(x).sigmoid()[..., None]
        return 2 * beta if self.allow_neg_eigval else beta

    def gate(self, x: Tensor) -> Tensor | None:
        gate: Tensor | None = self.g_proj(x) if hasattr(self, "g_proj") else None
        return gate

    def write(self, x: Tensor, k: Tensor, v: Tensor) -> Write:
        return Write(erase=k, value=v, log_decay=None, gain=self.strength(x) * k)


class GatedDeltaNet(DeltaNet):
    """DeltaNet with one decay per head, log α = −exp(A)·softplus(w·x + dt_bias), and a SiLU output gate."""

    multiply_adds = 4

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        head_dim: int,
        *,
        allow_neg_eigval: bool = False,
        output_gate: bool = True,
        **layer: Unpack[LayerOptions],
    ) -> None:
        options = {"allow_neg_eigval": allow_neg_eigval, "output_gate": output_gate}
        super().__init__(hidden_size, num_heads, head_dim, **options, **layer)
        self.a_proj = Linear(hidden_size, num_heads, bias=False)
        self.A_log = nn.Parameter(torch.empty(num_heads))
        self.dt_bias = nn.Parameter(torch.empty(num_heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        decay_parameters(self.A_log, self.dt_bias)

    def write(self, x: Tensor, k: Tensor, v: Tensor) -> Write:
        wide = state_dtype(x)
        log_decay = -self.A_log.to(wide).exp() * F.softplus(self.a_proj(x).to(wide) + self.dt_bias)
        return Write(erase=k, value=v, log_decay=log_decay, gain=self.strength(x) * k)


class ChannelDecayMixer(DeltaMixer):
    """KDA's layer around the write: one decay per channel and a low-rank sigmoid gate at the output.

    log α = −exp(A)·softplus(f(x) + dt_bias), f low-rank; or, with decay="sigmoid", log σ(f(x) + dt_bias),
    as the paper's boxes have it, with the same α at the start.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        head_dim: int,
        *,
        decay: str = "softplus",
        **layer: Unpack[LayerOptions],
    ) -> None:
        super().__init__(hidden_size, num_heads, head_dim, **layer)
        if decay not in ("softplus", "sigmoid"):
            raise ValueError(f"decay must be 'softplus' or 'sigmoid', got {decay!r}")
        self.decay = decay
        values = num_heads * self.value_dim
        self.f_proj = low_rank(hidden_size, self.value_dim, num_heads * head_dim)
        self.g_proj = low_rank(hidden_size, self.value_dim, values, bias=True)
        if decay == "softplus":
            self.A_log = nn.Parameter(torch.empty(num_heads))
        self.dt_bias = nn.Parameter(torch.empty(num_heads * head_dim))

    @torch.no_grad()
    def reset_parameters(self) -> None:
        last = self.g_proj[1]
        assert isinstance(last, nn.Linear)
        nn.init.zeros_(last.bias)
        a_log = self.A_log if self.decay == "softplus" else self.dt_bias.new_empty(self.num_heads)
        decay_parameters(a_log, self.dt_bias)
        if self.decay == "sigmoid":
            rate = a_log.exp()[:, None] * F.softplus(self.dt_bias).unflatten(0, (self.num_heads, -1))
            # log σ(b) = −rate, so softplus(−b) = rate
            self.dt_bias.copy_(-softplus_inverse(rate).flatten())

    def log_decay(self, x: Tensor) -> Tensor:
        """log α, [B, T, H, K], in at least float32."""
        f = self.by_head(self.f_proj(x))
        if self.decay == "softplus":
            return softplus_decay(f, self.A_log, self.dt_bias)
        return F.logsigmoid(f.to(state_dtype(x)) + self.dt_bias.view(f.shape[2:]))

    def gate(self, x: Tensor) -> Tensor:
        gate: Tensor = self.g_proj(x)
        return gate


class KDA(ChannelDecayMixer):
    """Kimi Delta Attention: a token's β against a decay per channel."""

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        head_dim: int,
        *,
        allow_neg_eigval: bool = False,
        **layer: Unpack[ChannelDecayOptions],
    ) -> None:
        super().__init__(hidden_size, num_heads, head_dim, **layer)
        self.allow_neg_eigval = allow_neg_eigval
        self.b_proj = Linear(hidden_size, num_heads, bias=False)
        self.reset_parameters()

    def write(self, x: Tensor, k: Tensor, v: Tensor) -> Write:
        beta = self.b_proj(x).sigmoid()[..., None]
        beta = 2 * beta if self.allow_neg_eigval else beta
        return Write(erase=k, value=v, log_decay=self.log_decay(x), gain=beta * k)


class GDN2(ChannelDecayMixer):
    """Gated DeltaNet 2: gates per channel on what is erased (b, on the key) and written (w, on the value)."""

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        head_dim: int,
        *,
        allow_neg_eigval: bool = False,
        **layer: Unpack[ChannelDecayOptions],
    ) -> None:
        super().__init__(hidden_size, num_heads, head_dim, **layer)
        self.allow_neg_eigval = allow_neg_eigval
        self.b_proj = Linear(hidden_size, num_heads * head_dim, bias=False)
        self.w_proj = Linear(hidden_size, num_heads * self.value_dim, bias=False)
        self.reset_parameters()

    def write(self, x: Tensor, k: Tensor, v: Tensor) -> Write:
        b = self.by_head(self.b_proj(x)).sigmoid()
        b = 2 * b if self.allow_neg_eigval else b
        w = self.by_head(self.w_proj(x)).sigmoid()
        return Write(erase=b * k, value=w * v, log_decay=self.log_decay(x), gain=k)
