"""How fast memories can grow: growth per token of the transition products, for even and uneven ω.

    python benchmarks/growth.py          the table of docs/growth.md, under a minute on two cores

Random unit keys, no decay, r = 0.01 + softplus(N(0, 1)); 4 heads, 4096 tokens after 512 that are left out.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from kdn.ops import diagonal_gain, exact_gain, isotropic_gain, memory_growth

LENGTH, WARM_UP, HEADS, WIDTH = 4096, 512, 4, 32


def process_noises(shape: tuple[int, ...]) -> dict[str, Tensor]:
    few = torch.full(shape, 0.01).masked_fill(torch.arange(shape[-1]) % 20 == 0, 100.0)
    changing = torch.full(shape, 0.01).masked_fill(torch.rand(shape) < 0.05, 100.0)
    return {
        "one magnitude: ω = ln 2 (the start of training)": torch.full(shape, 0.6931),
        "ω = exp(N)": torch.randn(shape).exp(),
        "ω = exp(2 N)": torch.randn(shape).mul(2).exp(),
        "the same 5% of channels at ω = 100, the others at 0.01": few,
        "5% of channels at ω = 100, others at every token": changing,
    }


def main() -> None:
    torch.manual_seed(0)
    shape = (1, LENGTH + WARM_UP, HEADS, WIDTH)
    k = F.normalize(torch.randn(shape), dim=-1)
    r = 0.01 + F.softplus(torch.randn(shape[:3]))
    columns = ["exact", "isotropic, μ = K", "diagonal, μ = 1", "diagonal, μ = K"]
    print(f"| log growth of ‖S‖ per token, K = {WIDTH} | " + " | ".join(columns) + " |")
    print("|---|---|---|---|---|")
    for name, w in process_noises(shape).items():
        gains = [
            exact_gain(k, None, w, r)[0],
            isotropic_gain(k, None, w.mean(-1), r, info_scale=WIDTH)[0],
            diagonal_gain(k, None, w, r)[0],
            diagonal_gain(k, None, w, r, info_scale=WIDTH)[0],
        ]
        growth = [memory_growth(k[:, WARM_UP:], g[:, WARM_UP:]).mean() for g in gains]
        print(f"| {name} | " + " | ".join(f"{x:+.4f}" for x in growth) + " |")


if __name__ == "__main__":
    main()
