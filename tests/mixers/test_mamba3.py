"""Mamba-3 against its equations, walked token by token with rotation matrices and two terms a token."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kdn.mixers.mamba3 import Mamba3MIMO, Mamba3SISO, Mamba3State

HIDDEN, P, N, H = 24, 12, 16, 4
RANKS = {"siso": 1, "mimo": 3}
Mixer = Mamba3SISO | Mamba3MIMO


@pytest.fixture(params=list(RANKS))
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def build(kind: str, dtype: torch.dtype = torch.float64, seed: int = 0) -> Mixer:
    """A mixer with nothing at its start value, whose Δ, decay, λ and angles are all of order one."""
    torch.manual_seed(seed)
    sizes = {"value_head_dim": P, "state_dim": N}
    mixer = (
        Mamba3SISO(HIDDEN, 2, 16, **sizes)
        if kind == "siso"
        else Mamba3MIMO(HIDDEN, 2, 16, mimo_rank=RANKS[kind], **sizes)
    )
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
        mixer.dt_bias.normal_()
        mixer.in_proj.weight.mul_(2)
        mixer.in_proj.weight.split(mixer.widths)[5].mul_(4)  # A: some heads at their slowest
    return mixer.to(dtype)


def tokens(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 1) -> Tensor:
    return torch.randn(*shape, HIDDEN, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(
        dtype
    )


def pair(kind: str, i: int) -> tuple[int, int]:
    """The two channels that angle i turns."""
    return (2 * i, 2 * i + 1) if kind == "siso" else (i, i + N // 2)


def walk(p: dict[str, Tensor], kind: str, x: Tensor) -> Tensor:
    """y of one sequence x [T, hidden]: the equations, h itself rotated and B and C left as they are."""
    ranks = RANKS[kind]
    sizes = [H * P, H * P, ranks * N, ranks * N, H, H, H, N // 4]
    blocks = torch.split(p["in_proj.weight"], sizes)

    def normed(v: Tensor, name: str) -> Tensor:
        v = v.reshape(ranks, N)
        return v / torch.sqrt((v**2).mean(1, keepdim=True) + 1e-5) * p[f"{name}_norm.weight"]

    ys = []
    h = [torch.zeros(N, P, dtype=x.dtype) for _ in range(H)]
    previous: list[Tensor] | None = None  # per head, Σ_r B x of the token before
    for x_t in x:
        z, v, b, c, dt, a, trap, angles = (w @ x_t for w in blocks)
        b, c = normed(b, "B"), normed(c, "C")
        written, y = [], []
        for k in range(H):
            delta = torch.log1p(torch.exp(dt[k] + p["dt_bias"][k]))
            alpha = torch.exp(-delta * torch.clamp(torch.log1p(torch.exp(a[k])), min=1e-4))
            lam = 1 / (1 + torch.exp(-trap[k]))
            turn = torch.eye(N, dtype=x.dtype)
            for i in range(N // 4):
                theta = -delta * math.pi * torch.tanh(angles[i])
                m, n = pair(kind, i)
                block = torch.stack((theta.cos(), -theta.sin(), theta.sin(), theta.cos())).reshape(2, 2)
                rows = torch.tensor([[m], [n]]), torch.tensor([[m, n]])
                turn = turn.index_put(rows, block)
            own = slice(k * P, (k + 1) * P)
            keys, queries = b + p["B_bias"][k], c + p["C_bias"][k]
            values = v[own].expand(ranks, P) * (p["mimo_x"][k] if ranks > 1 else 1)
            gates = z[own].expand(ranks, P) * (p["mimo_z"][k] if ranks > 1 else 1)
            update = sum(torch.outer(keys[r], values[r]) for r in range(ranks))
            assert isinstance(update, Tensor)
            h[k] = alpha * turn @ h[k] + lam * delta * update
            if previous is not None:
                h[k] = h[k] + (1 - lam) * delta * alpha * turn @ previous[k]
            written.append(update)
            read = queries @ h[k] + p["D"][k] * values
            gated = read * gates / (1 + torch.exp(-gates))
            y.append((gated * p["mimo_o"][k]).sum(0) if ranks > 1 else gated[0])
        previous = written
        ys.append(p["out_proj.weight"] @ torch.cat(y))
    return torch.stack(ys)


def oracle(mixer: Mixer, kind: str, x: Tensor) -> Tensor:
    p = {name: value.detach().double() for name, value in mixer.named_parameters()}
    return torch.stack([walk(p, kind, row.double()) for row in x])


def error(found: Tensor, expected: Tensor) -> float:
    found, expected = found.detach().double(), expected.detach().double()
    return float((found - expected).abs().max() / expected.abs().max())


def distance(found: Mamba3State, expected: Mamba3State) -> float:
    """The largest error of any field; −π and π are the same angle."""
    errors = [
        float((f - e).abs().max() / (1 + e.abs().max()))
        for f, e in zip(found[:-1], expected[:-1], strict=True)
    ]
    return max(*errors, float(torch.sin((found.angle - expected.angle) / 2).abs().max()))


def split(mixer: Mixer, x: Tensor, cuts: list[int]) -> tuple[Tensor, Mamba3State]:
    """y of one call per stretch between cuts."""
    ys, state = [], None
    for a, b in itertools.pairwise([0, *cuts, x.shape[1]]):
        y, state = mixer(x[:, a:b], state)
        ys.append(y)
    assert state is not None
    return torch.cat(ys, 1), state


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 1e-4)])
def test_agrees_with_the_equations(kind: str, dtype: torch.dtype, tolerance: float) -> None:
    mixer, x = build(kind, dtype), tokens(2, 37, dtype=dtype)
    y, _ = mixer(x)
    assert y.dtype == dtype
    assert error(y, oracle(mixer, kind, x)) < tolerance


def test_low_precision_is_near(kind: str) -> None:
    mixer, x = build(kind, torch.float32), tokens(2, 37, dtype=torch.float32)
    expected = oracle(mixer, kind, x)
    with torch.autocast("cpu", torch.bfloat16):
        y, state = mixer(x)
    assert state.memory.dtype == state.angle.dtype == torch.float32
    assert state.last_b.dtype == state.last_x.dtype == torch.bfloat16
    assert error(y, expected) < 0.1
    y, _ = mixer.to(torch.bfloat16)(x.to(torch.bfloat16))
    assert y.dtype == torch.bfloat16
    assert error(y, expected) < 0.1


def test_gradients_are_those_of_the_equations(kind: str) -> None:
    """Of every parameter and the input, through a cut: the states pass gradients on."""
    mixer, x = build(kind), tokens(1, 12).requires_grad_()
    weight = tokens(1, 12, seed=2)
    names = [name for name, _ in mixer.named_parameters()]
    y, _ = split(mixer, x, [1, 5])
    found = torch.autograd.grad((y * weight).sum(), [*mixer.parameters(), x])
    p = {name: value.detach().clone().requires_grad_() for name, value in mixer.named_parameters()}
    y = walk(p, kind, x[0])[None]
    expected = torch.autograd.grad((y * weight).sum(), [*p.values(), x])
    for name, f, e in zip([*names, "x"], found, expected, strict=True):
        assert e.abs().max() > 0, name
        assert error(f, e) < 1e-9, name


@pytest.mark.parametrize("cuts", [[1], [20], [40], [3, 4, 17], list(range(1, 41))])
@torch.no_grad()
def test_a_cut_changes_nothing(kind: str, cuts: list[int]) -> None:
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        mixer, x = build(kind, dtype), tokens(2, 41, dtype=dtype)
        whole, end = mixer(x)
        y, state = split(mixer, x, cuts)
        assert error(y, whole) < tolerance
        assert [(f.shape, f.dtype) for f in state] == [(e.shape, e.dtype) for e in end]
        assert distance(state, end) < tolerance


@torch.no_grad()
def test_packed_sequences_are_separate(kind: str) -> None:
    """Packed, some empty, and continued with some empty, against each sequence alone."""
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        mixer = build(kind, dtype)
        state, alone = None, [None] * 5
        for seed, lengths in enumerate(([9, 0, 1, 30, 0], [0, 4, 2, 0, 0], [1, 1, 0, 1, 1])):
            offsets = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
            x = tokens(1, sum(lengths), dtype=dtype, seed=seed)
            y, state = mixer(x, state, offsets)
            for n, (a, b) in enumerate(itertools.pairwise(offsets.tolist())):
                if a < b:
                    expected, alone[n] = mixer(x[:, a:b], alone[n])
                    assert error(y[:, a:b], expected) < tolerance
                rows = Mamba3State(*(field[n : n + 1] for field in state))
                assert distance(rows, alone[n] or Mamba3State(*map(torch.zeros_like, rows))) < tolerance


def test_gradients_of_packed_sequences(kind: str) -> None:
    mixer, x, weight = build(kind), tokens(1, 9), tokens(1, 9, seed=2)

    def gradients(cut: Tensor | None) -> tuple[Tensor, ...]:
        if cut is not None:
            y, _ = mixer(x, None, cut)
        else:
            y = torch.cat((mixer(x[:, :4])[0], mixer(x[:, 4:])[0]), 1)
        return torch.autograd.grad((y * weight).sum(), list(mixer.parameters()))

    for f, e in zip(gradients(torch.tensor([0, 4, 4, 9])), gradients(None), strict=True):
        assert error(f, e) < 1e-12


def test_a_nan_stays_in_its_sequence(kind: str) -> None:
    mixer, x = build(kind), tokens(1, 12)
    offsets = torch.tensor([0, 5, 12])
    clean, _ = mixer(x, None, offsets)
    x[:, 2] = torch.nan
    y, _ = mixer(x, None, offsets)
    assert error(y[:, 5:], clean[:, 5:]) < 1e-12
    assert y[:, 2].isnan().all()


def test_the_future_does_not_reach_back(kind: str) -> None:
    """Not even by rounding: a later token may be a thousand times larger."""
    mixer, x = build(kind, torch.float32), tokens(1, 20, dtype=torch.float32)
    later = x.clone()
    later[:, 12:] *= 1000
    assert error(mixer(later)[0][:, :12], mixer(x)[0][:, :12]) < 1e-6


def test_compiled_is_the_same(kind: str) -> None:
    mixer, x = build(kind), tokens(1, 11)
    compiled = torch.compile(mixer, backend="eager", fullgraph=True)
    for offsets in (None, torch.tensor([0, 3, 3, 11])):
        y, state = mixer(x, None, offsets)
        again, compiled_state = compiled(x, None, offsets)
        assert torch.equal(again, y)
        assert torch.equal(compiled(x, compiled_state, offsets)[0], mixer(x, state, offsets)[0])


def test_the_angle_lasts(kind: str) -> None:
    """100,000 tokens that turn mostly one way, in 20 calls: states stay as small, the angle as exact."""
    torch.manual_seed(0)
    mixer = (
        Mamba3SISO(2, 1, 8, value_head_dim=4, state_dim=8)
        if kind == "siso"
        else Mamba3MIMO(2, 1, 8, value_head_dim=4, state_dim=8, mimo_rank=2)
    )
    nn.init.constant_(mixer.dt_bias, 1.0)
    x = 1 + 0.1 * torch.randn(1, 100_000, 2)
    state, sizes = None, set()
    with torch.no_grad():
        for part in x.split(5_000, 1):
            _, state = mixer(part, state)
            sizes.add(tuple(field.shape for field in state))
        blocks = mixer.in_proj.weight.split(mixer.widths)
        delta = F.softplus(x[0] @ blocks[4].T + mixer.dt_bias)  # in float32 as the mixer has it
        exact = (delta[..., None] * (math.pi * torch.tanh(x[0] @ blocks[7].T))[:, None]).double().sum(0)
    assert len(sizes) == 1
    assert exact.abs().min() > 1e4  # where float32 has spacings of 1e-3
    assert float(torch.sin((state.angle[0] - exact) / 2).abs().max()) < 1e-5


def test_sizes(kind: str) -> None:
    cls = Mamba3SISO if kind == "siso" else Mamba3MIMO
    mixer = cls(256, 4, 64, layer_index=3)
    ranks = 1 if kind == "siso" else 4
    assert (mixer.heads, mixer.state_dim, mixer.mimo_rank) == (8, 32, ranks)
    assert mixer.state_size() == 4 * 64**2
    _, state = mixer(torch.randn(1, 1, 256))
    assert state.memory[0].numel() == mixer.state_size()
    assert mixer.flops_per_token() > 2 * (1 + 2 * ranks) * mixer.state_size()
    rate = F.softplus(mixer.dt_bias.detach())
    assert rate.min() > 0.9e-3 and rate.max() < 0.11
    with torch.device("meta"):
        assert all(p.is_meta for p in cls(256, 4, 64).parameters())


def test_arguments_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match=r"value_head_dim must divide expand \* hidden_size = 200, got 64"):
        Mamba3SISO(100, 2, 32)
    with pytest.raises(ValueError, match=r"num_heads \* head_dim\*\*2 = 2187"):
        Mamba3SISO(64, 3, 27)
    with pytest.raises(ValueError, match="state_dim must be even and ≥ 4, got 3"):
        Mamba3SISO(64, 2, 32, state_dim=3)
    with pytest.raises(ValueError, match="mimo_rank must be ≥ 2, got 1"):
        Mamba3MIMO(64, 2, 32, mimo_rank=1)
    with pytest.raises(ValueError, match="expand must be ≥ 1, got 0"):
        Mamba3SISO(64, 2, 32, expand=0)
