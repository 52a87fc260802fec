"""What the four operations accept and leave alone: precisions, strides, aliasing, NaN, parts of gradients."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from calls import OPS, STATES, TENSORS, arguments, evaluate
from cases import Case, assert_close, distance, make, run
from torch import Tensor

EVERY_TENSOR = pytest.mark.parametrize(("op", "name"), TENSORS)
GAINS = [op for op in OPS if op != "memory"]


# --- a NaN stays in its sequence ---


@EVERY_TENSOR
@pytest.mark.parametrize("packed", [False, True])
def test_nan_poisons_its_own_sequence_only(backend: str, op: str, name: str, packed: bool) -> None:
    lengths = [20, 70, 5] if packed else None
    time = 95 if packed else 70
    args = arguments(op, time, batch=1 if packed else 3, lengths=lengths)
    options = {} if op == "memory" else {"return_prior": True}
    if packed:
        args["cu_seqlens"] = torch.tensor([0, 20, 90, 95])
    clean = evaluate(op, args, backend, **options)
    poisoned = dict(args)
    poisoned[name] = args[name].clone()
    where = (0, 30) if packed and name not in STATES else (1,) if name in STATES else (1, 10)
    poisoned[name][(*where, *[0] * (args[name].ndim - len(where)))] = float("nan")
    dirty = evaluate(op, poisoned, backend, **options)
    for key, x in dirty.items():
        if key == "∂info_scale":  # a sum over all sequences
            continue
        by_sequence = packed and x.shape[:2] == (1, time)
        pieces = x[0].split([20, 70, 5]) if by_sequence else x.unbind(0)
        wanted = clean[key][0].split([20, 70, 5]) if by_sequence else clean[key].unbind(0)
        for i in (0, 2):
            assert distance(pieces[i], wanted[i]) < 1e-6, key
        if key.startswith("result") and name != "q":
            assert pieces[1].isnan().any() or (name == "obs_noise" and key == "result 2"), key
    grads = [k for k in dirty if k.startswith("∂") and k != "∂info_scale"]
    assert any(dirty[k].isnan().any() for k in grads)


# --- inputs are left alone, results are new ---


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("time", [1, 70])
@pytest.mark.parametrize("packed", [False, True])
def test_inputs_are_not_modified_and_results_do_not_alias(
    backend: str, op: str, time: int, packed: bool
) -> None:
    lengths = [time, 0] if packed else None
    args = arguments(op, time, lengths=lengths, batch=1 if packed else 2)
    if packed:
        args["cu_seqlens"] = torch.tensor([0, time, time])
    before = {n: x.clone() for n, x in args.items()}
    versions = {n: x._version for n, x in args.items()}
    found = evaluate(op, args, backend)
    assert all(x.equal(before[n]) and x._version == versions[n] for n, x in args.items())
    with torch.no_grad():
        results = OPS[op](**args, backend=backend)
    owned = [x.untyped_storage().data_ptr() for x in (*args.values(), *results)]
    assert len(set(owned)) == len(owned)
    owned = [x.untyped_storage().data_ptr() for x in (*args.values(), *found.values())]
    assert len(set(owned)) == len(owned)


# --- precisions ---


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_changes_nothing(backend: str, op: str, dtype: torch.dtype) -> None:
    args = {n: x.requires_grad_() for n, x in arguments(op, 70, batch=2, dtype=dtype).items()}
    want = OPS[op](**args, backend=backend)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = OPS[op](**args, backend=backend)
    assert got[0].dtype == dtype
    assert got[1].dtype == torch.float32
    assert all(a.equal(b) for a, b in zip(got, want, strict=True))
    # The backward pass too; inside autocast only by hand-written ones, as PyTorch advises against it there.
    grads = [torch.autograd.grad(sum(x.square().sum() for x in r), list(args.values())) for r in (want, got)]
    assert all(a.equal(b) for a, b in zip(*grads, strict=True))


@pytest.mark.parametrize("op", OPS)
def test_autocast_around_the_backward_pass(fast_backend: str, op: str) -> None:
    args = arguments(op, 70, batch=2)
    want = evaluate(op, args, fast_backend)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = evaluate(op, args, fast_backend)
    assert all(got[name].equal(want[name]) for name in want)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_dtypes_of_results_and_gradients(backend: str, op: str, dtype: torch.dtype) -> None:
    args = arguments(op, 5, dtype=dtype)
    states = STATES[op == "memory"]
    args[states] = args[states].to(torch.float64 if dtype == torch.float64 else torch.float32)
    found = evaluate(op, args, backend)
    assert found["result 0"].dtype == dtype
    assert found["result 1"].dtype == args[states].dtype
    assert all(found[f"∂{n}"].dtype == x.dtype for n, x in args.items())


@pytest.mark.parametrize("op", OPS)
def test_one_float64_argument_makes_float64_states(backend: str, op: str) -> None:
    for name, x in arguments(op, 5).items():
        found = evaluate(op, arguments(op, 5) | {name: x.double()}, backend)
        assert found["result 1"].dtype == torch.float64
        assert found[f"∂{name}"].dtype == torch.float64


# --- what is accepted ---


@pytest.mark.parametrize("op", GAINS)
def test_forms_of_info_scale(backend: str, op: str) -> None:
    args = arguments(op, 9) | {"info_scale": torch.tensor([3.0, 3.0])}
    want = evaluate(op, args, backend)
    for shape in [(), (1,), (2,), (1, 1, 2), (1, 1)]:
        got = evaluate(op, args | {"info_scale": torch.full(shape, 3.0)}, backend)
        assert got["∂info_scale"].shape == shape
        assert distance(got["∂info_scale"].sum(), want["∂info_scale"].sum()) < 1e-5
        assert all(got[f"result {i}"].equal(want[f"result {i}"]) for i in (0, 1))
    for number in (3, 3.0):
        got = evaluate(op, args | {"info_scale": number}, backend)
        assert all(x.equal(want[name]) for name, x in got.items())


@pytest.mark.parametrize("op", OPS)
def test_int32_and_int64_offsets(backend: str, op: str) -> None:
    args = arguments(op, 9, lengths=[4, 0, 5])
    offsets = torch.tensor([0, 4, 4, 9])
    want = evaluate(op, args | {"cu_seqlens": offsets}, backend)
    strided = torch.stack((offsets, offsets), 1)[:, 0]
    for other in (offsets.int(), strided):
        got = evaluate(op, args | {"cu_seqlens": other}, backend)
        assert all(got[name].equal(want[name]) for name in want)


def _transposed(x: Tensor) -> Tensor:
    return x.transpose(0, 1).contiguous().transpose(0, 1)


def _gapped(x: Tensor) -> Tensor:
    return torch.stack((x, torch.full_like(x, 1e30)), -1)[..., 0]


def _reversed_axes(x: Tensor) -> Tensor:
    return x.permute(*reversed(range(x.ndim))).contiguous().permute(*reversed(range(x.ndim)))


def _expanded(x: Tensor) -> Tensor:
    return x[:1].expand(x.shape)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("layout", [_transposed, _gapped, _reversed_axes, _expanded])
def test_strides(backend: str, op: str, layout: Callable[[Tensor], Tensor]) -> None:
    args = arguments(op, 9, batch=2)
    strided = {n: x if x.ndim < 2 else layout(x) for n, x in args.items()}
    plain = {n: x.contiguous().clone() for n, x in strided.items()}
    got, want = evaluate(op, strided, backend), evaluate(op, plain, backend)
    assert_close(got, want, 1e-6)


@pytest.mark.parametrize("op", OPS)
def test_gradients_of_a_plain_sum(backend: str, op: str) -> None:
    """A sum hands over an expanded gradient, with strides of 0."""
    args = {n: x.requires_grad_() for n, x in arguments(op, 70, batch=2).items()}
    out, state = OPS[op](**args, backend=backend)
    got = torch.autograd.grad(out.sum() + state.sum(), list(args.values()), retain_graph=True)
    ones = [torch.ones_like(out), torch.ones_like(state)]
    want = torch.autograd.grad([out, state], list(args.values()), ones)
    assert max(distance(a, b) for a, b in zip(got, want, strict=True)) < 1e-6


@pytest.mark.parametrize("gain", GAINS)
@pytest.mark.parametrize(("heads", "width", "values"), [(1, 1, 1), (2, 1, 3), (3, 2, 1), (1, 5, 7)])
def test_sizes_of_one(fast_backend: str, gain: str, heads: int, width: int, values: int) -> None:
    for decay in ("channel", "head", "none"):
        case: Case = make(gain, 67, width, values, heads=heads, decay=decay)
        want = run(case, "reference", torch.float64)
        assert_close(run(case, fast_backend, torch.float64), want, 1e-11 if fast_backend == "torch" else 1e-5)


# --- gradients of parts ---


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("part", [0, 1, 2])
def test_gradient_of_one_result_alone(fast_backend: str, op: str, part: int) -> None:
    if part == 2 and op == "memory":
        pytest.skip("the memory has two results")
    options = {} if op == "memory" else {"return_prior": True}
    # An exact filter has forgotten its start to the last bit after 70 tokens.
    time = 12 if op == "exact" else 70
    grads = []
    for backend in ("reference", fast_backend):
        args = {n: x.requires_grad_() for n, x in arguments(op, time, batch=2, dtype=torch.float64).items()}
        result = OPS[op](**args, **options, backend=backend)[part]
        names = list(args)
        found = torch.autograd.grad(result.square().sum(), list(args.values()), allow_unused=True)
        filled = [torch.zeros_like(args[n]) if g is None else g for n, g in zip(names, found, strict=True)]
        grads.append(filled)
    assert max(distance(a, b) for a, b in zip(grads[1], grads[0], strict=True)) < 1e-5


@EVERY_TENSOR
def test_gradient_of_one_argument_alone(backend: str, op: str, name: str) -> None:
    args = arguments(op, 9)
    want = evaluate(op, args, backend)[f"∂{name}"]
    leaf = args[name].clone().requires_grad_()
    results = OPS[op](**args | {name: leaf}, backend=backend)
    generator = torch.Generator().manual_seed(3)
    weights = [torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.dtype) for x in results]
    loss = sum((x * w).sum() for x, w in zip(results, weights, strict=True))
    (got,) = torch.autograd.grad(loss, leaf)
    assert distance(got, want) < 1e-6


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(backend: str, op: str, mode: Callable[[], Any]) -> None:
    args = {n: x.requires_grad_() for n, x in arguments(op, 70).items()}
    want = OPS[op](**args, backend=backend)
    with mode():
        got = OPS[op](**args, backend=backend)
    assert all(x.requires_grad for x in want)
    assert not any(x.requires_grad for x in got)
    assert all(a.equal(b) for a, b in zip(got, want, strict=True))
