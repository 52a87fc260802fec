"""What stands around the memory, by kernel and by PyTorch, against the formulas in float64, written out here."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kdn.mixers.parts import Linear, RMSNorm
from kdn.ops import layer
from kdn.ops.backends import cpu

BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 2e-2}  # in bfloat16 PyTorch rounds after every small step


@pytest.fixture(params=["cpu", "torch"])
def by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who computes: the kernels, or PyTorch where a backend has none."""
    if request.param == "cpu" and cpu.unavailable(torch.device("cpu")) is not None:
        pytest.skip("no compiled kernels here")
    monkeypatch.setenv("KDN_BACKEND", request.param)


def check(
    function: Callable[..., Tensor], formula: Callable[..., Tensor], *inputs: Tensor, bound: float
) -> Tensor:
    """Result and gradients of `function` against `formula` in float64, for inputs of any floating dtypes."""
    ours = [x.detach().requires_grad_() for x in inputs]
    wide = [x.detach().double().requires_grad_() for x in inputs]
    found, expected = function(*ours), formula(*wide)
    assert found.shape == expected.shape
    upstream = torch.randn(expected.shape).to(found.dtype)
    pairs = [("result", found, expected)]
    grads = torch.autograd.grad(found, ours, upstream, materialize_grads=True)
    exact = torch.autograd.grad(expected, wide, upstream.double(), materialize_grads=True)
    for i, (x, a, b) in enumerate(zip(ours, grads, exact, strict=True)):
        assert a.shape == x.shape and a.dtype == x.dtype
        pairs.append((f"gradient {i}", a, b))
    for name, a, b in pairs:
        away = (a.double() - b).norm() / b.norm().clamp_min(1e-30)
        assert away < bound, f"{name} is {away:.1e} off"
    return found


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape).to(dtype)


# --- short convolution ---


def convolved(x: Tensor, taps: Tensor, before: Tensor, activation: bool, normalized: bool) -> Tensor:
    """One sequence, token by token: x [T, H, K], taps [H·K, W], before [W − 1, H·K]."""
    rows = torch.cat([before, x.flatten(1)])
    out = []
    for t in range(x.shape[0]):
        y = sum(taps[:, p] * rows[t + p] for p in range(taps.shape[1]))
        y = y / (1 + torch.exp(-y)) if activation else y
        y = y.view(x.shape[1:])
        out.append(y / (y.square().sum(-1, keepdim=True) + 1e-6).sqrt() if normalized else y)
    return torch.stack(out) if out else x


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize(("activation", "normalized"), [(True, True), (True, False), (False, False)])
@pytest.mark.parametrize(
    ("time", "heads", "width", "taps"), [(1, 2, 8, 4), (70, 2, 37, 4), (33, 1, 16, 1), (5, 3, 64, 6)]
)
def test_convolution(
    by: None,
    time: int,
    heads: int,
    width: int,
    taps: int,
    activation: bool,
    normalized: bool,
    dtype: torch.dtype,
) -> None:
    torch.manual_seed(time)
    x, history = normal(2, time, heads, width, dtype=dtype), normal(2, taps - 1, heads * width, dtype=dtype)
    options = {"activation": activation, "normalized": normalized}
    check(
        lambda x, w, h: layer.short_convolution(x, w, h, **options),
        lambda x, w, h: torch.stack(
            [convolved(*row, activation, normalized) for row in zip(x, [w] * 2, h, strict=True)]
        ),
        x,
        normal(heads * width, taps),
        history,
        bound=BOUNDS[dtype],
    )


@pytest.mark.parametrize("with_history", [False, True])
def test_convolution_of_packed_sequences(by: None, with_history: bool) -> None:
    torch.manual_seed(0)
    lengths, heads, width, taps = [1, 0, 40, 2, 33], 2, 24, 4
    ends = torch.tensor([0, *lengths]).cumsum(0)
    history = normal(len(lengths), taps - 1, heads * width)

    def apart(x: Tensor, w: Tensor, h: Tensor) -> Tensor:
        h = h if with_history else torch.zeros_like(h)
        parts = [convolved(p, w, b, True, True) for p, b in zip(x[0].split(lengths), h, strict=True)]
        return torch.cat(parts)[None]

    def packed(x: Tensor, w: Tensor, h: Tensor) -> Tensor:
        y = layer.short_convolution(x, w, h if with_history else None, ends, normalized=True)
        return y

    given = normal(1, sum(lengths), heads, width), normal(heads * width, taps), history
    check(packed, apart, *given, bound=1e-5)


# --- the others ---


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("shape", [(2, 1, 3, 8), (1, 300, 2, 37), (2, 65, 1, 128)])
def test_decay(by: None, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    f = (4 * torch.randn(shape)).to(dtype)
    f.view(-1)[:2] = torch.tensor([-80.0, 80.0])
    found = check(
        layer.softplus_decay,
        lambda f, a, b: -a.exp()[:, None] * torch.log1p(torch.exp(f + b.view(shape[2:]))),
        f,
        torch.rand(shape[2]),
        normal(shape[2] * shape[3]),
        bound=BOUNDS[dtype],
    )
    assert found.dtype == torch.float32


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("gate", ["none", "sigmoid", "silu"])
@pytest.mark.parametrize("shape", [(2, 1, 3, 8), (1, 300, 2, 37), (2, 600, 64), (3, 5, 1, 2)])
def test_norm(by: None, shape: tuple[int, ...], gate: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)

    def formula(x: Tensor, weight: Tensor, *opening: Tensor) -> Tensor:
        y = x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight
        for g in opening:
            y = y * torch.sigmoid(g) * (g if gate == "silu" else 1)
        return y

    openings = [] if gate == "none" else [3 * normal(*shape, dtype=dtype)]
    check(
        lambda x, w, *g: layer.rms_norm(x, w, 1e-5, *g, silu=gate == "silu"),
        formula,
        normal(*shape, dtype=dtype),
        normal(shape[-1]),
        *openings,
        bound=BOUNDS[dtype],
    )


def test_norm_gives_the_wanted_type(by: None) -> None:
    x, weight = normal(2, 7, 32), normal(32)
    low = layer.rms_norm(x, weight, 1e-5, dtype=torch.bfloat16)
    assert low.dtype == torch.bfloat16
    assert torch.equal(low, layer.rms_norm(x, weight, 1e-5).bfloat16())


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("shape", [(2, 1, 8), (1, 300, 37), (2, 65, 128)])
def test_swiglu(by: None, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    inputs = 3 * normal(*shape, dtype=dtype), normal(*shape, dtype=dtype)
    check(layer.swiglu, lambda g, u: g * torch.sigmoid(g) * u, *inputs, bound=BOUNDS[dtype])


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize(("rows", "n"), [(1, 1), (5, 37), (200, 768), (64, 64)])
@torch.no_grad()
def test_linear_of_row(by: None, rows: int, n: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, weight, bias = (
        normal(1, 1, n, dtype=dtype),
        normal(rows, 2 * n, dtype=dtype)[:, :n],
        normal(rows, dtype=dtype),
    )
    for given in (None, bias):
        wanted = weight.double() @ x.double().view(-1) + (0 if given is None else given.double())
        found = layer.linear_of_row(x, weight, given)
        assert found.shape == (1, 1, rows) and found.dtype == dtype
        assert (found.view(-1).double() - wanted).norm() <= BOUNDS[dtype] * wanted.norm()
    turned = weight.t().contiguous().t()  # its rows are not in one piece
    assert torch.allclose(
        layer.linear_of_row(x, turned).float(), layer.linear_of_row(x, weight).float(), 0.02, 0.02
    )


@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("classes", [1, 5, 16, 1003])
def test_softmax_loss(by: None, classes: int, dtype: torch.dtype, gradient: bool) -> None:
    torch.manual_seed(0)
    logits = (5 * torch.randn(9, classes)).to(dtype)
    logits[0] += 60_000  # what matters is differences
    labels = torch.randint(classes, (9,))
    p = logits.double().softmax(-1)
    room = logits.clone()
    loss = layer.softmax_loss_(room, labels, gradient=gradient)
    torch.testing.assert_close(loss.double(), -p.gather(1, labels[:, None])[:, 0].log(), atol=1e-4, rtol=1e-5)
    if gradient:
        wanted = p.scatter_add(1, labels[:, None], p.new_full((9, 1), -1.0))
        torch.testing.assert_close(
            room.double(), wanted, atol=4e-3 if dtype == torch.bfloat16 else 1e-6, rtol=0
        )


def test_softmax_loss_keeps_nan_where_it_is(by: None) -> None:
    logits = normal(3, 40)
    logits[1, 7], logits[2, 3] = float("nan"), float("inf")
    loss = layer.softmax_loss_(logits, torch.zeros(3, dtype=torch.long), gradient=True)
    assert loss.isfinite().tolist() == [True, False, False]


@pytest.mark.parametrize("label", [-1, 40])
def test_a_label_beyond_the_classes_is_an_error(by: None, label: int) -> None:
    with pytest.raises((IndexError, RuntimeError)):
        layer.softmax_loss_(normal(1, 40), torch.tensor([label]), gradient=True)


# --- what the kernels have to keep ---


def everything(x: Tensor, gate: Tensor, weight: Tensor, taps: Tensor, rate: Tensor, bias: Tensor) -> Tensor:
    y = layer.short_convolution(x, taps, normalized=True)
    y = layer.rms_norm(y, weight, 1e-5, gate, silu=True)
    y = y + layer.softplus_decay(gate, rate, bias)
    return layer.swiglu(y.flatten(2), gate.flatten(2))


def inputs_of_everything(time: int = 40, heads: int = 3, width: int = 20) -> list[Tensor]:
    torch.manual_seed(0)
    shape = (2, time, heads, width)
    weights = normal(width), normal(heads * width, 4), torch.rand(heads), normal(heads * width)
    return [x.requires_grad_() for x in (normal(*shape), normal(*shape), *weights)]


def test_every_instruction_set(instructions: str) -> None:
    inputs = inputs_of_everything(width=37)
    wide = [x.detach().double().requires_grad_() for x in inputs]
    found = torch.autograd.grad(everything(*inputs).square().sum(), inputs)
    expected = torch.autograd.grad(everything(*wide).square().sum(), wide)  # float64: PyTorch's
    for a, b in zip(found, expected, strict=True):
        assert (a - b).norm() / b.norm() < 1e-5
    logits, labels = normal(5, 1000), torch.arange(5)
    loss = layer.softmax_loss_(logits.clone(), labels, gradient=False)
    torch.testing.assert_close(loss, torch.nn.functional.cross_entropy(logits, labels, reduction="none"))
    x, weight = normal(70), normal(50, 70)
    torch.testing.assert_close(layer.linear_of_row(x, weight), weight @ x)


def test_graphs_hold_the_kernels_and_gradients_are_the_same() -> None:
    inputs = inputs_of_everything()
    compiled = torch.compile(everything, fullgraph=True, backend="aot_eager")
    for a, b in zip(
        torch.autograd.grad(compiled(*inputs).square().sum(), inputs),
        torch.autograd.grad(everything(*inputs).square().sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(a, b)


def test_operators_are_what_torch_expects_of_them() -> None:
    if cpu.unavailable(torch.device("cpu")) is not None:
        pytest.skip("no compiled kernels here")
    from torch.library import opcheck

    ops = torch.ops.kdn_cpu
    x, gate, weight, taps, rate, bias = inputs_of_everything(time=6)
    opcheck(ops.convolution, (x, taps, None, None, True, 1e-6))
    opcheck(ops.convolution, (x, taps, normal(2, 3, 60).requires_grad_(), None, True, 0.0))
    opcheck(ops.decay, (gate, rate, bias))
    opcheck(ops.read_out, (x, weight, gate, 1e-5, True, torch.float32))
    opcheck(ops.read_out, (x, weight, None, 1e-5, False, torch.float32))
    opcheck(ops.swiglu, (x.flatten(2), gate.flatten(2)))
    opcheck(ops.softmax_loss, (normal(3, 8), torch.arange(3), True))


def test_same_bits_for_any_number_of_threads() -> None:
    inputs = inputs_of_everything(time=600)
    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 1, 2, 5):
            torch.set_num_threads(threads)
            y = everything(*inputs)
            found.append([y, *torch.autograd.grad(y, inputs, torch.ones_like(y))])
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


@pytest.mark.parametrize("at", [0, 20, 39])
def test_a_nan_stays_in_its_sequence_and_after_its_token(by: None, at: int) -> None:
    inputs = [x.detach() for x in inputs_of_everything()]
    inputs[0][1, at] = float("nan")
    y = everything(*inputs)
    assert y[0].isfinite().all() and y[1, :at].isfinite().all()
    assert y[1, at : at + 4].isnan().all()


@pytest.mark.parametrize("name", ["x", "gate"])
def test_strided_inputs(by: None, name: str) -> None:
    """As views of wider projections, or with heads before tokens, they need no copy and give the same."""
    inputs = [x.detach() for x in inputs_of_everything()]
    want = everything(*inputs)
    at = ["x", "gate"].index(name)
    inputs[at] = inputs[at].transpose(1, 2).contiguous().transpose(1, 2)
    torch.testing.assert_close(everything(*inputs), want)


def test_fake_tensors_do_not_reach_the_kernels() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(), torch.no_grad():
        x, gate = torch.randn(2, 5, 3, 8), torch.randn(2, 5, 3, 8)
        out = everything(x, gate, torch.ones(8), torch.ones(24, 4), torch.ones(3), torch.zeros(24))
    assert out.shape == (2, 5, 24)


# --- where the kernels must step aside ---


def layers_of_a_block(x: Tensor) -> Tensor:
    return layer.swiglu(layer.rms_norm(x, torch.ones(8), 1e-5), x)


def test_forward_mode_and_functional_transforms_see_what_is_computed() -> None:
    x, direction = torch.randn(1, 3, 8), torch.randn(1, 3, 8)
    step = 1e-3
    expected = (layers_of_a_block(x + step * direction) - layers_of_a_block(x - step * direction)) / (
        2 * step
    )
    with torch.autograd.forward_ad.dual_level():
        out = layers_of_a_block(torch.autograd.forward_ad.make_dual(x, direction))
        tangent = torch.autograd.forward_ad.unpack_dual(out).tangent
    torch.testing.assert_close(tangent, expected, atol=1e-2, rtol=1e-2)
    torch.testing.assert_close(torch.func.functionalize(layers_of_a_block)(x), layers_of_a_block(x))
    rows = torch.randn(4, 1, 3, 8)
    torch.testing.assert_close(
        torch.func.vmap(layers_of_a_block)(rows), torch.stack([layers_of_a_block(r) for r in rows])
    )


@torch.no_grad()
def test_traces_hold_what_is_computed() -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    x, y = torch.randn(2, 1, 3, 8)
    linear = Linear(8, 4)
    for traced in (make_fx(layers_of_a_block)(x), torch.jit.trace(layers_of_a_block, x)):
        torch.testing.assert_close(traced(y), layers_of_a_block(y))
    row = torch.randn(1, 8)
    torch.testing.assert_close(torch.jit.trace(linear, torch.randn(1, 8))(row), linear(row))


@torch.no_grad()
def test_shapes_and_devices_that_do_not_fit_are_pytorchs_errors() -> None:
    x = torch.randn(2, 4, 8)
    with pytest.raises(RuntimeError):
        layer.swiglu(x, torch.randn(2, 4, 24))
    assert torch.equal(layer.swiglu(x, x[..., :1]), torch.nn.functional.silu(x) * x[..., :1])
    with pytest.raises(ValueError, match="one per row"):
        layer.softmax_loss_(torch.randn(50, 8), torch.zeros(2).long(), gradient=True)
    with pytest.raises(RuntimeError):
        layer.rms_norm(x, torch.ones(4), 1e-5)
    with pytest.raises(RuntimeError):
        Linear(6, 4)(torch.randn(2, 3))
    with pytest.raises((RuntimeError, NotImplementedError)):
        Linear(8, 8, device="meta")(torch.randn(1, 8))
    with pytest.raises(RuntimeError):
        RMSNorm(8, eps=1e-5, device="meta")(torch.randn(1, 2, 8))
    given, weight = torch.randn(2, 4, 3, 8), torch.randn(24, 4)
    with pytest.raises(RuntimeError):
        layer.short_convolution(given, torch.randn(8, 4))
    with pytest.raises(RuntimeError):
        layer.short_convolution(given, weight, torch.randn(3, 3, 24))


@pytest.mark.parametrize("options", [{}, {"eps": 1e-5, "elementwise_affine": False}])
def test_norm_takes_what_pytorchs_takes(options: dict[str, object]) -> None:
    x = torch.randn(2, 3, 4, 8)
    for shape in (8, (4, 8)):
        ours, theirs = RMSNorm(shape, **options), torch.nn.RMSNorm(shape, **options)
        torch.testing.assert_close(ours(x), theirs(x))
    assert RMSNorm(8, eps=1e-5, device="meta")(x.to("meta")).shape == x.shape


def test_far_gates_are_closed() -> None:
    gate = torch.tensor([-1e37, -200.0, 200.0, 1e37]).view(1, 1, 4)
    torch.testing.assert_close(
        layer.swiglu(gate, torch.ones(1, 1, 4)).flatten(), torch.tensor([0.0, 0.0, 200.0, 1e37])
    )
