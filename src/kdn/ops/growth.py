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
    product itself neither overflows nor vanishes.
    """
    batch, time, heads, width = k.shape
    state = torch.eye(width, device=k.device).expand(batch, heads, width, width).contiguous()
    log_norm = torch.zeros(batch, heads, dtype=torch.float64, device=k.device)
    base = state.norm(dim=(-2, -1))
    for start in range(0, time, every):
        piece = slice(start, start + every)
        nothing = k.new_zeros(*k[:, piece].shape)
        _, state = delta_memory(
            nothing,
            k[:, piece],
            nothing,
            gain[:, piece],
            None if log_decay is None else log_decay[:, piece],
            initial_state=state,
            backend=backend,
        )
        norm = state.norm(dim=(-2, -1))
        log_norm += (norm / base).log().double()
        state = state / norm[..., None, None]
        base = torch.ones_like(norm)
    return (log_norm / time).float()
