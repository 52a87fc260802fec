"""One token at a time, states in place: what generation runs, once per token and layer.

The four operations do this too, with a call each and new states; here it is one call and no allocation where
the backend has a kernel for it.
"""

import torch
from torch import Tensor

from kdn.ops import checks, registry
from kdn.ops.interface import delta_memory, diagonal_gain, exact_gain, isotropic_gain

_GAINS = {"diagonal": diagonal_gain, "isotropic": isotropic_gain, "exact": exact_gain}


@torch.no_grad()
def decode(
    q: Tensor,
    k: Tensor | None,
    v: Tensor,
    log_decay: Tensor | None,
    *,
    state: Tensor,
    kind: str = "given",
    gain: Tensor | None = None,
    process_noise: Tensor | None = None,
    obs_noise: Tensor | None = None,
    info_scale: float | Tensor = 1.0,
    cov: Tensor | None = None,
    scale: float | None = None,
    out: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """Write and read one token of every sequence; `state` and `cov` are updated in place.

        gain_t = gain, or the Kalman gain of `kind` from k, process_noise, obs_noise and cov
        S ← (I − g kᵀ) D S + g vᵀ        returns τ Sᵀ q

    kind: "given" (with `gain`), "diagonal", "isotropic" or "exact" (with `process_noise`, `obs_noise` and
    `cov`). Shapes as in the four operations with T = 1; state: B H K V; cov as their initial_cov. `out`
    (B 1 H V) receives the result where given. No gradients.
    """
    if q.ndim == 4 and q.shape[1] != 1:
        raise ValueError(f"q must hold one token, [B, 1, H, K], got {list(q.shape)}")
    if kind != "given" and kind not in _GAINS:
        raise ValueError(f"kind must be given, diagonal, isotropic or exact, got {kind!r}")
    mu: Tensor | None = None
    if kind == "given":
        if gain is None:
            raise ValueError('gain must be a tensor with kind="given", got None')
        checks.memory_arguments(q, k, v, gain, log_decay, scale, state, None)
    else:
        if k is None or cov is None:
            raise ValueError(f"k and cov must be tensors with kind={kind!r}, got None")
        checks.gain_arguments(f"{kind}_gain", k, log_decay, process_noise, obs_noise, info_scale, cov, None)
        checks.memory_arguments(q, k, v, k, log_decay, scale, state, None)
        mu = checks.per_head(info_scale, q.shape[2], torch.float32, q.device)
    tau = q.shape[3] ** -0.5 if scale is None else float(scale)
    result = v.new_empty(v.shape) if out is None else out
    kernel = getattr(registry.choose(backend, q.device), "decode", None)
    # The kernel is not an operator that a graph could hold; the operations below are.
    if torch.compiler.is_compiling():
        kernel = None
    if kernel is not None and kernel(
        kind, q, k, v, log_decay, gain, process_noise, obs_noise, mu, cov, state, tau, result
    ):
        return result
    if kind != "given":
        assert k is not None and cov is not None
        assert process_noise is not None and obs_noise is not None
        gain, after = _GAINS[kind](
            k,
            log_decay,
            process_noise,
            obs_noise,
            info_scale=info_scale,
            initial_cov=cov,
            backend=backend,
        )
        cov.copy_(after)
    assert gain is not None
    read, after = delta_memory(q, k, v, gain, log_decay, scale=tau, initial_state=state, backend=backend)
    state.copy_(after)
    return result.copy_(read)
