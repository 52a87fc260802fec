"""C++ kernels for CPUs: the recurrences themselves, with the state in the processor's caches.

    library.py   finds and loads the compiled kernels (`kdn/ops/native`), describes tensors to them
    gain.py      the three gains
    memory.py    the memory
    decode.py    one token of both, in place
    layer.py     what stands around the memory in a model

The kernels take float32 and bfloat16. Other inputs are handed to the `torch` backend.
"""

import torch

from kdn.ops.backends.cpu.decode import decode
from kdn.ops.backends.cpu.gain import diagonal_gain, exact_gain, isotropic_gain
from kdn.ops.backends.cpu.layer import (
    linear_of_row,
    rms_norm,
    short_convolution,
    softmax_loss_,
    softplus_decay,
    swiglu,
)
from kdn.ops.backends.cpu.library import LIBRARY, fma_peak, instruction_set
from kdn.ops.backends.cpu.memory import delta_memory

RANK = 20

__all__ = [
    "decode",
    "delta_memory",
    "diagonal_gain",
    "exact_gain",
    "fma_peak",
    "instruction_set",
    "isotropic_gain",
    "linear_of_row",
    "rms_norm",
    "short_convolution",
    "softmax_loss_",
    "softplus_decay",
    "swiglu",
    "unavailable",
]


def unavailable(device: torch.device) -> str | None:
    if device.type != "cpu":
        return "its kernels run on CPUs only"
    return LIBRARY if isinstance(LIBRARY, str) else None
