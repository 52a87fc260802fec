"""The loss that never holds all logits, against cross entropy of all logits with autograd."""

import threading
import time
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kdn.models import loss as module
from kdn.models.loss import next_token_loss, token_loss

B, T, D, V = 2, 11, 6, 17


def problem(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(B, T, D, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(V, D, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    labels = torch.randint(V, (B, T), generator=generator)
    labels[0, 3:6] = -100
    labels[1, 0] = labels[1, -1] = -100
    return hidden, weight, labels


def whole(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    logits = (hidden @ weight.T)[:, :-1].reshape(-1, V)
    return F.cross_entropy(logits, labels[:, 1:].reshape(-1), ignore_index=-100)


@pytest.fixture(params=[1, 3 * V, module.PIECE], ids=["row by row", "3 rows", "at once"])
def pieces(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PIECE", request.param)


@pytest.mark.parametrize("upstream", [1.0, -2.5])
def test_value_and_gradients_are_those_of_cross_entropy(pieces: None, upstream: float) -> None:
    hidden, weight, labels = problem()
    found, expected = next_token_loss(hidden, weight, labels), whole(hidden, weight, labels)
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-12)
    inputs = (hidden, weight)
    for x, y in zip(
        torch.autograd.grad(upstream * found, inputs),
        torch.autograd.grad(upstream * expected, inputs),
        strict=True,
    ):
        torch.testing.assert_close(x, y, atol=1e-12, rtol=1e-12)


def test_gradients_by_finite_differences(pieces: None) -> None:
    hidden, weight, labels = problem()
    assert torch.autograd.gradcheck(lambda h, w: next_token_loss(h, w, labels), (hidden, weight))


def test_targets_are_not_shifted() -> None:
    hidden, weight, labels = problem()
    expected = F.cross_entropy((hidden @ weight.T).flatten(0, 1), labels.flatten(), ignore_index=-100)
    torch.testing.assert_close(token_loss(hidden, weight, labels), expected)


@pytest.mark.parametrize("wanted", ["hidden", "weight"])
def test_only_the_gradient_that_is_wanted(wanted: str) -> None:
    hidden, weight, labels = problem()
    expected = torch.autograd.grad(whole(hidden, weight, labels), hidden if wanted == "hidden" else weight)
    if wanted == "hidden":
        found = torch.autograd.grad(next_token_loss(hidden, weight.detach(), labels), hidden)
    else:
        found = torch.autograd.grad(next_token_loss(hidden.detach(), weight, labels), weight)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("count", [None, 0, 7, torch.tensor(0), torch.tensor(7.0)])
@pytest.mark.parametrize("time_", [1, T])
def test_nothing_to_predict_is_zero_with_zero_gradients(count: Tensor | float | None, time_: int) -> None:
    hidden, weight, labels = problem()
    labels = labels[:, :time_] if time_ == 1 else torch.full_like(labels, -100)
    loss = next_token_loss(hidden[:, :time_], weight, labels, count=count)
    assert loss == 0
    for grad in torch.autograd.grad(loss, (hidden, weight)):
        assert (grad == 0).all()


@pytest.mark.parametrize("make", [float, torch.tensor])
def test_a_count_of_all_calls_makes_their_losses_add_up(make: Callable[[int], float]) -> None:
    hidden, weight, labels = problem()
    count = int((labels[:, 1:] != -100).sum())
    parts = [
        next_token_loss(hidden[b : b + 1], weight, labels[b : b + 1], count=make(count)) for b in range(B)
    ]
    expected = whole(hidden, weight, labels)
    torch.testing.assert_close(parts[0] + parts[1], expected)
    found = torch.autograd.grad(parts[0] + parts[1], (hidden, weight))
    torch.testing.assert_close(found, torch.autograd.grad(expected, (hidden, weight)))


@pytest.mark.parametrize("how", ["autocast", "bfloat16"])
def test_low_precision_is_close(pieces: None, how: str) -> None:
    """The sum over the vocabulary is in float32, so only the logits' own rounding is seen."""
    hidden, weight, labels = problem(torch.float32 if how == "autocast" else torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
        loss = next_token_loss(hidden, weight, labels)
    assert loss.dtype == torch.float32
    found = torch.autograd.grad(loss, (hidden, weight))
    high = tuple(x.detach().double().requires_grad_() for x in (hidden, weight))
    expected = whole(*high, labels)
    assert loss.item() == pytest.approx(expected.item(), rel=0.01)
    for x, y, like in zip(found, torch.autograd.grad(expected, high), (hidden, weight), strict=True):
        assert x.dtype == like.dtype
        assert (x.double() - y).norm() < 0.02 * y.norm()


def test_scale_of_bfloat16_gradients_is_not_rounded() -> None:
    """1 / 21 is 0.2% off in bfloat16; on average over many numbers, gradients must not be."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, 22, 400, generator=generator).bfloat16().requires_grad_()
    weight = (0.1 * torch.randn(50, 400, generator=generator)).bfloat16()
    labels = torch.randint(50, (1, 22), generator=generator)
    sums = torch.autograd.grad(next_token_loss(hidden, weight, labels, count=1), hidden)[0].float()
    for count in (21, 43):  # whose inverses bfloat16 rounds by 0.17% and 0.20%
        found = torch.autograd.grad(next_token_loss(hidden, weight, labels, count=count), hidden)[0].float()
        assert float((found * sums).sum() / sums.square().sum()) == pytest.approx(1 / count, rel=3e-4)


def test_hidden_states_of_another_precision_than_the_head() -> None:
    hidden, weight, labels = problem(torch.float32)
    low = hidden.detach().bfloat16().requires_grad_()
    loss = next_token_loss(low, weight, labels)
    loss.backward()
    assert loss.item() == pytest.approx(whole(hidden, weight, labels).item(), rel=0.01)
    assert low.grad is not None and low.grad.dtype == torch.bfloat16


def test_large_logits_do_not_overflow() -> None:
    hidden, weight, labels = problem(torch.float32)
    loss = next_token_loss(1e4 * hidden, weight, labels)
    torch.testing.assert_close(loss, whole(1e4 * hidden, weight, labels))
    assert all(g.isfinite().all() for g in torch.autograd.grad(loss, (hidden, weight)))


def test_a_second_derivative_is_refused() -> None:
    """Gradients are made in the forward pass, so it would be wrong, not slow."""
    hidden, weight, labels = problem()
    loss = next_token_loss(hidden, weight, labels).square()
    (grad,) = torch.autograd.grad(loss, hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


class Products(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts matrix products and notes the largest tensor that is made."""

    def __init__(self) -> None:
        super().__init__()
        self.products, self.largest = 0, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = function(*args, **(kwargs or {}))
        self.products += function in (torch.ops.aten.mm.default, torch.ops.aten.mm.out)
        if isinstance(out, Tensor):
            self.largest = max(self.largest, out.numel())
        return out


def test_evaluation_does_not_pay_for_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """One product per piece without gradients, three with them."""
    hidden, weight, labels = problem()
    kept = int((labels[:, 1:] != -100).sum())
    monkeypatch.setattr(module, "PIECE", 4 * V)
    pieces = -(-kept // 4)
    with torch.no_grad(), Products() as without:
        next_token_loss(hidden, weight, labels)
    with Products() as with_gradients:
        next_token_loss(hidden, weight, labels).backward()
    assert (without.products, with_gradients.products) == (pieces, 3 * pieces)


@pytest.mark.parametrize("rows", [40, 400])
def test_no_tensor_grows_with_tokens_times_vocabulary(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    vocabulary, width = 500, 3
    monkeypatch.setattr(module, "PIECE", 20 * vocabulary)
    hidden = torch.randn(1, rows + 1, width, requires_grad=True)
    weight = torch.randn(vocabulary, width, requires_grad=True)
    labels = torch.randint(vocabulary, (1, rows + 1))
    with Products() as seen:
        next_token_loss(hidden, weight, labels).backward()
    assert seen.largest == 20 * vocabulary


def resident() -> int:
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * 4096


def test_peak_memory_is_that_of_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """All logits would be 512 MiB, a few copies of a piece (8 MiB) are allowed; measured as the process's growth."""
    monkeypatch.setattr(module, "PIECE", 2**21)
    rows, vocabulary = 4096, 32768
    hidden = torch.randn(1, rows, 8, requires_grad=True)
    weight = torch.randn(vocabulary, 8, requires_grad=True)
    labels = torch.randint(vocabulary, (1, rows))
    next_token_loss(hidden[:, :65], weight, labels[:, :65]).backward()  # first use of threads and libraries
    highest, done = resident(), threading.Event()
    before = highest

    def watch() -> None:
        nonlocal highest
        while not done.is_set():
            highest = max(highest, resident())
            time.sleep(0.001)

    watcher = threading.Thread(target=watch)
    watcher.start()
    next_token_loss(hidden, weight, labels).backward()
    done.set()
    watcher.join()
    assert highest - before < 128 * 2**20
