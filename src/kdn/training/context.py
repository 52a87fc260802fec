"""Context parallelism: W ranks hold consecutive pieces of every sequence, x_local [B, T/W, d].

    context_parallel(model, group)                          once, after building the model
    loss = model(ids, targets=targets, num_items_in_batch=all_targets).loss      this rank's pieces, its share

Targets come shifted (`targets[t]` is the token after `ids[t]`): the last token of a piece has its target in
the next one. Pieces have one length, and follow the order of the ranks.

A recurrent layer needs from its left neighbours only the state that enters its piece, and a piece acts on a
state by a map whose size does not depend on its length. So each rank computes the map of its own piece, all
ranks gather all maps, and each composes those before it:

    short convolution    the last conv_size − 1 layer inputs before the piece                    (halo)
    gain, p ↦ p'         p' = (m₀₀ p + m₀₁)/(m₁₀ p + m₁₁): one 2×2 matrix per channel or head    (Möbius)
    memory, S ↦ S'       S' = A S + B: K×K and K×V per head                                      (affine)
    window attention     the window − 1 layer inputs before the piece                            (halo)

The number of collectives and of bytes per layer is the same for every T. What a piece would have read from
the state before it is added to its own outputs, o_t = o_t' + S_inᵀ (τ A_tᵀ q_t), where A_t is A up to token t.
A and every τ A_tᵀ q_t come out of the memory operation itself, as K more columns of values (all zero) whose
state starts as the identity: [v | 0] from [0 | I] ends in [B | A].

Everything is differentiable. Parameters get each rank's share of the gradient: the sum over the ranks is the
gradient of the summed losses. Models stay as they are but for the `forward` of their mixers; what works
token by token (norms, SwiGLU, embeddings, head) needs nothing.
"""

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from kdn.mixers import MIXERS
from kdn.mixers.attention import Attention, AttentionState, rotate
from kdn.mixers.delta import DeltaMixer, DeltaState, Write
from kdn.mixers.kalman import ExactKDN, KalmanMixer
from kdn.ops import delta_memory
from kdn.ops.checks import per_head
from kdn.ops.precision import state_dtype, without_autocast

__all__ = ["Context", "context_parallel"]


# Renamed in PyTorch 2.13.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Context:
    """The ranks that share a sequence, and what they have sent to each other so far."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self.calls = 0  # collectives, those of the backward pass included
        self.bytes_sent = 0  # by this rank

    def gather(self, x: Tensor) -> Tensor:
        """Every rank's x (of one shape), [W, *x.shape]. Its gradient is summed over the ranks.

        What is made of the result must depend on it by autograd even on ranks whose value it does not change
        (the first): the backward pass is a collective too, and every rank must come to it.
        """
        gathered: Tensor = _Gather.apply(x, self)
        return gathered

    def halo(self, x: Tensor, tokens: int) -> Tensor:
        """The inputs before this piece, [B, tokens, d] from [B, T/W, d]; zeros before the sequence's start.

        Pieces may be shorter than that: then it reaches over several of them.
        """
        if tokens == 0:
            return x[:, :0]
        tail = min(tokens, x.shape[1])
        tails = self.gather(x[:, -tail:]).transpose(0, 1).flatten(1, 2)
        return F.pad(tails, (0, 0, tokens, 0))[:, self.rank * tail : self.rank * tail + tokens]

    def count(self, x: Tensor) -> None:
        """One collective in which every rank sends a piece of x's size to each of the others."""
        self.calls += 1
        self.bytes_sent += (self.size - 1) * x.numel() * x.element_size()


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, context: Context) -> Tensor:
        ctx.context = context
        gathered = x.new_empty(context.size, *x.shape)
        _all_gather(gathered.view(-1), x.reshape(-1), group=context.group)
        context.count(x)
        return gathered

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (d_gathered,) = grads
        own = torch.empty_like(d_gathered[0], memory_format=torch.contiguous_format)
        _reduce_scatter(own.view(-1), d_gathered.reshape(-1), group=ctx.context.group)
        ctx.context.count(own)
        return own, None


def context_parallel(model: nn.Module, group: dist.ProcessGroup | None = None) -> Context:
    """Make `model` (in place) compute on pieces of sequences, one per rank of `group` (None: all ranks).

    The states that layers return are those after the rank's own piece; the last rank's is the sequence's.
    Raises ValueError, before anything is changed, for layers that cannot be cut: kdn-exact, Mamba-3, and
    attention without a window.
    """
    context = Context(group)
    kinds = tuple(MIXERS.values())
    found: list[tuple[str, Any]] = [(name, m) for name, m in model.named_modules() if isinstance(m, kinds)]
    for name, mixer in found:
        why = _obstacle(mixer)
        if why is not None:
            raise ValueError(f"{name} ({type(mixer).__name__}) cannot be context-parallel: {why}")
    for _, mixer in found:
        forward = _attention if isinstance(mixer, Attention) else _delta
        mixer.forward = partial(forward, mixer, context)
    return context


def _obstacle(mixer: nn.Module) -> str | None:
    if isinstance(mixer, ExactKDN):
        return "the exact gain is sequential, a piece has no summary that a later one could start from"
    if isinstance(mixer, Attention):
        return None if mixer.window is not None else "without a window every key would have to be sent"
    return None if isinstance(mixer, DeltaMixer) else "Mamba-3 is not supported yet"


def _fresh_start(state: Any, cu_seqlens: Tensor | None) -> None:
    if cu_seqlens is not None:
        raise ValueError(
            "context-parallel layers take one sequence per row, no cu_seqlens (packing, padding)"
        )
    if state is not None:
        raise ValueError("context-parallel layers start where the sequence does: pass no state")


# --- delta-rule layers ---


def _delta(
    mixer: DeltaMixer, context: Context, x: Tensor, state: Any = None, cu_seqlens: Tensor | None = None
) -> tuple[Tensor, DeltaState]:
    """`DeltaMixer.forward` over this rank's piece."""
    _fresh_start(state, cu_seqlens)
    start = DeltaState(x.new_empty(x.shape[0]), None, None)  # a memory that nobody reads
    if mixer.conv_size > 1:
        halo = context.halo(x, mixer.conv_size - 1)
        start = start._replace(conv=(mixer.q_proj(halo), mixer.k_proj(halo), mixer.v_proj(halo)))
    q, k, v, conv = mixer.queries_keys_values(x, start)
    w = mixer.write(x, k, v)
    if isinstance(mixer, KalmanMixer):
        start = start._replace(cov=_entering_cov(mixer, context, k, w))
    gain, cov = mixer.gain(k, w, start)
    out, memory = _memory(context, q, w.erase, w.value, gain, w.log_decay)
    return mixer.read_out(x, out), DeltaState(memory, cov, conv)


def _entering_cov(mixer: KalmanMixer, context: Context, k: Tensor, w: Write) -> Tensor:
    """The covariance that enters this rank's piece, [B, H, K] or [B, H]."""
    diagonal = mixer.kalman == "diagonal"
    # A level of the tree is as large as the gain's inputs: made again in the backward pass, none is kept.
    summary = checkpoint(
        gain_summary,
        k,
        w.log_decay,
        w.process_noise,
        w.obs_noise,
        mixer.mu(),
        diagonal,
        use_reentrant=False,
        preserve_rng_state=False,
    )
    first = mixer.first_cov(k.shape[0]).to(summary.dtype)
    cov = compose_gain(first if diagonal else first[..., None], context.gather(summary), context.rank)
    return cov if diagonal else cov[..., 0]


@without_autocast
def gain_summary(
    k: Tensor, log_decay: Tensor, process_noise: Tensor, obs_noise: Tensor, mu: float | Tensor, diagonal: bool
) -> Tensor:
    """The matrix of the piece's Möbius map, [2, 2, B, H, X]: X is K for diagonal, 1 for isotropic.

    One token maps p to n/d with (n, d) = M (p, 1), M = [[a, ω], [u a, 1 + u ω]], a = α² (isotropic: its mean)
    and u = μ k²/r (its mean). The product of all M is taken in pairs, then pairs of pairs, and so on.
    """
    dtype = state_dtype(k, log_decay, process_noise, obs_noise, mu)
    a, e = (2 * log_decay.to(dtype)).exp(), k.to(dtype).square()
    w, r = process_noise.to(dtype), obs_noise.to(dtype)[..., None]
    if not diagonal:
        a, e, w = a.mean(-1, keepdim=True), e.mean(-1, keepdim=True), w[..., None]
    u = per_head(mu, k.shape[2], dtype, k.device)[:, None] * e / r
    matrices = torch.stack([torch.stack([a, w]), torch.stack([u * a, 1 + u * w])])
    while matrices.shape[3] > 1:
        odd = matrices[:, :, :, matrices.shape[3] // 2 * 2 :]
        earlier, later = matrices[:, :, :, : matrices.shape[3] // 2 * 2].unflatten(3, (-1, 2)).unbind(4)
        product = later[:, 0, None] * earlier[0] + later[:, 1, None] * earlier[1]
        # Homogeneous: the scale means nothing, so it needs no gradient, and it must not overflow.
        matrices = torch.cat([product / product.detach().amax((0, 1)), odd], 3)
    return matrices[:, :, :, 0]


@without_autocast
def compose_gain(first: Tensor, summaries: Tensor, rank: int) -> Tensor:
    """The covariance after the pieces before `rank`: first [B, H, X], summaries [W, 2, 2, B, H, X]."""
    n = first + summaries[:0].sum((0, 1, 2))  # + 0, which ties rank 0 to the collective
    d = torch.ones_like(n)
    for m in summaries[:rank]:
        n, d = m[0, 0] * n + m[0, 1] * d, m[1, 0] * n + m[1, 1] * d
        largest = torch.maximum(n, d).detach()
        n, d = n / largest, d / largest
    return n / d


def _memory(
    context: Context, q: Tensor, k: Tensor | None, v: Tensor, gain: Tensor, log_decay: Tensor | None
) -> tuple[Tensor, Tensor]:
    """`delta_memory` over this rank's piece: outputs, and the state after it."""
    keys, values = q.shape[-1], v.shape[-1]
    start = torch.eye(keys, dtype=state_dtype(q, k, v, gain, log_decay), device=q.device)
    start = F.pad(start, (values, 0)).expand(q.shape[0], q.shape[2], -1, -1)
    out, affine = delta_memory(q, k, F.pad(v, (0, keys)), gain, log_decay, initial_state=start)
    entering = compose_memory(context.gather(affine), context.rank)
    return _apply_state(out, affine, entering)


@without_autocast
def compose_memory(affine: Tensor, rank: int) -> Tensor:
    """The state after the pieces before `rank`: [B, H, K, V] from their [B | A], [W, B, H, K, V + K]."""
    keys = affine.shape[-2]
    b, a = affine.split([affine.shape[-1] - keys, keys], -1)
    state = b[:0].sum(0)  # 0, tied to the collective
    for w in range(rank):
        state = a[w] @ state + b[w]
    return state


@without_autocast
def _apply_state(out: Tensor, affine: Tensor, entering: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs and final state from those of an empty start: [o' | τ A_tᵀ q_t], [B | A] and S_in."""
    keys, values = entering.shape[-2:]
    own, seen = out.split([values, keys], -1)
    b, a = affine.split([values, keys], -1)
    earlier = (seen.to(entering.dtype).transpose(1, 2) @ entering).transpose(1, 2)
    return (own + earlier).to(out.dtype), a @ entering + b


# --- attention in a window ---


def _attention(
    mixer: Attention, context: Context, x: Tensor, state: Any = None, cu_seqlens: Tensor | None = None
) -> tuple[Tensor, AttentionState]:
    """`Attention.forward` over this rank's piece.

    Layer inputs are sent rather than keys and values: half the bytes, for projecting window − 1 tokens again.
    """
    _fresh_start(state, cu_seqlens)
    assert mixer.window is not None
    halo = context.halo(x, mixer.window - 1)
    heads = (mixer.num_heads, mixer.head_dim)
    k, v = mixer.k_proj(halo).unflatten(-1, heads), mixer.v_proj(halo).unflatten(-1, heads)
    position = context.rank * x.shape[1]
    # Positions before 0 belong to padding, which the state's position hides.
    at = torch.arange(position - halo.shape[1], position, device=x.device)
    _, k = rotate(k, k, at[None], mixer.frequency)
    before = AttentionState(k, v, torch.full((x.shape[0],), position, device=x.device))
    return type(mixer).forward(mixer, x, before)
