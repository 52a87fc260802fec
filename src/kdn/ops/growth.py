"""How fast a memory with given gains can grow: the long-run growth of its transition products.

The contraction kᵀg of every single write lies in [0, 1), but (I − g kᵀ) is oblique when g is not along k,
and products of oblique factors can grow. `docs/growth.md` has measurements.
"""

import torch
from torch import Tensor

from kdn.ops.interface import delta_memory


@torch.no_grad()
def memory_growth(
    k: Tensor,
    gain: Tensor,
    log_decay: Tensor | None = None,
    *,
    every: int = 64,
    backend: str | None = None,
) -> Tensor:
    """Mean growth per token of log ‖S‖ when nothing new is written, for each batch row and head.

        γ = (1/T) log ‖ Π_t (I − g_t k_tᵀ) D_t ‖_F / ‖I‖_F

    k, gain: B T H K; log_decay as in `delta_memory`. Returns B H, float32. Below 0 the memory forgets;
    above 0 a state can grow as exp(γT). `every` tokens the state is brought back to norm 1, so that the
    product itself neither overflows nor vanishes; −inf says that it did become exactly zero.
    """
    if k.ndim != 4:
        raise ValueError(f"k must be [B, T, H, K], got {k.ndim} dimensions: {list(k.shape)}")
    if gain.shape != k.shape:
        raise ValueError(f"gain must be {list(k.shape)} as k, got {list(gain.shape)}")
    if every < 1:
        raise ValueError(f"every must be ≥ 1, got {every}")
    batch, time, heads, width = k.shape
    log_norm = torch.zeros(batch, heads, dtype=torch.float64, device=k.device)
    relative = None
    if log_decay is not None:
        if tuple(log_decay.shape) not in (tuple(k.shape), tuple(k.shape[:3])):
            raise ValueError(f"log_decay must be [B, T, H, K] or [B, T, H], got {list(log_decay.shape)}")
        channels = (log_decay if log_decay.ndim == 4 else log_decay[..., None]).double()
        # What all channels lose is added to the logarithm, so that the product cannot vanish by it.
        slowest = channels.amax(-1)
        log_norm += slowest.sum(1)
        relative = (channels - slowest[..., None]).expand(k.shape)
    state = torch.eye(width, dtype=torch.float64, device=k.device).expand(batch, heads, width, width)
    log_norm -= state.norm(dim=(-2, -1)).log()
    for start in range(0, time, every):
        piece = slice(start, start + every)
        nothing = torch.zeros_like(k[:, piece])
        _, state = delta_memory(
            nothing,
            k[:, piece],
            nothing,
            gain[:, piece],
            None if relative is None else relative[:, piece],
            initial_state=state,
            backend=backend,
        )
        norm = state.norm(dim=(-2, -1))
        log_norm += norm.log()
        state = state / norm.where(norm > 0, 1)[..., None, None]
    return (log_norm / time).float()
