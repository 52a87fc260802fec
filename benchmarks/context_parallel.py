"""What context parallelism costs a rank beside its own work: collectives, bytes, and the time of the scan.

    python benchmarks/context_parallel.py            2 ranks on this machine, gloo

One Diagonal KDN layer of 4 heads of 128 channels, float32. Calls and bytes are those of one rank in a forward and a
backward pass. The time is that of the scan across ranks alone, forward: maps gathered from all ranks and composed, as
`kdn.training.context` does for gain and memory. All of it should be the same for every T.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from kdn.models import KDNConfig, KDNForCausalLM
from kdn.training.context import compose_gain, compose_memory, context_parallel, gain_summary

LENGTHS = (256, 512, 1024, 2048, 4096)
HEADS, WIDTH, REPEATS = 4, 128, 30


def measure(length: int) -> tuple[int, int, float]:
    """Calls and bytes of a step, and the milliseconds of the scan (the median)."""
    torch.manual_seed(0)
    config = KDNConfig(
        vocab_size=64,
        hidden_size=64,
        num_heads=HEADS,
        head_dim=WIDTH,
        intermediate_size=64,
        num_hidden_layers=1,
    )
    model = KDNForCausalLM(config)
    context = context_parallel(model)
    mine = length // context.size
    ids = torch.randint(64, (1, mine))
    model(ids, targets=ids).loss.backward()
    calls, sent = context.calls, context.bytes_sent

    with torch.no_grad():
        k = torch.nn.functional.normalize(torch.randn(1, mine, HEADS, WIDTH), dim=-1)
        noise, r = torch.rand_like(k), torch.ones(1, mine, HEADS)
        summary = gain_summary(k, -torch.rand_like(k), noise, r, float(WIDTH), diagonal=True)
        affine = torch.randn(1, HEADS, WIDTH, 2 * WIDTH)
        first, times = torch.ones(1, HEADS, WIDTH), []
        for _ in range(REPEATS):
            dist.barrier()
            start = time.perf_counter()
            compose_gain(first, context.gather(summary), context.rank)
            compose_memory(context.gather(affine), context.rank)
            times.append(1000 * (time.perf_counter() - start))
    return calls, sent, statistics.median(times)


def rank(number: int, ranks: int, store: str) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=number, world_size=ranks, timeout=timedelta(minutes=2)
    )
    if number == ranks - 1:  # the last composes most
        print(f"{'T':>6}{'calls':>8}{'bytes sent':>14}{'scan, ms':>11}")
    for length in LENGTHS:
        calls, sent, milliseconds = measure(length)
        if number == ranks - 1:
            print(f"{length:>6}{calls:>8}{sent:>14,}{milliseconds:>11.2f}", flush=True)
    dist.destroy_process_group()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--store", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        torch.set_num_threads(1)
        rank(options.rank, options.ranks, options.store)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        arguments = ["--ranks", str(options.ranks), "--store", str(Path(folder) / "store")]
        running = [
            subprocess.Popen(
                [sys.executable, __file__, *arguments, "--rank", str(number)],
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
            for number in range(options.ranks)
        ]
        return max(process.wait() for process in running)


if __name__ == "__main__":
    sys.exit(main())
