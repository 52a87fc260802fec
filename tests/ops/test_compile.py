"""The torch backend as operators: compiled without graph breaks, and its hand-written gradients checked."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from cases import assert_close, make, run
from torch import Tensor

from kdn.ops import delta_memory, diagonal_gain, exact_gain, isotropic_gain
from kdn.ops.backends.torch import exact, gain, memory
from kdn.ops.registry import BACKENDS

GAINS: dict[str, Callable[..., tuple[Tensor, ...]]] = {
    "diagonal": diagonal_gain,
    "isotropic": isotropic_gain,
    "exact": exact_gain,
}
OPS = [*GAINS, "memory", "addition"]
COMPILED = [name for name, module in BACKENDS.items() if module.unavailable(torch.device("cpu")) is None]
COMPILED.remove("reference")


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of 4, segments of one round: tiny inputs cross every boundary there is."""
    monkeypatch.setattr(memory, "CHUNK", 4)
    monkeypatch.setattr(memory, "_SEGMENT_NUMBERS", {"cpu": 1})
    monkeypatch.setattr(gain, "CHUNK", 4)
    monkeypatch.setattr(exact, "EVERY", 2)


def leaves(op: str, time: int, width: int, values: int, **options: Any) -> dict[str, Tensor]:
    x = make(op if op in GAINS else "diagonal", time, width, values, **options).tensors
    if op in GAINS:
        names = ["k", "log_decay", "process_noise", "obs_noise", "info_scale", "initial_cov"]
    else:
        x["gain"] = 0.4 * x["k"].roll(1, -1) + 0.3 * x["k"]
        names = ["q", "k", "v", "gain", "log_decay", "initial_state"]
        names = [name for name in names if op == "memory" or name != "k"]
    return {n: x[n].detach().clone().requires_grad_() for n in names if x[n] is not None}


def call(op: str, x: dict[str, Tensor], cu_seqlens: Tensor | None) -> tuple[Tensor, ...]:
    options: dict[str, Any] = {"cu_seqlens": cu_seqlens, "backend": "torch"}
    options["log_decay"] = x.get("log_decay")
    rest = {n: t for n, t in x.items() if n != "log_decay"}
    if op in GAINS:
        return GAINS[op](**rest, **options, return_prior=True)
    return delta_memory(**({"k": None} | rest), **options)


def offsets(lengths: list[int] | None) -> Tensor | None:
    return None if lengths is None else torch.tensor([0, *lengths]).cumsum(0)


def with_gradients(
    function: Callable[..., tuple[Tensor, ...]], op: str, x: dict[str, Tensor], lengths: list[int] | None
) -> dict[str, Tensor]:
    results = function(op, x, offsets(lengths))
    loss = sum((r * torch.arange(r.numel()).view(r.shape).cos()).sum() for r in results)
    grads = torch.autograd.grad(loss, list(x.values()))
    return dict(enumerate(r.detach() for r in results)) | dict(zip(x, grads, strict=True))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("packed", [False, True])
def test_compiles_whole_and_again_for_other_lengths(op: str, packed: bool) -> None:
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for lengths in ([7, 60, 3], [1, 1, 90], [0, 5, 130]):
        time = sum(lengths)
        x = leaves(op, time, 4, 3, lengths=lengths if packed else None, batch=1 if packed else 2)
        want = with_gradients(call, op, x, lengths if packed else None)
        assert_close(with_gradients(compiled, op, x, lengths if packed else None), want, 1e-12)


@pytest.mark.parametrize("op", OPS)
def test_compiles_for_dynamic_lengths(op: str) -> None:
    """One graph for every length of more than a chunk: no recompilation after the first."""
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager", dynamic=True)
    for i, time in enumerate((300, 310, 512)):
        x = leaves(op, time, 4, 3, batch=2)
        want = with_gradients(call, op, x, None)
        with torch._dynamo.config.patch(error_on_recompile=i > 0):
            assert_close(with_gradients(compiled, op, x, None), want, 1e-12)


@pytest.mark.parametrize("op", OPS)
def test_more_lengths_than_dynamo_recompiles_for(op: str) -> None:
    """A graph per length would end, with fullgraph, in an error at the ninth."""
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        for time in range(65, 78):
            x = leaves(op, time, 4, 3)
            assert all(a.equal(b) for a, b in zip(compiled(op, x, None), call(op, x, None), strict=True))


def test_inductor_with_work_around_the_operations() -> None:
    def layer(q: Tensor, k: Tensor, v: Tensor, noise: Tensor, r: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        k = torch.nn.functional.normalize(k, dim=-1)
        g, cov = diagonal_gain(k, -noise, noise.square(), r.exp(), backend="torch")
        out, state = delta_memory(q, k, v, g, -noise, backend="torch")
        return out.tanh(), state, cov

    torch.manual_seed(0)
    shapes = [(1, 70, 2, 8)] * 4 + [(1, 70, 2)]
    x = [torch.rand(shape, requires_grad=True) for shape in shapes]
    found = []
    for function in (layer, torch.compile(layer, fullgraph=True)):
        results = function(*x)
        loss = sum(r.square().sum() for r in results)
        found.append(dict(enumerate((*results, *torch.autograd.grad(loss, x)))))
    assert_close(found[1], found[0], 1e-5)


def test_compiled_without_gradients() -> None:
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for op in OPS:
        x = leaves(op, 70, 4, 3)
        with torch.no_grad():
            got, want = compiled(op, x, None), call(op, x, None)
        assert all(a.equal(b) for a, b in zip(got, want, strict=True))


# --- gradients by hand against differences, in float64 ---

PACKINGS = [None, [6, 0, 1, 3]]


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("decay", ["channel", "head", "none"])
@pytest.mark.parametrize("lengths", PACKINGS, ids=str)
def test_gradcheck(small_chunks: None, op: str, decay: str, lengths: list[int] | None) -> None:
    time = 9 if lengths is None else sum(lengths)
    x = leaves(op, time, 2, 2, decay=decay, lengths=lengths)
    names = list(x)

    def function(*tensors: Tensor) -> tuple[Tensor, ...]:
        return call(op, dict(zip(names, tensors, strict=True)), offsets(lengths))

    torch.autograd.gradcheck(function, list(x.values()), fast_mode=op == "exact", check_undefined_grad=True)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("lengths", [None, [6, 0, 3]], ids=str)
@pytest.mark.parametrize("initial", [True, False])
@pytest.mark.parametrize("backend", COMPILED)
def test_operator_contract(
    small_chunks: None, op: str, lengths: list[int] | None, initial: bool, backend: str
) -> None:
    """PyTorch's own check of an operator: schema, fake kernel (sizes, strides, dtypes), dispatch.

    Its comparison of values is for equal batches: packed ones keep rows that nobody reads or writes.
    """
    x: dict[str, Any] = leaves(op, 9, 3, 2, lengths=lengths)
    if not initial:
        x = {n: t for n, t in x.items() if n not in ("initial_cov", "initial_state")}
    names = ["q", "k", "v", "gain", "log_decay"]
    if op in GAINS:
        names = ["k", "log_decay", "process_noise", "obs_noise", "info_scale", "initial_cov"]
    dtype = torch.float64 if backend == "torch" else torch.float32
    args = [None if x.get(n) is None else x[n].detach().to(dtype).requires_grad_() for n in names]
    if op in GAINS:
        args += [offsets(lengths), True, True]
    else:
        start = x["initial_state"].detach().to(dtype).requires_grad_() if initial else None
        args += [0.5, start, offsets(lengths), True]
    operators = getattr(torch.ops, f"kdn_{backend}")
    found = getattr(operators, f"{op}_gain" if op in GAINS else "memory").default
    utilities = ["test_schema", "test_autograd_registration", "test_faketensor"]
    torch.library.opcheck(
        found, tuple(args), test_utils=utilities + (["test_aot_dispatch_dynamic"] if lengths is None else [])
    )


# --- the chunk size is not part of the answer ---


@pytest.mark.parametrize("kind", list(GAINS))
@pytest.mark.parametrize("lengths", [None, [5, 100, 0, 45]], ids=str)
def test_chunk_sizes_agree(kind: str, lengths: list[int] | None, monkeypatch: pytest.MonkeyPatch) -> None:
    case = make(kind, 150, 8, 6, lengths=lengths)
    want = run(case, "torch", torch.float64)
    for size in (1, 4, 32):
        monkeypatch.setattr(memory, "CHUNK", size)
        monkeypatch.setattr(gain, "CHUNK", size)
        monkeypatch.setattr(exact, "EVERY", size)
        assert_close(run(case, "torch", torch.float64), want, 1e-12)


@pytest.mark.parametrize("budget", [1, 3000])
def test_segments_agree(budget: int, monkeypatch: pytest.MonkeyPatch) -> None:
    case = make("diagonal", 300, 8, 6, lengths=[5, 200, 0, 95])
    want = run(case, "torch", torch.float64)
    monkeypatch.setattr(memory, "_SEGMENT_NUMBERS", {"cpu": budget})
    assert_close(run(case, "torch", torch.float64), want, 1e-12)
