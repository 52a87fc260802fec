"""One token: gain and memory in one call of `kdn_decode`, states in place."""

import torch
from torch import Tensor

from kdn.ops.backends.cpu.library import Decode, Described, call, served

_KINDS = {"given": 0, "diagonal": 1, "isotropic": 2}


def decode(
    kind: str,
    q: Tensor,
    k: Tensor | None,
    v: Tensor,
    log_decay: Tensor | None,
    gain: Tensor | None,
    process_noise: Tensor | None,
    obs_noise: Tensor | None,
    mu: Tensor | None,
    cov: Tensor | None,
    state: Tensor,
    scale: float,
    out: Tensor,
) -> bool:
    """Whether it could be done: the kernel wants contiguous float32 states and types it knows."""
    states = [x for x in (cov, state) if x is not None]
    if kind not in _KINDS or not served(q, k, v, log_decay, gain, process_noise, obs_noise, out):
        return False
    if any(x.dtype != torch.float32 or not x.is_contiguous() for x in states):
        return False
    to = Described()
    call(
        "kdn_decode",
        Decode(
            count=q.shape[0],
            heads=q.shape[2],
            key=q.shape[3],
            value=v.shape[3],
            q=to.rows(q),
            k=to.rows(k),
            v=to.rows(v),
            decay=to.rows(log_decay),
            kind=_KINDS[kind],
            gain=to.rows(gain),
            noise=to.rows(process_noise),
            obs=to.rows(obs_noise),
            info_scale=to.plain(mu),
            cov=None if cov is None else cov.data_ptr(),
            state=state.data_ptr(),
            scale=scale,
            out=to.rows(out),
        ),
    )
    return True
