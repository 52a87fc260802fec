"""Kalman Delta Networks: linear-attention memory that carries its own uncertainty.

    kdn.ops       the three gains (how strongly to write) and the one memory (what is kept)
    kdn.mixers    the layers, for your own networks
    kdn.models    language models of Hugging Face's kind; KDNConfig, KDNModel, KDNForCausalLM
    kdn.probe     what the memory knows

Importing `kdn` loads none of them, nor torch, until they are used. It makes transformers' Auto classes
know the models: `import transformers, kdn; transformers.AutoModelForCausalLM.from_pretrained(folder)`.
"""

import importlib
from typing import Any

from kdn import _register

__version__ = "0.1.0.dev0"

_SUBPACKAGES = ("bench", "mixers", "models", "ops", "probe")
_MODELS = ("KDNCache", "KDNConfig", "KDNForCausalLM", "KDNModel")


def __getattr__(name: str) -> Any:
    if name in _SUBPACKAGES:
        return importlib.import_module(f"kdn.{name}")
    if name in _MODELS:
        return getattr(importlib.import_module("kdn.models"), name)
    raise AttributeError(f"module 'kdn' has no attribute '{name}'")


def __dir__() -> list[str]:
    return ["__version__", *_SUBPACKAGES, *_MODELS]


_register.register()
