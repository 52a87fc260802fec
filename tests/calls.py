"""One call of any of the four operations, by name: arguments, results and gradients."""

from collections.abc import Callable
from typing import Any

import torch
from cases import make
from torch import Tensor

from kdn.ops import delta_memory, diagonal_gain, exact_gain, isotropic_gain

OPS: dict[str, Callable[..., tuple[Tensor, ...]]] = {
    "diagonal": diagonal_gain,
    "isotropic": isotropic_gain,
    "exact": exact_gain,
    "memory": delta_memory,
}
STATES = ("initial_cov", "initial_state")
Arguments = dict[str, Any]


def arguments(op: str, time: int = 5, *, dtype: torch.dtype = torch.float32, **options: Any) -> Arguments:
    """Keyword arguments of an operation, K = 4 and V = 3."""
    x = make("diagonal" if op == "memory" else op, time, 4, 3, **options).tensors
    if op == "memory":
        names = ["q", "k", "v", "gain", "log_decay", "initial_state"]
        x["gain"] = 0.6 * x["k"]
    else:
        names = ["k", "log_decay", "process_noise", "obs_noise", "info_scale", "initial_cov"]
    return {name: x[name].to(dtype) for name in names if x[name] is not None}


def evaluate(op: str, args: Arguments, backend: str, **options: Any) -> dict[str, Tensor]:
    """Results and the gradients of a fixed random combination of them, by name."""
    leaves = {
        n: x.detach().requires_grad_() if isinstance(x, Tensor) and x.is_floating_point() else x
        for n, x in args.items()
    }
    results = OPS[op](**leaves, **options, backend=backend)
    generator = torch.Generator().manual_seed(3)
    weights = [torch.randn(x.shape, generator=generator, dtype=torch.float64) for x in results]
    loss = sum((x * w.to(x.dtype)).sum() for x, w in zip(results, weights, strict=True))
    inputs = {n: x for n, x in leaves.items() if isinstance(x, Tensor) and x.requires_grad}
    grads = torch.autograd.grad(loss, list(inputs.values()))
    found = {f"result {i}": x.detach() for i, x in enumerate(results)}
    return found | {f"∂{n}": g for n, g in zip(inputs, grads, strict=True)}


# Every tensor argument of every operation but info_scale, which has rules of its own.
TENSORS = [(op, name) for op in OPS for name in arguments(op) if name != "info_scale"]
