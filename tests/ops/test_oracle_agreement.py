"""`reference` against the NumPy oracle in float64: values to 1e-12, gradients by differences.

Everything that the other backends are compared with rests on this file.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import oracle
import pytest
import torch
from oracle import Array

import kdn.ops

GAINS = ("diagonal_gain", "isotropic_gain", "exact_gain")


class Case(NamedTuple):
    """Sizes, the decay's shape ("channel", "scalar", "none") and what else is given or left out."""

    T: int
    K: int
    V: int
    decay: str
    mu: str  # "one", "number" or "heads"
    initial: bool
    cu_seqlens: tuple[int, ...] | None = None
    B: int = 2
    H: int = 3

    @property
    def states(self) -> int:
        return self.B if self.cu_seqlens is None else len(self.cu_seqlens) - 1


CASES = [
    Case(T=1, K=8, V=16, decay="channel", mu="one", initial=False),
    Case(T=2, K=16, V=8, decay="scalar", mu="heads", initial=True),
    Case(T=65, K=24, V=40, decay="channel", mu="heads", initial=True),
    Case(T=65, K=32, V=32, decay="none", mu="number", initial=False),
    Case(T=257, K=16, V=24, decay="channel", mu="number", initial=True, H=2),
    Case(T=257, K=12, V=8, decay="scalar", mu="one", initial=False, H=1),
    Case(T=65, K=256, V=64, decay="channel", mu="number", initial=False, B=1, H=2),
    Case(65, 16, 8, "channel", "heads", True, cu_seqlens=(0, 1, 2, 40, 65), B=1),
    Case(65, 8, 16, "scalar", "number", False, cu_seqlens=(0, 64, 65), B=1),
    Case(20, 8, 8, "none", "one", True, cu_seqlens=(0, 7, 8, 20), B=1),
]
GRADIENT_CASES = [
    Case(T=1, K=3, V=2, decay="channel", mu="heads", initial=True, H=2),
    Case(T=9, K=4, V=3, decay="channel", mu="heads", initial=True, H=2),
    Case(T=9, K=4, V=6, decay="scalar", mu="heads", initial=True, H=2),
    Case(T=9, K=4, V=3, decay="none", mu="number", initial=False, H=2),
    Case(9, 4, 3, "channel", "heads", True, cu_seqlens=(0, 1, 6, 9), B=1, H=2),
]


def name_of(case: Case) -> str:
    packed = "" if case.cu_seqlens is None else "-packed"
    start = "-initial" if case.initial else ""
    return f"T{case.T}-K{case.K}-V{case.V}-{case.decay}-{case.mu}{start}{packed}"


def decay_of(case: Case, rng: np.random.Generator) -> Array | None:
    shape = {"channel": (case.B, case.T, case.H, case.K), "scalar": (case.B, case.T, case.H)}
    return None if case.decay == "none" else -rng.exponential(0.2, shape[case.decay])


def gain_inputs(op: str, case: Case) -> dict[str, Array | None]:
    rng = np.random.default_rng(len(op) + case.T + case.K)
    B, T, H, K, N = case.B, case.T, case.H, case.K, case.states
    root = rng.standard_normal((N, H, K, K)) / np.sqrt(K)
    initial = {
        "diagonal_gain": rng.exponential(1.0, (N, H, K)),
        "isotropic_gain": rng.exponential(1.0, (N, H)),
        "exact_gain": root @ root.swapaxes(-1, -2) + 0.1 * np.eye(K),
    }[op]
    inputs = {
        "k": rng.standard_normal((B, T, H, K)),
        "log_decay": decay_of(case, rng),
        "process_noise": rng.exponential(0.3, (B, T, H) if "iso" in op else (B, T, H, K)),
        "obs_noise": 0.2 + rng.exponential(1.0, (B, T, H)),
        "initial_cov": initial if case.initial else None,
    }
    mu = {"one": None, "number": np.array(1.7), "heads": 0.3 + rng.exponential(K, H)}[case.mu]
    return inputs if mu is None else inputs | {"info_scale": mu}


def memory_inputs(case: Case, erase: bool) -> dict[str, Array | None]:
    rng = np.random.default_rng(case.T + case.V)
    B, T, H, K, V = case.B, case.T, case.H, case.K, case.V
    k = rng.standard_normal((B, T, H, K))
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    # A direction of its own, near enough to k that the memory stays bounded.
    direction = k + 0.3 * rng.standard_normal((B, T, H, K)) / np.sqrt(K)
    return {
        "q": rng.standard_normal((B, T, H, K)),
        "k": k if erase else None,
        "v": rng.standard_normal((B, T, H, V)),
        "gain": rng.uniform(0.1, 1.0, (B, T, H, 1)) * direction,
        "log_decay": decay_of(case, rng),
        "initial_state": rng.standard_normal((case.states, H, K, V)) if case.initial else None,
    }


def to_torch(x: Array | None, grad: bool = False) -> torch.Tensor | None:
    return None if x is None else torch.tensor(x, dtype=torch.float64, requires_grad=grad)


def relative_error(a: torch.Tensor, b: Array) -> float:
    assert a.dtype == torch.float64
    assert a.shape == b.shape
    return float(np.linalg.norm(a.detach().numpy() - b) / np.linalg.norm(b))


def packing(case: Case) -> torch.Tensor | None:
    return None if case.cu_seqlens is None else torch.tensor(case.cu_seqlens)


@pytest.mark.parametrize("op", GAINS)
@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_gain_covariance_and_prior_equal_the_oracle(op: str, case: Case) -> None:
    inputs = gain_inputs(op, case)
    results = getattr(kdn.ops, op)(
        **{name: to_torch(x) for name, x in inputs.items()},
        cu_seqlens=packing(case),
        return_prior=True,
        backend="reference",
    )
    expected = getattr(oracle, op)(**inputs, cu_seqlens=case.cu_seqlens)
    for ours, theirs in zip(results, expected, strict=True):
        assert relative_error(ours, theirs) < 1e-12


@pytest.mark.parametrize("op", GAINS)
def test_information_scale_is_a_float_or_any_shape_that_broadcasts_to_heads(op: str) -> None:
    case = CASES[2]._replace(mu="one", T=5)
    inputs = gain_inputs(op, case)
    tensors = {name: to_torch(x) for name, x in inputs.items()}
    expected, _, _ = getattr(oracle, op)(**inputs, info_scale=2.5)
    for mu in (2.5, torch.tensor(2.5), torch.full((1,), 2.5), torch.full((case.H,), 2.5)):
        gain, _ = getattr(kdn.ops, op)(**tensors, info_scale=mu, backend="reference")
        assert relative_error(gain, expected) < 1e-12


@pytest.mark.parametrize("erase", [True, False], ids=["erase", "add"])
@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_memory_outputs_and_state_equal_the_oracle(case: Case, erase: bool) -> None:
    inputs = memory_inputs(case, erase)
    scale = 0.7 if case.mu == "number" else None
    results = kdn.ops.delta_memory(
        **{name: to_torch(x) for name, x in inputs.items()},
        scale=scale,
        cu_seqlens=packing(case),
        backend="reference",
    )
    expected = oracle.delta_memory(**inputs, scale=scale, cu_seqlens=case.cu_seqlens)
    for ours, theirs in zip(results, expected, strict=True):
        assert relative_error(ours, theirs) < 1e-12


@pytest.mark.parametrize("op", [*GAINS, "delta_memory", "delta_memory-add"])
@pytest.mark.parametrize("case", GRADIENT_CASES, ids=name_of)
def test_gradients_equal_the_oracles_finite_differences(op: str, case: Case) -> None:
    """Every tensor argument, every result, along random directions.

    The loss weights every entry of every result at random, so that a gradient which assumes, say, a
    symmetric incoming ∂P is found out.
    """
    rng = np.random.default_rng(5)
    op, memory = op.split("-")[0], op.startswith("delta_memory")
    inputs = memory_inputs(case, "add" not in op) if memory else gain_inputs(op, case)
    options = {} if memory else {"return_prior": True}

    tensors = {name: to_torch(x, grad=True) for name, x in inputs.items()}
    results = getattr(kdn.ops, op)(**tensors, **options, cu_seqlens=packing(case), backend="reference")
    weights = [rng.standard_normal(result.shape) for result in results]
    loss = sum((to_torch(w) * result).sum() for w, result in zip(weights, results, strict=True))
    given = {name: x for name, x in tensors.items() if x is not None}
    gradients = torch.autograd.grad(loss, list(given.values()))

    def oracle_loss(**changed: Array) -> float:
        results = getattr(oracle, op)(**(inputs | changed), cu_seqlens=case.cu_seqlens)
        return float(sum((w * result).sum() for w, result in zip(weights, results, strict=True)))

    for name, gradient in zip(given, gradients, strict=True):
        analytic, numeric = [], []
        for _ in range(4):
            direction = rng.standard_normal(inputs[name].shape)
            if op == "exact_gain" and name == "initial_cov":
                # Only symmetric matrices are covariances; off them there is no one right answer.
                direction = direction + direction.swapaxes(-1, -2)
            analytic.append(float((gradient.numpy() * direction).sum()))
            numeric.append(slope(oracle_loss, name, inputs[name], direction))
        error = np.linalg.norm(np.subtract(analytic, numeric)) / np.linalg.norm(numeric)
        assert error < 1e-7, f"∂{name}: {error:.1e}"


def slope(loss: Callable[..., float], name: str, x: Array, direction: Array) -> float:
    """Fourth-order central difference of `loss` in argument `name` along `direction` at x."""
    h = 1e-3 / np.abs(direction).max()
    at = {n: loss(**{name: x + n * h * direction}) for n in (-2, -1, 1, 2)}
    return (8 * (at[1] - at[-1]) - (at[2] - at[-2])) / (12 * h)
