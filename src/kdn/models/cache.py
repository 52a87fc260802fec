"""The states of all layers of a model, after the tokens that were read so far.

Recurrent layers have states of constant size, attention layers as many keys as their window. A cache is what
`generate` carries from token to token, and what a prompt can be kept as in a file:

    model(prompt, past_key_values=(cache := KDNCache()))
    cache.save("prompt.safetensors");    cache = KDNCache.load("prompt.safetensors")
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from kdn.mixers import AttentionState, DeltaState, Mamba3State

__all__ = ["KDNCache"]

_STATES: dict[str, Any] = {cls.__name__: cls for cls in (AttentionState, DeltaState, Mamba3State)}


def _map(state: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """A state with every tensor in it changed."""
    if state is None:
        return None
    if isinstance(state, Tensor):
        return change(state)
    fields = [_map(x, change) for x in state]
    return type(state)(*fields) if hasattr(state, "_fields") else tuple(fields)


def _flat(state: Any, name: str) -> dict[str, Tensor]:
    if state is None:
        return {}
    if isinstance(state, Tensor):
        return {name: state}
    keys = state._fields if hasattr(state, "_fields") else range(len(state))
    found: dict[str, Tensor] = {}
    for key, x in zip(keys, state, strict=True):
        found |= _flat(x, f"{name}.{key}")
    return found


class KDNCache(Cache):
    """One state per layer, and how many tokens (padding included) were read."""

    is_compileable = False

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.states: list[NamedTuple | None] = []
        self.tokens = 0

    def __len__(self) -> int:
        return len(self.states)

    def __repr__(self) -> str:
        return f"KDNCache({len(self.states)} layers, {self.tokens} tokens, {self.nbytes():,} bytes)"

    def state(self, layer: int) -> Any:
        return self.states[layer] if layer < len(self.states) else None

    def put(self, states: list[Any], tokens: int) -> None:
        """All layers' states after `tokens` more tokens."""
        self.states, self.tokens = states, self.tokens + tokens

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.tokens

    def get_max_length(self, layer_idx: int = 0) -> int:
        return -1

    @property
    def batch_size(self) -> int:
        """−1 before the first token."""
        return next((len(x) for s in self.states for x in _flat(s, "").values()), -1)

    @property
    def is_croppable(self) -> bool:
        return False

    def nbytes(self) -> int:
        return sum(x.nbytes for i, s in enumerate(self.states) for x in _flat(s, str(i)).values())

    def change(self, change: Callable[[Tensor], Tensor]) -> None:
        self.states = [_map(state, change) for state in self.states]

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.change(lambda x: x.index_select(0, beam_idx.to(x.device)))

    def batch_select_indices(self, indices: Tensor) -> None:
        self.change(lambda x: x[indices.to(x.device)])

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.change(lambda x: x.repeat_interleave(repeats, 0))

    def __deepcopy__(self, memo: dict[int, Any]) -> "KDNCache":
        """A branch. Copies states that have gradients too, which PyTorch's deepcopy does not."""
        copy = KDNCache()
        copy.put(self.states, self.tokens)
        copy.change(Tensor.clone)
        return copy

    def reset(self) -> None:
        self.states, self.tokens = [], 0

    def crop(self, max_length: int) -> None:
        raise ValueError(
            "a recurrent state cannot go back: keep a copy of the cache (copy.deepcopy) instead of crop"
        )

    def to(self, device: torch.device | str) -> "KDNCache":
        self.change(lambda x: x.to(device))
        return self

    def save(self, file: str | Path) -> None:
        """Write the states as a safetensors file."""
        from safetensors.torch import save_file

        tensors: dict[str, Tensor] = {}
        kinds = []
        for i, state in enumerate(self.states):
            kinds.append(type(state).__name__)
            tensors |= {name: x.contiguous() for name, x in _flat(state, str(i)).items()}
        about = {"kdn-cache": json.dumps({"tokens": self.tokens, "states": kinds})}
        save_file(tensors, str(file), metadata=about)

    @classmethod
    def load(cls, file: str | Path, device: torch.device | str = "cpu") -> "KDNCache":
        """Read what `save` wrote."""
        from safetensors import SafetensorError, safe_open

        problem = f"{file} is not a cache that was saved by KDNCache.save"
        try:
            with safe_open(str(file), framework="pt", device=str(device)) as opened:
                about = (opened.metadata() or {}).get("kdn-cache")
                tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        except SafetensorError as error:
            raise ValueError(f"{problem}: {error}") from None
        if about is None:
            raise ValueError(f"{problem}: it has other contents")
        cache = cls()
        try:
            read = json.loads(about)
            cache.tokens = int(read["tokens"])
            kinds = [_STATES[name] for name in read["states"]]
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{problem} of this version: its description does not fit ({error!r})") from None
        cache.states = [_build(kind, tensors, str(i)) for i, kind in enumerate(kinds)]
        return cache


def _build(kind: Any, tensors: dict[str, Tensor], name: str) -> Any:
    fields = []
    for field in kind._fields:
        whole = tensors.get(f"{name}.{field}")
        if whole is None:
            parts = [tensors[at] for j in range(3) if (at := f"{name}.{field}.{j}") in tensors]
            whole = tuple(parts) or None  # type: ignore[assignment]
        fields.append(whole)
    return kind(*fields)
