"""The CPU kernels by themselves: instruction sets against their floors, and time per token from short to long.

    python benchmarks/cpu_kernels.py              about four minutes on two cores
    python benchmarks/cpu_kernels.py --longest 16384

One sequence, 16 heads, K = V = 128, float32, default number of threads. The floors are 3 and 8 multiply-adds per number
of the state and token, at the multiply-add rate that is measured with the same instruction set. Run it alone.
"""

import argparse
import resource
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import normalize, softplus

from kdn.bench.machine import machine
from kdn.ops import delta_memory, diagonal_gain
from kdn.ops.backends import cpu
from kdn.ops.backends.cpu.library import _library, use_instruction_set

HEADS, WIDTH = 16, 128


def inputs(length: int) -> tuple[Tensor, ...]:
    shape = (1, length, HEADS, WIDTH)
    q, k = (normalize(torch.randn(shape), dim=-1) for _ in range(2))
    decay, noise = -0.1 * softplus(torch.randn(shape)), softplus(torch.randn(shape))
    return q, k, torch.randn(shape), decay, noise, 0.01 + softplus(torch.randn(shape[:3]))


def milliseconds(function: Callable[[], object], rounds: int) -> tuple[float, float]:
    """Medians of time and of page faults."""
    function()
    times, faults = [], []
    for _ in range(rounds):
        before, start = resource.getrusage(resource.RUSAGE_SELF).ru_minflt, time.perf_counter()
        function()
        times.append(1e3 * (time.perf_counter() - start))
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    return statistics.median(times), statistics.median(faults)


def instruction_sets(length: int) -> None:
    q, k, v, decay, noise, obs = inputs(length)
    gain = diagonal_gain(k, decay, noise, obs, info_scale=WIDTH)[0]
    given = [x.clone().requires_grad_() for x in (q, k, v, gain, decay)]
    flop = 2 * length * HEADS * WIDTH**2
    for name in ("avx512", "avx2", "baseline"):
        try:
            use_instruction_set(name)
        except ValueError:
            print(f"{name:<10} not on this machine")
            continue
        peak = _library().kdn_fma_peak() * torch.get_num_threads()
        with torch.no_grad():
            forward, _ = milliseconds(lambda: delta_memory(*given), 15)
        out, _ = delta_memory(*given)
        upstream = torch.ones_like(out)

        def back(out: Tensor = out, upstream: Tensor = upstream) -> object:
            return torch.autograd.grad(out, given, upstream, retain_graph=True)

        backward, _ = milliseconds(back, 9)
        print(
            f"{name:<10} T={length}: {peak / torch.get_num_threads() / 1e9:.0f} Gflop/s a core;"
            f" memory forward {forward:.1f} ms, {100 * 3 * flop / peak / forward * 1e3:.0f}% of its floor;"
            f" backward {backward:.1f} ms, {100 * 8 * flop / peak / backward * 1e3:.0f}%",
            flush=True,
        )


def per_token(longest: int) -> None:
    print("\ndiagonal KDN, gain + memory, forward")
    length = 512
    while length <= longest:
        q, k, v, decay, noise, obs = inputs(length)

        def forward() -> object:
            gain = diagonal_gain(k, decay, noise, obs, info_scale=WIDTH)[0]  # noqa: B023 called in this round
            return delta_memory(q, k, v, gain, decay)  # noqa: B023

        with torch.no_grad():
            taken, faults = milliseconds(forward, max(3, min(15, 2**18 // length)))
        each = 1e3 * taken / length
        print(f"T={length:<7} {taken:9.2f} ms {each:6.2f} us a token, {faults:.0f} page faults", flush=True)
        length *= 4


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--longest", type=int, default=131072, help="of the lengths (default: 131072)")
    args = parser.parse_args()
    why = cpu.unavailable(torch.device("cpu"))
    if why is not None:
        raise SystemExit(why)
    print(f"{machine()['cpu']}, {torch.get_num_threads()} threads")
    best = cpu.instruction_set()
    for length in (2048, 8192):
        instruction_sets(length)
    use_instruction_set(best)
    per_token(args.longest)


if __name__ == "__main__":
    main()
