"""Memory of decoding: as large after 100,000 tokens as after 1,000.

    python benchmarks/generation_memory.py                                two minutes on one core
    python benchmarks/generation_memory.py kda-swa-tiny --tokens 20000

Decodes greedily, token by token, and says after 1,000 tokens, 10,000, … what the cache holds, what the process
has resident, and the most it ever had. Where memory of a text grows, all three do. Exit status 1 if they did.
"""

import argparse
import resource
import sys
from pathlib import Path

import torch

from kdn import KDNCache, KDNForCausalLM
from kdn.bench.machine import machine, versions
from kdn.models.presets import preset

MEBIBYTE = 2**20
# What allocators and Python may take on the way. Keys of 99,000 more tokens, which a full attention layer of the
# default model would keep, are 50 MB.
SLACK = 8.0


def resident() -> float:
    """MiB of this process now; NaN where the system does not tell."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1])
    except OSError:
        return float("nan")
    return pages * resource.getpagesize() / MEBIBYTE


def peak() -> float:
    """MiB at most so far."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / MEBIBYTE


@torch.inference_mode()
def main() -> int:
    parser = argparse.ArgumentParser(description="Memory of decoding, from 1,000 tokens on.")
    parser.add_argument("preset", nargs="?", default="kdn-diagonal-swa-tiny")
    parser.add_argument("--tokens", type=int, default=100_000)
    options = parser.parse_args()

    torch.manual_seed(0)
    model = KDNForCausalLM(preset(options.preset)).eval()
    cache, token = KDNCache(), torch.tensor([[1]])
    about = {**versions(), **machine(), "threads": torch.get_num_threads()}
    print(" · ".join(f"{name} {value}" for name, value in about.items()))
    print(f"{options.preset}, float32, one sequence, seed 0\n")
    print(f"{'tokens':>9}  {'cache, bytes':>12}  {'resident, MiB':>13}  {'peak, MiB':>9}", flush=True)

    found = []
    for done in range(1, options.tokens + 1):
        token = model(token, past_key_values=cache).logits[:, -1:].argmax(-1)
        if done in (1_000, 10_000, options.tokens):
            found.append((cache.nbytes(), resident(), peak()))
            print(f"{done:>9,}  {found[-1][0]:>12,}  {found[-1][1]:>13.1f}  {found[-1][2]:>9.1f}", flush=True)
    first, last = found[0], found[-1]
    grown = last[0] != first[0] or last[2] - first[2] > SLACK
    print(
        f"\ncache {last[0] - first[0]:+,} bytes, peak {last[2] - first[2]:+.1f} MiB: {'GROWS' if grown else 'flat'}"
    )
    return int(grown)


if __name__ == "__main__":
    raise SystemExit(main())
