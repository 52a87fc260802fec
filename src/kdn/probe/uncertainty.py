"""What one layer's memory knows at every token.

    effective write   kᵀg
    read variance     τ² qᵀ P q, with P the covariance after the token's own evidence
    state norm        ‖S‖ after the token; computed token by token

Layers without uncertainty (KDA and the other baselines) have no read variance: NaN there. Layers without a
delta-rule memory have NaN everywhere.
"""

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from kdn.mixers.delta import DeltaMixer
from kdn.mixers.kalman import KalmanMixer
from kdn.ops import decode
from kdn.ops.precision import state_dtype

__all__ = ["of_layer"]


@torch.no_grad()
def of_layer(
    mixer: nn.Module, x: Tensor, state: Any = None, cu_seqlens: Tensor | None = None, heads: int | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """(effective write, read variance, state norm), each [B, T, H] float32, for the layer's input x."""
    shape = (*x.shape[:2], heads or getattr(mixer, "num_heads", 1))
    unknown = x.new_full(shape, float("nan"), dtype=torch.float32)
    if not isinstance(mixer, DeltaMixer):
        return unknown, unknown, unknown
    q, k, v, _ = mixer.queries_keys_values(x, state, cu_seqlens)
    w = mixer.write(x, k, v)
    variance = unknown
    if isinstance(mixer, KalmanMixer):
        gain, _, prior = mixer.gain_and_prior(k, w, state, cu_seqlens)
        assert w.obs_noise is not None
        variance = _read_variance(mixer, q.float(), k.float(), w.obs_noise.float(), prior)
    else:
        gain, _ = mixer.gain(k, w, state, cu_seqlens)
    nothing = torch.zeros(gain.shape[:3], device=x.device)
    write = nothing if w.erase is None else (w.erase.float() * gain.float()).sum(-1)

    memory = None if state is None else state.memory
    parts = [(slice(None), memory)]
    if cu_seqlens is not None:
        ends = cu_seqlens.tolist()
        parts = [
            (slice(a, b), None if memory is None else memory[i : i + 1])
            for i, (a, b) in enumerate(pairwise(ends))
        ]
    norms = []
    for part, start in parts:
        erase, decay = (None if y is None else y[:, part] for y in (w.erase, w.log_decay))
        norms.append(_state_norms(q[:, part], erase, w.value[:, part], gain[:, part], decay, start))
    return write, variance, torch.cat(norms, 1)


def _read_variance(mixer: KalmanMixer, q: Tensor, k: Tensor, r: Tensor, prior: Tensor) -> Tensor:
    """τ² qᵀ P q, from the covariance P̂ before the token's evidence."""
    mu, width = mixer.mu(), q.shape[-1]
    if mixer.kalman == "diagonal":
        after = prior / (1 + (mu / r)[..., None] * k.square() * prior)
        variance = (q.square() * after).sum(-1)
    elif mixer.kalman == "isotropic":
        after = prior / (1 + mu / r * k.square().sum(-1) / width * prior)
        variance = q.square().sum(-1) * after
    else:
        seen = (prior @ k[..., None])[..., 0]
        information = mu / (r + mu * (k * seen).sum(-1))
        before = (q[..., None, :] @ prior @ q[..., None])[..., 0, 0]
        # Nearly equal where q has just been written: rounding must not make the difference negative.
        variance = (before - (q * seen).sum(-1).square() * information).clamp_min(0)
    return variance / width  # τ² = 1/K


def _state_norms(
    q: Tensor, k: Tensor | None, v: Tensor, gain: Tensor, log_decay: Tensor | None, start: Tensor | None
) -> Tensor:
    """‖S_t‖ of every token, [B, T, H]."""
    batch, time, heads, width = q.shape
    shape = (batch, heads, width, v.shape[3])
    wide = state_dtype(q, v, gain)
    state = q.new_zeros(shape, dtype=wide) if start is None else start.to(wide, copy=True)
    norms = q.new_empty(batch, time, heads, dtype=torch.float32)
    for t in range(time):
        at = slice(t, t + 1)
        decode(
            q[:, at],
            None if k is None else k[:, at],
            v[:, at],
            None if log_decay is None else log_decay[:, at],
            state=state,
            gain=gain[:, at],
        )
        norms[:, t] = state.flatten(2).norm(dim=-1)
    return norms
