"""Decoding on a CPU: tokens/s of a preset beside what memory allows, and beside a transformer at 16k context.

    python benchmarks/decode.py
    python benchmarks/decode.py kdn-isotropic-125m --dtype bfloat16 --rounds 9

One sequence, greedy, token by token through the models' forward passes; all in one process, taking turns round
by round, medians over rounds. What they are compared with:

    memory       a token reads every weight once, so it takes at least their bytes over the bandwidth. That is
                 measured here, on as many bytes as the model has: the fastest of a sum, a dot product and a product
                 of matrix and vector. Bar: 60% of that rate.
    transformer  transformers' LlamaForCausalLM with as many parameters in its blocks, 16,384 random tokens' keys
                 and values in its cache, the faster of its growing and its preallocated cache. Bar: twice its rate.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, StaticCache

from kdn import KDNCache, KDNConfig, KDNForCausalLM
from kdn.bench.machine import machine, versions
from kdn.models.presets import preset

CONTEXT = 16_384
OF_BANDWIDTH, OF_TRANSFORMER = 0.6, 2.0  # the bars


def weight_bytes(model: nn.Module) -> int:
    """Of all weights, tied ones once."""
    return sum(x.nbytes for x in model.parameters())


def block_parameters(model: Any) -> int:
    return sum(x.numel() for x in model.model.layers.parameters())


def transformer(config: KDNConfig, name: str) -> LlamaForCausalLM:
    """A Llama of the sizes of our attention preset at that scale, whose blocks have as many parameters."""
    width = preset(f"attention-{name.rpartition('-')[2]}").intermediate_size
    sizes = LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=width,
        num_hidden_layers=config.num_hidden_layers,
        num_attention_heads=config.num_heads,
        head_dim=config.head_dim,
        max_position_embeddings=2 * CONTEXT,
        tie_word_embeddings=config.tie_word_embeddings,
    )
    return LlamaForCausalLM(sizes)


def filled(cache: Any, config: KDNConfig, dtype: torch.dtype) -> Any:
    """That cache with CONTEXT random tokens in it."""
    for layer in range(config.num_hidden_layers):
        k, v = torch.randn(2, 1, config.num_heads, CONTEXT, config.head_dim, dtype=dtype)
        cache.update(k, v, layer)
    return cache


def decoder(model: Any, cache: Any, tokens: int) -> Callable[[], float]:
    """Decodes `tokens` tokens, and says how long each took."""
    token = torch.ones(1, 1, dtype=torch.int64)

    def run() -> float:
        nonlocal token
        start = time.perf_counter()
        for _ in range(tokens):
            logits = model(token, past_key_values=cache, use_cache=True).logits
            token = logits[:, -1:].argmax(-1)
        return (time.perf_counter() - start) / tokens

    return run


def reader(read: Callable[[Tensor], Tensor], data: Tensor) -> Callable[[], float]:
    """Reads `data` once, and says how long that took."""

    def run() -> float:
        start = time.perf_counter()
        read(data)
        return time.perf_counter() - start

    return run


def readers(size: int) -> dict[str, Callable[[], float]]:
    """Ways to read that many bytes once. Filled first: pages that were never written are not in memory."""
    width = 4096
    floats = torch.randn(size // (4 * width), width)
    halves = torch.randn(size // (2 * width), width).bfloat16()
    one, half = torch.randn(width), torch.randn(width).bfloat16()
    return {
        "sum": reader(torch.sum, floats),
        "dot": reader(lambda x: torch.dot(x.view(-1), x.view(-1)), floats),
        "matrix · vector, float32": reader(lambda x: torch.mv(x, one), floats),
        "matrix · vector, bfloat16": reader(lambda x: torch.mv(x, half), halves),
    }


@torch.no_grad()
def measure(name: str, dtype: torch.dtype, rounds: int, tokens: int) -> None:
    torch.manual_seed(0)
    config = preset(name)
    ours = KDNForCausalLM(config).to(dtype).eval()
    theirs = transformer(config, name).to(dtype).eval()
    size = weight_bytes(ours)
    room = CONTEXT + (rounds + 1) * tokens
    fixed = StaticCache(config=theirs.config, max_cache_len=room)
    runs = {
        "kdn": decoder(ours, KDNCache(), tokens),
        "llama, growing cache": decoder(theirs, filled(DynamicCache(), config, dtype), tokens),
        "llama, preallocated cache": decoder(theirs, filled(fixed, config, dtype), tokens),
        **readers(size),
    }
    times: dict[str, list[float]] = {run: [] for run in runs}
    for number in range(rounds + 1):
        for run, seconds in ((run, call()) for run, call in runs.items()):
            if number:  # the first round warms up
                times[run].append(seconds)
    median = {run: statistics.median(found) for run, found in times.items()}

    print(f"\n{name}, {str(dtype).removeprefix('torch.')}, {size / 1e6:.0f} MB of weights; ", end="")
    print(f"blocks {block_parameters(ours):,} and, Llama's, {block_parameters(theirs):,} parameters")
    for run in ("kdn", "llama, growing cache", "llama, preallocated cache"):
        spread = f"{1e3 * min(times[run]):.1f} … {1e3 * max(times[run]):.1f}"
        print(f"  {run:<26} {1 / median[run]:8.1f} tokens/s   {1e3 * median[run]:7.1f} ms ({spread})")
    for way in readers_of(median):
        print(f"  {'reading, ' + way:<35} {size / median[way] / 1e9:8.1f} GB/s")
    allowed = min(median[way] for way in readers_of(median))
    peer = min(median[run] for run in median if run.startswith("llama"))
    verdict("of the rate that memory allows", allowed / median["kdn"], OF_BANDWIDTH)
    verdict(f"times Llama's rate at {CONTEXT:,} tokens", peer / median["kdn"], OF_TRANSFORMER)


def readers_of(times: dict[str, float]) -> list[str]:
    return [run for run in times if run != "kdn" and not run.startswith("llama")]


def verdict(what: str, found: float, bar: float) -> None:
    print(f"  {found:.2f} {what} (bar {bar}): {'met' if found >= bar else 'MISSED'}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Decoding on a CPU, beside memory's rate and a transformer.")
    parser.add_argument("preset", nargs="?", default="kdn-diagonal-125m")
    parser.add_argument(
        "--dtype", nargs="+", choices=["bfloat16", "float32"], default=["bfloat16", "float32"]
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=16, help="that each decodes in a round")
    options = parser.parse_args()
    about = {**versions(), **machine(), "threads": torch.get_num_threads()}
    print(" · ".join(f"{name} {value}" for name, value in about.items()))
    for dtype in options.dtype:
        measure(options.preset, getattr(torch, dtype), options.rounds, options.tokens)


if __name__ == "__main__":
    main()
