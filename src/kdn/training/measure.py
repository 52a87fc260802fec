"""What is measured while a model trains, beside its loss: arithmetic, memory, and what its layers' memories do."""

import math
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from kdn.models.modeling import KDNForCausalLM
from kdn.probe.writes import gains_watched
from kdn.training.parallel import Ranks
from kdn.training.recipe import Recipe

__all__ = ["Clock", "MemoryWatch", "flops_per_token", "matmul_peak", "peak_memory"]


class MemoryWatch:
    """Effective writes kᵀg and norms of final memory states, of all that `model` computes while it is `open`.

    The norm is a head's Frobenius norm. Only the gain of some systems is sure to contract a memory (docs/growth.md), so
    a run should see its states grow before its loss does.
    """

    def __init__(self) -> None:
        self.writes: list[Tensor] = []
        self.norms: list[Tensor] = []

    @contextmanager
    def open(self, model: KDNForCausalLM) -> Iterator[None]:
        def seen(module: nn.Module, arguments: Any, output: Any) -> None:
            memory = getattr(output[1], "memory", None)  # attention has none
            if memory is not None:
                self.norms.append(memory.detach().float().flatten(2).norm(dim=-1).mean())

        layers: Any = model.model.layers
        with ExitStack() as stack:
            stack.enter_context(gains_watched(model, lambda _, x: self.writes.append(x.mean())))
            for layer in layers:
                stack.callback(layer.mixer.register_forward_hook(seen).remove)
            yield

    def numbers(self) -> dict[str, float]:
        """Means over layers, heads and tokens; without what no layer has."""
        found = {"effective write": self.writes, "state norm": self.norms}
        return {name: float(torch.stack(x).mean()) for name, x in found.items() if x}


class Clock:
    """Speed, in what users compare: tokens per second, and the share of what matrix products alone would reach."""

    def __init__(self, model: KDNForCausalLM, recipe: Recipe, ranks: Ranks, step: int) -> None:
        self.batch_tokens, self.device = recipe.train.batch_tokens, ranks.device
        dtype = torch.bfloat16 if recipe.train.dtype == "bfloat16" else torch.float32
        # A backward pass is two forward passes of arithmetic.
        self.tokens_at_peak = matmul_peak(dtype, ranks.device) * ranks.world / (3 * flops_per_token(model))
        self.began = self.last = time.perf_counter()
        self.first_step = self.last_step = step

    def numbers(self, step: int) -> dict[str, float]:
        """Since they were asked for last."""
        now = time.perf_counter()
        seconds = (now - self.last) / (step - self.last_step)
        self.last, self.last_step = now, step
        rate = self.batch_tokens / seconds
        return {
            "tokens": step * self.batch_tokens,
            "tokens/s": rate,
            "seconds per step": seconds,
            "MFU": rate / self.tokens_at_peak,
            "memory GiB": peak_memory(self.device),
        }

    def tokens_per_second(self, step: int) -> float:
        seconds = max(1e-9, time.perf_counter() - self.began)
        return (step - self.first_step) * self.batch_tokens / seconds


def flops_per_token(model: KDNForCausalLM) -> float:
    """Forward: matrices with their input, mixers by their own count. Sharded or not, shapes are whole."""
    layers: Any = model.model.layers
    matrices = sum(p.numel() for p in layers.parameters() if p.ndim == 2)
    head = model.config.vocab_size * model.config.hidden_size
    return 2.0 * (matrices + head) + sum(float(layer.mixer.flops_per_token()) for layer in layers)


def matmul_peak(dtype: torch.dtype, device: torch.device) -> float:
    """Flop/s of a large matrix product here: what MFU is a share of."""
    n = 1024 if device.type == "cpu" else 8192
    a = torch.ones(n, n, dtype=dtype, device=device)
    seconds = math.inf
    for _ in range(4):
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        (a @ a)[0, 0].item()
        seconds = min(seconds, time.perf_counter() - start)
    return 2 * n**3 / seconds


def peak_memory(device: torch.device) -> float:
    """The most this process held so far, in GiB."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated() / 2**30
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**30 if sys.platform == "darwin" else 2**20)
