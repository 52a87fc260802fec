"""Uses that a layer does not make but a user does: threads, checkpoints, aliases, crowds of sequences."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from calls import OPS, arguments, evaluate
from cases import GAINS, assert_close, distance, make, rounded, run
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from kdn.ops import delta_memory


@pytest.mark.parametrize("op", OPS)
def test_threads_do_not_meet(fast_backend: str, op: str) -> None:
    args = [arguments(op, 300, seed=seed) for seed in range(3)]
    want = [evaluate(op, a, fast_backend) for a in args]
    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(lambda i: evaluate(op, args[i % 3], fast_backend), range(30)))
    assert all(x.equal(want[i % 3][name]) for i, got in enumerate(found) for name, x in got.items())


@pytest.mark.parametrize("gain", GAINS)
def test_many_empty_sequences(fast_backend: str, gain: str) -> None:
    lengths = [0] * 20 + [150] + [0] * 7 + [33, 1] + [0] * 100
    case = rounded(make(gain, sum(lengths), 8, 6, lengths=lengths), torch.float32)
    assert_close(run(case, fast_backend, torch.float32), run(case, "reference", torch.float64), 1e-5)


@pytest.mark.parametrize("gain", GAINS)
def test_a_large_batch_of_single_tokens(fast_backend: str, gain: str) -> None:
    case = rounded(make(gain, 1, 8, 4, batch=1000, heads=3), torch.float32)
    assert_close(run(case, fast_backend, torch.float32), run(case, "reference", torch.float64), 1e-5)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("op", OPS)
def test_activation_checkpointing(fast_backend: str, op: str, reentrant: bool) -> None:
    """The forward pass runs twice, at first without a graph."""
    args = arguments(op, 70)
    first, x = next(iter(args.items()))
    grads = []
    for function in (lambda f, y: f(y), lambda f, y: checkpoint(f, y, use_reentrant=reentrant)):
        leaf = x.clone().requires_grad_()
        results = function(lambda y: OPS[op](**args | {first: y}, backend=fast_backend), leaf)
        sum(r.square().sum() for r in results).backward()
        grads.append(leaf.grad)
    assert grads[0].equal(grads[1])


def test_one_tensor_in_every_role(backend: str) -> None:
    """q = k = g = v, and −x² as decay: the gradient is the sum over the roles."""
    x = 0.2 * torch.randn(1, 70, 2, 8, generator=torch.Generator().manual_seed(0))
    leaf = x.clone().requires_grad_()
    out, state = delta_memory(leaf, leaf, leaf, leaf, -leaf.square(), backend=backend)
    (together,) = torch.autograd.grad(out.sum() + state.sum(), leaf)
    roles = [x.clone().requires_grad_() for _ in range(5)]
    *qkvg, decay = roles
    other, state_ = delta_memory(*qkvg, -decay.square(), backend=backend)
    assert other.equal(out)
    assert distance(together, sum(torch.autograd.grad(other.sum() + state_.sum(), roles))) < 1e-6


@pytest.mark.parametrize("op", OPS)
def test_results_changed_in_place(fast_backend: str, op: str) -> None:
    """A user may scale a gain or a state in place: nothing the backward pass needs is lost."""
    args = arguments(op, 70)
    grads = []
    for in_place in (False, True):
        leaves = {n: x.clone().requires_grad_() for n, x in args.items()}
        results = OPS[op](**leaves, backend=fast_backend)
        results = [r.mul_(2) if in_place else r * 2 for r in results]
        grads.append(torch.autograd.grad(sum(r.sum() for r in results), list(leaves.values())))
    assert all(a.equal(b) for a, b in zip(*grads, strict=True))


def test_argument_changed_in_place_before_backward_is_an_error(fast_backend: str) -> None:
    args = arguments("memory", 5)
    leaf = args["q"].clone().requires_grad_()
    out, _ = delta_memory(**args | {"q": leaf}, backend=fast_backend)
    args["v"].zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("op", [*GAINS])
@pytest.mark.parametrize(
    ("scale", "error"),
    [
        (None, TypeError),
        ("large", TypeError),
        ([1.0, 2.0], TypeError),
        (float("nan"), ValueError),
        (torch.ones(2, device="meta"), ValueError),
    ],
    ids=str,
)
def test_info_scale_of_a_wrong_kind(op: str, scale: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="info_scale") as caught:
        OPS[op](**arguments(op) | {"info_scale": scale})
    assert type(caught.value) is error


@pytest.mark.parametrize("vary", ["batch", "heads", "width", "sequences"])
def test_compiles_for_other_sizes_than_the_first(vary: str) -> None:
    """Every size may change from call to call, also those that messages and defaults are made from."""

    def step(x: dict[str, Tensor], cu_seqlens: Tensor | None) -> tuple[Tensor, ...]:
        options: dict[str, Any] = {"cu_seqlens": cu_seqlens, "backend": "torch"}
        names = ("k", "log_decay", "process_noise", "obs_noise")
        gain, cov = GAINS["diagonal"](*(x[n] for n in names), info_scale=x["info_scale"], **options)
        out, state = delta_memory(x["q"], x["k"], x["v"], gain, x["log_decay"], **options)
        return gain, cov, out, state

    torch._dynamo.reset()
    compiled: Callable[..., tuple[Tensor, ...]] = torch.compile(step, fullgraph=True, backend="aot_eager")
    for size in (3, 4, 6):
        lengths = [20] * size if vary == "sequences" else None
        x = make(
            "diagonal",
            20 * size if lengths else 70,
            size if vary == "width" else 8,
            4,
            batch=size if vary == "batch" else 1,
            heads=size if vary == "heads" else 2,
            lengths=lengths,
        ).tensors
        x = {name: t.requires_grad_() for name, t in x.items() if not name.startswith("initial")}
        offsets = torch.tensor([0, *lengths]).cumsum(0) if lengths else None
        both = [function(x, offsets) for function in (compiled, step)]
        assert all(a.equal(b) for a, b in zip(*both, strict=True))
        grads = [torch.autograd.grad(sum(r.cos().sum() for r in rs), list(x.values())) for rs in both]
        assert all(a.equal(b) for a, b in zip(*grads, strict=True))
    torch._dynamo.reset()


def test_bad_offsets_are_refused_in_a_compiled_graph_too() -> None:
    """There are no values while compiling; when the graph runs there are."""
    args = arguments("memory", 9)
    del args["initial_state"]

    def step(cu_seqlens: Tensor) -> Tensor:
        return delta_memory(**args, cu_seqlens=cu_seqlens, backend="torch")[0]

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    compiled(torch.tensor([0, 4, 9]))
    with pytest.raises(ValueError, match="cu_seqlens must not decrease, got 7 then 4"):
        compiled(torch.tensor([0, 7, 4, 9]))
    torch._dynamo.reset()
