"""The paper's chunkwise algorithm in plain PyTorch: runs anywhere PyTorch runs.

    layout.py   how tokens become chunks
    gain.py     the Möbius gain scan: diagonal and isotropic
    exact.py    the dense filter, which has no chunk form and runs token by token
    memory.py   the compact-WY memory; products.py, its decayed triangular products

Every operation is a `torch.library` operator with a hand-written backward pass, so `torch.compile` sees
one node and autograd keeps only what the gradient needs.
"""

import torch

from kdn.ops.backends.torch.exact import exact_gain
from kdn.ops.backends.torch.gain import diagonal_gain, isotropic_gain
from kdn.ops.backends.torch.memory import delta_memory

RANK = 10

__all__ = ["delta_memory", "diagonal_gain", "exact_gain", "isotropic_gain", "unavailable"]


def unavailable(device: torch.device) -> str | None:
    return None
