"""The fixed-gain models of the family, as `flash-linear-attention` writes them, through one memory.

Each peer is a row of the package's table: an erase key, a write direction and a value for
`delta_memory`. Its naive float32 functions are an oracle that nobody here wrote.
"""

import warnings
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from kdn.ops import delta_memory


class Case(NamedTuple):
    B: int
    T: int
    H: int
    K: int
    V: int
    initial: bool = False
    scale: float | None = None


CASES = [
    Case(B=2, T=1, H=2, K=8, V=8),
    Case(B=1, T=130, H=2, K=64, V=64),
    Case(B=2, T=65, H=3, K=16, V=40, initial=True),
    Case(B=2, T=100, H=1, K=48, V=24, initial=True, scale=0.7),
]


class Inputs(NamedTuple):
    """What any of the models' layers hands its operation, drawn as after a fresh initialisation."""

    q: Tensor
    k: Tensor
    v: Tensor
    channel_decay: Tensor
    head_decay: Tensor
    beta: Tensor
    erase: Tensor
    write: Tensor


def draw(case: Case) -> tuple[Inputs, dict[str, Tensor | float | None]]:
    """The inputs, and the options that all peers but DeltaNet spell as `delta_memory` does."""
    B, T, H, K, V, initial, scale = case
    rng = torch.Generator().manual_seed(T)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng)

    inputs = Inputs(
        q=torch.nn.functional.normalize(normal(B, T, H, K), dim=-1),
        k=torch.nn.functional.normalize(normal(B, T, H, K), dim=-1),
        v=normal(B, T, H, V),
        channel_decay=torch.nn.functional.logsigmoid(normal(B, T, H, K) + 2),
        head_decay=torch.nn.functional.logsigmoid(normal(B, T, H) + 2),
        beta=normal(B, T, H).sigmoid(),
        erase=normal(B, T, H, K).sigmoid(),
        write=normal(B, T, H, V).sigmoid(),
    )
    return inputs, {"scale": scale, "initial_state": normal(B, H, K, V) if initial else None}


def peer(module: str, function: str) -> Callable[..., tuple[Tensor, Tensor]]:
    """Imported when a test runs: it takes seconds, and warns where there is no GPU."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        naive = pytest.importorskip(
            f"fla.ops.{module}.naive",
            reason="flash-linear-attention, the peer to compare with, cannot be imported",
            exc_type=ImportError,
        )
    return getattr(naive, function)


def check(ours: tuple[Tensor, Tensor], theirs: tuple[Tensor, Tensor]) -> None:
    for name, a, b in zip(("outputs", "final state"), ours, theirs, strict=True):
        assert a.dtype == b.dtype == torch.float32
        assert a.shape == b.shape
        error = float((a - b).norm() / b.norm())
        assert error < 1e-5, f"{name}: {error:.1e}"


@pytest.mark.parametrize("case", CASES, ids=str)
def test_kda(case: Case, backend: str) -> None:
    """Per-channel decay, erase key k, write direction β k."""
    x, options = draw(case)
    naive = peer("kda", "naive_recurrent_kda")
    theirs = naive(x.q, x.k, x.v, x.channel_decay, x.beta, output_final_state=True, **options)
    gain = x.beta[..., None] * x.k
    check(
        delta_memory(x.q, x.k, x.v, gain, x.channel_decay, backend=backend, **options),
        theirs,
    )


@pytest.mark.parametrize("initial", [False, True], ids=["zero", "initial"])
def test_chunked_kda(initial: bool, backend: str) -> None:
    """The peer's own chunked algorithm, which asks for lengths that its chunk divides."""
    x, options = draw(Case(B=1, T=128, H=2, K=32, V=48, initial=initial))
    naive = peer("kda", "naive_chunk_kda")
    theirs = naive(x.q, x.k, x.v, x.channel_decay, x.beta, output_final_state=True, chunk_size=32, **options)
    gain = x.beta[..., None] * x.k
    check(
        delta_memory(x.q, x.k, x.v, gain, x.channel_decay, backend=backend, **options),
        theirs,
    )


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gated_deltanet(case: Case, backend: str) -> None:
    """Scalar decay, erase key k, write direction β k."""
    x, options = draw(case)
    naive = peer("gated_delta_rule", "naive_recurrent_gated_delta_rule")
    theirs = naive(x.q, x.k, x.v, x.beta, x.head_decay, output_final_state=True, **options)
    gain = x.beta[..., None] * x.k
    check(
        delta_memory(x.q, x.k, x.v, gain, x.head_decay, backend=backend, **options),
        theirs,
    )


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gdn2(case: Case, backend: str) -> None:
    """Per-channel decay, erase key b ⊙ k, write direction k, value w ⊙ v."""
    x, options = draw(case)
    naive = peer("gdn2", "naive_recurrent_gdn2")
    theirs = naive(x.q, x.k, x.v, x.channel_decay, x.erase, x.write, output_final_state=True, **options)
    key, value = x.erase * x.k, x.write * x.v
    check(
        delta_memory(x.q, key, value, x.k, x.channel_decay, backend=backend, **options),
        theirs,
    )


@pytest.mark.parametrize("case", CASES, ids=str)
def test_deltanet(case: Case, backend: str) -> None:
    """No decay, erase key k, write direction β k. The peer puts heads first and fixes τ."""
    x, options = draw(case)
    naive = peer("delta_rule", "delta_rule_recurrence")
    heads_first = (y.transpose(1, 2) for y in (x.q, x.k, x.v, x.beta))
    out, state = naive(*heads_first, initial_state=options["initial_state"])
    if case.scale is not None:
        out = out * case.scale * case.K**0.5
    gain = x.beta[..., None] * x.k
    check(
        delta_memory(x.q, x.k, x.v, gain, None, backend=backend, **options),
        (out.transpose(1, 2), state),
    )
