"""What the four operations refuse, and the sentence they refuse it with.

Shapes, dtypes and devices are always checked. Values are checked where that costs next to nothing: all
of `cu_seqlens` and obs_noise on the CPU. The checks that read a whole [B, T, H, K] tensor, or wait for a
GPU, are switched on by KDN_CHECK=1. Inside `torch.compile` there are no values, so only shapes are seen.
A NaN is not an error: it stays in its own sequence.
"""

import os
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def gain_arguments(
    name: str,
    k: Tensor,
    log_decay: Tensor | None,
    process_noise: Tensor | None,
    obs_noise: Tensor | None,
    info_scale: object,
    initial_cov: Tensor | None,
    cu_seqlens: Tensor | None,
) -> None:
    """Raise on the first argument of a gain that does not fit the others."""
    _tensor("k", k, "[B, T, H, K]", rank=4)
    b, t, h, width = k.shape
    _nonempty("k", k)
    _decay(log_decay, (b, t, h, width))
    noise_shape = (b, t, h) if name == "isotropic_gain" else (b, t, h, width)
    _shape("process_noise", process_noise, noise_shape)
    _shape("obs_noise", obs_noise, (b, t, h))
    assert process_noise is not None and obs_noise is not None
    n = sequences(cu_seqlens, b, t)
    if initial_cov is not None:
        cov_shape = {
            "diagonal_gain": (n, h, width),
            "isotropic_gain": (n, h),
            "exact_gain": (n, h, width, width),
        }[name]
        _shape("initial_cov", initial_cov, cov_shape)
    if isinstance(info_scale, Tensor):
        _tensor("info_scale", info_scale, "broadcastable to [H]")
        size = info_scale.numel()
        if size not in (1, h) or (size != 1 and info_scale.shape[-1] != h):
            raise ValueError(f"info_scale must broadcast to [H] = [{h}], got shape {list(info_scale.shape)}")
    elif not isinstance(info_scale, (int, float)):
        got = type(info_scale).__name__
        raise TypeError(f"info_scale must be a number or a tensor broadcastable to [H], got {got}")
    elif not info_scale > 0:
        raise ValueError(f"info_scale must be > 0, got {info_scale}")
    _one_device(
        k=k,
        log_decay=log_decay,
        process_noise=process_noise,
        obs_noise=obs_noise,
        initial_cov=initial_cov,
        info_scale=info_scale if isinstance(info_scale, Tensor) else None,
    )
    _offsets_near(cu_seqlens, k)
    if not _has_values(k):
        return
    if thorough() or k.device.type == "cpu":
        _lower_bound("obs_noise", obs_noise, strict=True)
    if thorough():
        _lower_bound("process_noise", process_noise, strict=False)
        _decay_sign(log_decay)
        if isinstance(info_scale, Tensor):
            _lower_bound("info_scale", info_scale, strict=True)


def memory_arguments(
    q: Tensor,
    k: Tensor | None,
    v: Tensor,
    gain: Tensor,
    log_decay: Tensor | None,
    scale: float | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
) -> None:
    """Raise on the first argument of the memory that does not fit the others."""
    _tensor("q", q, "[B, T, H, K]", rank=4)
    b, t, h, width = q.shape
    _nonempty("q", q)
    _tensor("v", v, "[B, T, H, V]", rank=4)
    if v.shape[:3] != q.shape[:3]:
        raise ValueError(f"v must be [B, T, H, V] with B, T, H = {[b, t, h]} as in q, got {list(v.shape)}")
    _nonempty("v", v)
    if k is not None:
        _shape("k", k, (b, t, h, width))
    _shape("gain", gain, (b, t, h, width))
    _decay(log_decay, (b, t, h, width))
    if scale is not None and not isinstance(scale, (int, float)):
        raise TypeError(f"scale must be a number or None, got {type(scale).__name__}")
    n = sequences(cu_seqlens, b, t)
    if initial_state is not None:
        _shape("initial_state", initial_state, (n, h, width, v.shape[-1]))
    _one_device(q=q, k=k, v=v, gain=gain, log_decay=log_decay, initial_state=initial_state)
    _offsets_near(cu_seqlens, q)
    if thorough() and _has_values(q):
        _decay_sign(log_decay)


def per_head(info_scale: float | Tensor, heads: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A checked information scale as one number per head."""
    if isinstance(info_scale, Tensor):
        # The reshape drops leading 1s, so that (1, 1, H) works as broadcasting users expect.
        return info_scale.to(device=device, dtype=dtype).reshape(-1).expand(heads)
    return torch.full((heads,), float(info_scale), dtype=dtype, device=device)


def sequence_offsets(offsets: Sequence[int], time: int) -> None:
    """Raise unless the offsets start at 0, never fall, and end at `time`. Empty sequences are legal."""
    if offsets[0] != 0 or offsets[-1] != time:
        raise ValueError(
            f"cu_seqlens must start at 0 and end at T = {time}, got {offsets[0]} … {offsets[-1]}"
        )
    for i, (left, right) in enumerate(pairwise(offsets)):
        if right < left:
            raise ValueError(
                f"cu_seqlens must not decrease, got {left} then {right} at positions {i} and {i + 1}"
            )


def thorough() -> bool:
    """Whether the user asked for the checks that cost a pass over the data (KDN_CHECK=1)."""
    return os.environ.get("KDN_CHECK", "") not in ("", "0")


def _tensor(name: str, x: object, layout: str | tuple[int, ...], rank: int | None = None) -> None:
    # The layout is put into words only to complain: while compiling, sizes are symbols.
    if not isinstance(x, Tensor):
        said = layout if isinstance(layout, str) else list(layout)
        raise TypeError(f"{name} must be a tensor {said}, got {type(x).__name__}")
    if x.dtype not in _DTYPES:
        raise TypeError(
            f"{name} must be float16, bfloat16, float32 or float64, got {x.dtype}: "
            f"convert it with {name}.float()"
        )
    if rank is not None and x.ndim != rank:
        raise ValueError(f"{name} must be {layout}, got {x.ndim} dimensions: {list(x.shape)}")


def _shape(name: str, x: object, shape: tuple[int, ...]) -> None:
    _tensor(name, x, shape)
    assert isinstance(x, Tensor)
    if tuple(x.shape) != shape:
        raise ValueError(f"{name} must be {list(shape)} to fit the others, got {list(x.shape)}")


def _nonempty(name: str, x: Tensor) -> None:
    if 0 in x.shape:
        raise ValueError(f"{name} must not be empty, got {list(x.shape)}")


def _decay(log_decay: object, shape: tuple[int, ...]) -> None:
    if log_decay is None:
        return
    _tensor("log_decay", log_decay, shape)
    assert isinstance(log_decay, Tensor)
    if tuple(log_decay.shape) not in (shape, shape[:3]):
        raise ValueError(
            f"log_decay must be {list(shape)} (per channel) or {list(shape[:3])} (per head), "
            f"got {list(log_decay.shape)}"
        )


def sequences(cu_seqlens: object, batch: int, time: int) -> int:
    """Check `cu_seqlens` and return how many sequences there are."""
    if cu_seqlens is None:
        return batch
    if not isinstance(cu_seqlens, Tensor) or cu_seqlens.dtype not in (torch.int32, torch.int64):
        got = cu_seqlens.dtype if isinstance(cu_seqlens, Tensor) else type(cu_seqlens).__name__
        raise TypeError(f"cu_seqlens must be an int32 or int64 tensor, got {got}")
    if cu_seqlens.ndim != 1 or cu_seqlens.shape[0] < 2:
        raise ValueError(
            f"cu_seqlens must hold the N + 1 offsets of N ≥ 1 sequences, got shape {list(cu_seqlens.shape)}"
        )
    if batch != 1:
        raise ValueError(f"cu_seqlens packs all sequences into one row: B must be 1, got {batch}")
    if _has_values(cu_seqlens) and (thorough() or cu_seqlens.device.type == "cpu"):
        sequence_offsets(cu_seqlens.tolist(), time)
    return cu_seqlens.shape[0] - 1


def _one_device(**tensors: Tensor | None) -> None:
    first = next(iter(tensors))
    device = tensors[first].device  # type: ignore[union-attr]
    for name, x in tensors.items():
        if x is not None and x.device != device:
            raise ValueError(f"{name} is on {x.device}, {first} on {device}: move it there")


def _offsets_near(cu_seqlens: Tensor | None, x: Tensor) -> None:
    """The offsets may stay on the CPU, where reading them waits for nobody."""
    if cu_seqlens is not None and cu_seqlens.device not in (x.device, torch.device("cpu")):
        raise ValueError(f"cu_seqlens is on {cu_seqlens.device}, the inputs on {x.device}: move it there")


def _has_values(x: Tensor) -> bool:
    """False while compiling or tracing with shapes only."""
    if torch.compiler.is_compiling() or x.device.type == "meta":
        return False
    return type(x) in (Tensor, torch.nn.Parameter)


def _lower_bound(name: str, x: Tensor, *, strict: bool) -> None:
    lowest = float(x.detach().min())
    if lowest != lowest:  # a NaN hides the others, which are this check's business
        lowest = float(x.detach().nan_to_num(nan=float("inf"), posinf=float("inf")).min())
    if lowest < 0 or (strict and lowest == 0):
        raise ValueError(f"{name} must be {'>' if strict else '≥'} 0, got min {lowest:.3g}")


def _decay_sign(log_decay: Tensor | None) -> None:
    if log_decay is None:
        return
    known = log_decay.detach().nan_to_num(nan=-1.0, posinf=float("inf"), neginf=-float("inf"))
    if float(known.max()) > 0:
        raise ValueError(f"log_decay must be ≤ 0 (it is log α), got max {float(known.max()):.3g}")
    if float(known.min()) == -float("inf"):
        raise ValueError("log_decay must be finite, got -inf: use a large negative number")
