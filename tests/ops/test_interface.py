"""What the four operations refuse, and the one sentence they refuse it with."""

from typing import Any

import pytest
import torch
from calls import OPS, STATES, TENSORS, Arguments, arguments

from kdn.ops import registry

GAINS = [op for op in OPS if op != "memory"]


@pytest.fixture
def no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    def choose(*_: object) -> None:
        pytest.fail("a backend was chosen before the arguments were checked")

    monkeypatch.setattr(registry, "choose", choose)


def refuses(op: str, args: Arguments, error: type[Exception], *said: str) -> None:
    with pytest.raises(error) as caught:
        OPS[op](**args)
    assert type(caught.value) is error
    for words in said:
        assert words in str(caught.value), (words, str(caught.value))


EVERY_TENSOR = pytest.mark.parametrize(("op", "name"), TENSORS)


@EVERY_TENSOR
def test_wrong_rank(no_work: None, op: str, name: str) -> None:
    args = arguments(op)
    args[name] = args[name][..., None]
    shape = str(list(args[name].shape))
    refuses(op, args, ValueError, name, shape)
    args[name] = args[name][0, 0, ..., 0]
    refuses(op, args, ValueError, name, str(list(args[name].shape)))


@EVERY_TENSOR
@pytest.mark.parametrize("axis", [0, 1, 2, -1])
def test_mismatched_size(no_work: None, op: str, name: str, axis: int) -> None:
    if name in ("k", "q") and not (op == "memory" and name == "k"):
        pytest.skip("the first argument sets the sizes")
    if axis >= arguments(op)[name].ndim:
        pytest.skip("no such axis")
    if (op, name, axis) == ("memory", "v", -1):
        pytest.skip("V is v's own")
    args = arguments(op, 6, batch=2, heads=3)
    args[name] = torch.cat([args[name]] * 2, axis)
    refuses(op, args, ValueError, name, str(list(args[name].shape)))


@EVERY_TENSOR
@pytest.mark.parametrize("dtype", [torch.int64, torch.complex64, torch.bool])
def test_integer_and_complex_tensors(no_work: None, op: str, name: str, dtype: torch.dtype) -> None:
    args = arguments(op)
    args[name] = args[name].to(dtype)
    refuses(op, args, TypeError, name, str(dtype))


@EVERY_TENSOR
def test_not_a_tensor(no_work: None, op: str, name: str) -> None:
    refuses(op, arguments(op) | {name: [1.0]}, TypeError, name, "list")


@EVERY_TENSOR
def test_another_device(no_work: None, op: str, name: str) -> None:
    args = arguments(op)
    args[name] = args[name].to("meta")
    refuses(op, args, ValueError, name, "meta", "cpu")


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("axis", [0, 1, 2, 3])
def test_empty(no_work: None, op: str, axis: int) -> None:
    args = arguments(op)
    first = next(iter(args))
    args[first] = args[first].narrow(axis, 0, 0)
    refuses(op, args, ValueError, first, str(list(args[first].shape)))


@pytest.mark.parametrize("op", GAINS)
class TestValues:
    @pytest.mark.parametrize("value", [0.0, -0.25])
    def test_obs_noise_always(self, no_work: None, op: str, value: float) -> None:
        args = arguments(op)
        args["obs_noise"][0, 2, 1] = value
        refuses(op, args, ValueError, "obs_noise", f"{value:.3g}")

    def test_process_noise_on_request(self, op: str, monkeypatch: pytest.MonkeyPatch) -> None:
        args = arguments(op)
        args["process_noise"][0, 2, 1] = -0.125
        monkeypatch.setenv("KDN_CHECK", "1")
        refuses(op, args, ValueError, "process_noise", "-0.125")
        args["process_noise"][0, 2, 1] = 0
        OPS[op](**args)

    @pytest.mark.parametrize("value", [0, -2.0])
    def test_info_scale(self, no_work: None, op: str, value: float, monkeypatch: pytest.MonkeyPatch) -> None:
        refuses(op, arguments(op) | {"info_scale": value}, ValueError, "info_scale", str(value))
        monkeypatch.setenv("KDN_CHECK", "1")
        args = arguments(op) | {"info_scale": torch.tensor([1.0, value])}
        refuses(op, args, ValueError, "info_scale", f"{value:.3g}")

    @pytest.mark.parametrize("shape", [(3,), (2, 2), (2, 1), (1, 2, 1)])
    def test_info_scale_shape(self, no_work: None, op: str, shape: tuple[int, ...]) -> None:
        args = arguments(op) | {"info_scale": torch.ones(shape)}
        refuses(op, args, ValueError, "info_scale", str(list(shape)))

    def test_info_scale_dtype(self, no_work: None, op: str) -> None:
        args = arguments(op) | {"info_scale": torch.ones(2, dtype=torch.int64)}
        refuses(op, args, TypeError, "info_scale", "torch.int64")


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("decay", ["channel", "head"])
def test_positive_decay_on_request(op: str, decay: str, monkeypatch: pytest.MonkeyPatch) -> None:
    args = arguments(op, decay=decay)
    args["log_decay"][0, 3] = 0.125
    OPS[op](**args)
    monkeypatch.setenv("KDN_CHECK", "1")
    refuses(op, args, ValueError, "log_decay", "0.125")
    args["log_decay"][0, 3] = float("-inf")
    refuses(op, args, ValueError, "log_decay", "-inf")
    args["log_decay"][0, 3] = 0
    OPS[op](**args)


@pytest.mark.parametrize("op", GAINS)
def test_a_bad_value_is_found_and_named_beside_a_nan(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KDN_CHECK", "1")
    for name, value in (("obs_noise", -0.5), ("process_noise", -0.5), ("log_decay", 0.5)):
        args = arguments(op)
        args[name][0, 1] = float("nan")
        OPS[op](**args)  # a NaN alone is not an error
        args[name][0, 3] = value
        refuses(op, args, ValueError, name, str(value))


OFFSETS = [
    ([0, 4, 3, 5], ValueError, ["4 then 3"]),
    ([0, 3, 6], ValueError, ["6", "5"]),
    ([0, 3], ValueError, ["3", "5"]),
    ([1, 3, 5], ValueError, ["1"]),
    ([-1, 3, 5], ValueError, ["-1"]),
    ([0, -2, 5], ValueError, ["0 then -2"]),
    ([0, 9, 5], ValueError, ["9 then 5"]),
    ([0], ValueError, ["[1]"]),
    ([[0, 5]], ValueError, ["[1, 2]"]),
]


@pytest.mark.parametrize("op", OPS)
class TestOffsets:
    @pytest.mark.parametrize(("offsets", "error", "said"), OFFSETS, ids=[str(o[0]) for o in OFFSETS])
    @pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
    def test_bad(
        self,
        no_work: None,
        op: str,
        offsets: list[Any],
        error: type[Exception],
        said: list[str],
        dtype: torch.dtype,
    ) -> None:
        args = arguments(op, initial=True)
        args.pop("initial_cov", None), args.pop("initial_state", None)
        args["cu_seqlens"] = torch.tensor(offsets, dtype=dtype)
        refuses(op, args, error, "cu_seqlens", *said)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.int16, torch.bool])
    def test_dtype(self, no_work: None, op: str, dtype: torch.dtype) -> None:
        args = arguments(op) | {"cu_seqlens": torch.tensor([0, 5]).to(dtype)}
        refuses(op, args, TypeError, "cu_seqlens", str(dtype))
        refuses(op, args | {"cu_seqlens": [0, 5]}, TypeError, "cu_seqlens", "list")

    def test_batch(self, no_work: None, op: str) -> None:
        args = arguments(op, batch=3) | {"cu_seqlens": torch.tensor([0, 5])}
        refuses(op, args, ValueError, "cu_seqlens", "3")

    def test_device(self, no_work: None, op: str) -> None:
        args = arguments(op) | {"cu_seqlens": torch.tensor([0, 5]).to("meta")}
        refuses(op, args, ValueError, "cu_seqlens", "meta")

    def test_states_have_one_row_per_sequence(self, no_work: None, op: str) -> None:
        args = arguments(op) | {"cu_seqlens": torch.tensor([0, 2, 5])}
        name = STATES[op == "memory"]
        refuses(op, args, ValueError, name, str(list(args[name].shape)))


@pytest.mark.parametrize("op", OPS)
def test_backend_names(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    refuses(op, arguments(op) | {"backend": "abacus"}, ValueError, "backend", "abacus", "reference", "torch")
    monkeypatch.setenv("KDN_BACKEND", "slide-rule")
    refuses(op, arguments(op), ValueError, "KDN_BACKEND", "slide-rule", "reference")
    OPS[op](**arguments(op), backend="reference")  # the argument wins


def test_backend_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, module in registry.BACKENDS.items():
        monkeypatch.setenv("KDN_BACKEND", name)
        assert registry.choose("reference", torch.device("cpu")) is registry.BACKENDS["reference"]
        if module.unavailable(torch.device("cpu")) is None:
            assert registry.choose(None, torch.device("cpu")) is module
