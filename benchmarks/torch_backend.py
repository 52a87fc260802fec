"""The `torch` backend on a CPU: time beside transformers' chunk rule, peak memory, growth with length.

    python benchmarks/torch_backend.py            both tables, about three minutes on two cores
    python benchmarks/torch_backend.py --time     only the first

Both sides run forward + backward in one process, taking turns, float32, H = 16, K = V = 128. The peer is
`torch_chunk_gated_delta_rule` of transformers: a fixed gain and one decay per head, where Diagonal KDN has a
gain to compute and a decay per channel. Memory is the peak of the process's resident set during forward +
backward, above the inputs and their gradients, each length in a process of its own. Times are taken with
malloc told to keep freed memory (both sides gain from it), memory with malloc as it is.
"""

import argparse
import inspect
import json
import os
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from kdn.ops import delta_memory, diagonal_gain

HEADS, WIDTH = 16, 128
TIMES = [1024, 2048, 4096, 8192, 16384]
LONGEST_PEER = 8192
# Freed memory stays with the process: else the kernel's clearing of fresh pages is most of what is timed.
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": str(2**33), "MALLOC_TRIM_THRESHOLD_": str(2**34)}


def inputs(length: int) -> dict[str, Tensor]:
    torch.manual_seed(0)
    shape = (1, length, HEADS, WIDTH)
    return {
        "q": F.normalize(torch.randn(shape), dim=-1),
        "k": F.normalize(torch.randn(shape), dim=-1),
        "v": torch.randn(shape),
        "log_decay": -0.1 * torch.rand(shape),
        "process_noise": F.softplus(torch.randn(shape)),
        "obs_noise": 0.01 + F.softplus(torch.randn(shape[:3])),
    }


def diagonal_kdn(x: dict[str, Tensor]) -> Tensor:
    gain, _ = diagonal_gain(
        x["k"], x["log_decay"], x["process_noise"], x["obs_noise"], info_scale=WIDTH, backend="torch"
    )
    return delta_memory(x["q"], x["k"], x["v"], gain, x["log_decay"], backend="torch")[0]


def scalar_decay(x: dict[str, Tensor]) -> Tensor:
    """The peer's own task: a fixed β and one decay per head."""
    beta = x["obs_noise"].sigmoid()
    gain = beta[..., None] * x["k"]
    return delta_memory(x["q"], x["k"], x["v"], gain, x["log_decay"][..., 0], backend="torch")[0]


def transformers_rule() -> Callable[[dict[str, Tensor]], Tensor]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers.models.qwen3_next import modeling_qwen3_next
    # Undecorated: with flash-linear-attention installed the decorator would pick a GPU kernel.
    rule = inspect.unwrap(modeling_qwen3_next.torch_chunk_gated_delta_rule)
    return lambda x: rule(x["q"], x["k"], x["v"], x["log_decay"][..., 0], x["obs_noise"].sigmoid())[0]


def seconds(run: Callable[[dict[str, Tensor]], Tensor], x: dict[str, Tensor]) -> float:
    leaves = {name: t.detach().requires_grad_() for name, t in x.items()}
    start = time.perf_counter()
    out = run(leaves)
    out.backward(torch.ones_like(out))
    return time.perf_counter() - start


def time_table(repeats: int) -> None:
    runs = {
        "Diagonal KDN": diagonal_kdn,
        "memory, scalar decay": scalar_decay,
        "transformers": transformers_rule(),
    }
    print("forward + backward, median seconds (ratio to transformers)")
    print(f"{'T':>7} " + "".join(f"{name:>28}" for name in runs) + f"{'Diagonal µs/token':>20}")
    for length in TIMES:
        x = inputs(length)
        samples: dict[str, list[float]] = {name: [] for name in runs}
        for _ in range(repeats + 1):
            for name, run in runs.items():
                if name != "transformers" or length <= LONGEST_PEER:
                    samples[name].append(seconds(run, x))
        median = {name: statistics.median(s[1:]) for name, s in samples.items() if s}
        peer = median.get("transformers")
        cells = []
        for name in runs:
            ratio = f" ({median[name] / peer:.2f}x)" if name in median and peer else ""
            cells.append(f"{median[name]:.3f}{ratio}" if name in median else "–")
        per_token = median["Diagonal KDN"] / length * 1e6
        print(f"{length:>7} " + "".join(f"{c:>28}" for c in cells) + f"{per_token:>20.1f}", flush=True)


def status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"no {field} in /proc/self/status")


def peak_memory(length: int) -> dict[str, float]:
    """Peak resident bytes of forward + backward above inputs and gradients, in this process."""
    warm = {name: t.requires_grad_() for name, t in inputs(128).items()}
    diagonal_kdn(warm).sum().backward()
    leaves = {name: t.requires_grad_() for name, t in inputs(length).items()}
    seed = torch.ones(1, length, HEADS, WIDTH)
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before = status("VmRSS")
    diagonal_kdn(leaves).backward(seed)
    gradients = sum(t.grad.nbytes for t in leaves.values() if t.grad is not None)
    return {"T": length, "MiB": (status("VmHWM") - before - gradients) / 2**20}


def memory_table() -> None:
    print("\npeak memory of Diagonal KDN forward + backward, above inputs and gradients")
    print(f"{'T':>7}{'MiB':>10}{'KiB/token':>12}")
    for length in TIMES:
        command = [sys.executable, __file__, "--peak", str(length)]
        default = {name: value for name, value in os.environ.items() if name not in ALLOCATOR}
        result = subprocess.run(command, check=True, capture_output=True, text=True, env=default)
        row = json.loads(result.stdout)
        print(f"{length:>7}{row['MiB']:>10.0f}{row['MiB'] * 1024 / length:>12.1f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--time", action="store_true", help="only the time table")
    parser.add_argument("--memory", action="store_true", help="only the memory table")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--peak", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peak:
        print(json.dumps(peak_memory(options.peak)))
        return
    if not ALLOCATOR.items() <= os.environ.items():
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **ALLOCATOR})
    threads = torch.get_num_threads()
    print(f"{threads} threads, torch {torch.__version__}, float32, B=1 H={HEADS} K=V={WIDTH}")
    if options.time or not options.memory:
        time_table(options.repeats)
    if options.memory or not options.time:
        memory_table()


if __name__ == "__main__":
    main()
