"""Inputs for the operations, and running a gain and the memory on them with gradients."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from kdn.ops import delta_memory, diagonal_gain, exact_gain, isotropic_gain

GAINS: dict[str, Callable[..., tuple[Tensor, ...]]] = {
    "diagonal": diagonal_gain,
    "isotropic": isotropic_gain,
    "exact": exact_gain,
}


@dataclass
class Case:
    """Arguments of a gain and of the memory, in float64; `lengths` packs sequences of a batch of one."""

    gain: str
    tensors: dict[str, Tensor | None]
    lengths: list[int] | None = None
    keyless: bool = False
    cotangents: int = field(default=7)

    def change(self, **tensors: Tensor | None) -> "Case":
        return replace(self, tensors=self.tensors | tensors)


def make(
    gain: str,
    time: int,
    width: int,
    values: int,
    *,
    batch: int = 1,
    heads: int = 2,
    decay: str = "channel",
    lengths: list[int] | None = None,
    initial: bool = True,
    seed: int = 0,
) -> Case:
    """Inputs of the size a trained layer gives: unit keys, noises around one, mild decay."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    n = batch if lengths is None else len(lengths)
    b, t, h = batch, time, heads
    noise_shape = (b, t, h) if gain == "isotropic" else (b, t, h, width)
    decay_shape = {"channel": (b, t, h, width), "head": (b, t, h), "none": None}[decay]
    covariances = {"diagonal": (n, h, width), "isotropic": (n, h), "exact": (n, h, width, width)}
    initial_cov = F.softplus(normal(*covariances[gain])) + 0.1
    if gain == "exact":
        initial_cov = initial_cov @ initial_cov.mT / width + torch.eye(width, dtype=torch.float64)
    return Case(
        gain,
        {
            "q": F.normalize(normal(b, t, h, width), dim=-1),
            "k": F.normalize(normal(b, t, h, width), dim=-1),
            "v": normal(b, t, h, values),
            "log_decay": None if decay_shape is None else -0.1 * F.softplus(normal(*decay_shape)),
            "process_noise": F.softplus(normal(*noise_shape)),
            "obs_noise": 0.01 + F.softplus(normal(b, t, h)),
            "info_scale": width * (0.5 + torch.rand(h, dtype=torch.float64, generator=generator)),
            "initial_cov": initial_cov if initial else None,
            "initial_state": normal(n, h, width, values) if initial else None,
        },
        lengths,
    )


def run(case: Case, backend: str, dtype: torch.dtype, *, gradients: bool = True) -> dict[str, Tensor]:
    """Gain and memory, in `dtype` inputs and wider states; results and gradients by name."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    states = ("initial_cov", "initial_state", "info_scale")
    leaves = {
        name: None
        if x is None
        else x.detach().to(wide if name in states else dtype, copy=True).requires_grad_(gradients)
        for name, x in case.tensors.items()
    }
    cu_seqlens = None
    if case.lengths is not None:
        cu_seqlens = torch.tensor([0, *case.lengths]).cumsum(0)
    gain, cov, prior = GAINS[case.gain](
        leaves["k"],
        leaves["log_decay"],
        leaves["process_noise"],
        leaves["obs_noise"],
        info_scale=leaves["info_scale"],
        initial_cov=leaves["initial_cov"],
        cu_seqlens=cu_seqlens,
        return_prior=True,
        backend=backend,
    )
    out, state = delta_memory(
        leaves["q"],
        None if case.keyless else leaves["k"],
        leaves["v"],
        gain,
        leaves["log_decay"],
        initial_state=leaves["initial_state"],
        cu_seqlens=cu_seqlens,
        backend=backend,
    )
    results = {"gain": gain, "cov": cov, "prior": prior, "out": out, "state": state}
    if gradients:
        generator = torch.Generator().manual_seed(case.cotangents)
        loss = torch.zeros((), dtype=torch.float64)
        for x in results.values():
            weights = torch.randn(x.shape, dtype=torch.float64, generator=generator)
            # The same cotangent for every precision: rounded once, to the coarsest.
            loss = loss + (x * weights.to(torch.bfloat16).to(x.dtype)).sum()
        inputs = {name: x for name, x in leaves.items() if x is not None}
        grads = torch.autograd.grad(loss, list(inputs.values()), allow_unused=case.keyless)
        results |= {f"∂{name}": g for name, g in zip(inputs, grads, strict=True) if g is not None}
    return {name: x.detach() for name, x in results.items()}


def rounded(case: Case, dtype: torch.dtype) -> Case:
    """The case with its inputs rounded to `dtype`, so that two precisions can be given equal numbers."""
    states = ("initial_cov", "initial_state", "info_scale")
    low = torch.float32 if dtype == torch.bfloat16 else dtype
    return case.change(
        **{
            name: None if x is None else x.to(low if name in states else dtype).double()
            for name, x in case.tensors.items()
        }
    )


def distance(a: Tensor, b: Tensor) -> float:
    """‖a − b‖ / ‖b‖; 0/0 is 0, and NaN is infinite."""
    a, b = a.detach().double(), b.detach().double()
    error, size = (a - b).norm(), b.norm()
    if error == 0:
        return 0.0
    ratio = float(error / size)
    return ratio if ratio == ratio else float("inf")


def assert_close(got: dict[str, Tensor], want: dict[str, Tensor], bound: float) -> None:
    assert got.keys() == want.keys()
    far = {name: distance(got[name], want[name]) for name in want}
    worst = {name: f"{d:.1e}" for name, d in far.items() if not d <= bound}
    assert not worst, f"beyond {bound:.0e}: {worst}"
