"""What the memory knows: how strongly it writes, how sure it is of what it reads.

writes.py         effective writes kᵀg of every layer, head and token, while a model runs
uncertainty.py    those, the variance of every read and the norm of the state, for one layer
"""

from kdn.probe.uncertainty import of_layer
from kdn.probe.writes import effective_writes, gains_watched, info_scale_set

__all__ = ["effective_writes", "gains_watched", "info_scale_set", "of_layer"]
