"""Kalman Delta Networks: linear-attention memory that carries its own uncertainty.

Start with `kdn.ops`: the three gains (how strongly to write) and the one memory (what is kept).
Importing `kdn` loads none of them, nor torch, until they are used.
"""

import importlib
from types import ModuleType

__version__ = "0.1.0.dev0"

_SUBPACKAGES = ("bench", "ops")


def __getattr__(name: str) -> ModuleType:
    if name in _SUBPACKAGES:
        return importlib.import_module(f"kdn.{name}")
    raise AttributeError(f"module 'kdn' has no attribute '{name}'")


def __dir__() -> list[str]:
    return ["__version__", *_SUBPACKAGES]
