"""The four operations that every system in this package is made of.

    gain, cov  = diagonal_gain(k, log_decay, process_noise, obs_noise)     one variance per channel
    gain, cov  = isotropic_gain(...)                                       one variance per head
    gain, cov  = exact_gain(...)                                           the full covariance
    out, state = delta_memory(q, k, v, gain, log_decay)                    the memory they write to

`interface.py` holds the public functions and their contracts, `backends/` one module for each way of
computing them. `decode` is one token of a gain and the memory with the states in place; `memory_growth`
measures how fast a memory with given gains can grow.
"""

from kdn.ops.decode import decode
from kdn.ops.growth import memory_growth
from kdn.ops.interface import delta_memory, diagonal_gain, exact_gain, isotropic_gain
from kdn.ops.registry import backend_report

__all__ = [
    "backend_report",
    "decode",
    "delta_memory",
    "diagonal_gain",
    "exact_gain",
    "isotropic_gain",
    "memory_growth",
]
