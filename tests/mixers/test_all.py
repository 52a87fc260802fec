"""What holds of every mixer, whichever it is: ways to cut a sequence, states, gradients, precision, compiling."""

import math
import warnings
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kdn.mixers import MIXERS, make_mixer, mixer_options

HIDDEN = 24
MAMBA: dict[str, Any] = {"value_head_dim": 12, "state_dim": 8}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    name: (name, MAMBA if name.startswith("mamba3") else {}) for name in MIXERS
}
CASES["mamba3-mimo"] = ("mamba3-mimo", {"mimo_rank": 2, **MAMBA})
CASES["attention-window"] = ("attention", {"window": 5})
# Options that change what a state holds or how it is made.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "kda-bare": ("kda", {"conv_size": 0, "expand_v": 1.5, "allow_neg_eigval": True}),
    "kdn-diagonal-options": (
        "kdn-diagonal",
        {"conv_size": 2, "learn_info_scale": True, "decay": "sigmoid", "expand_v": 0.5},
    ),
    "kdn-isotropic-fixed": ("kdn-isotropic", {"conv_size": 1, "process_noise": 0.3, "obs_noise": 0.2}),
}
each_case = pytest.mark.parametrize("case", [*CASES, *VARIANTS])
each_mixer = pytest.mark.parametrize("case", list(CASES))


def fresh(case: str, hidden: int = HIDDEN, head_dim: int = 8) -> nn.Module:
    """As built, from a fixed seed."""
    torch.manual_seed(0)
    name, options = (CASES | VARIANTS)[case]
    return make_mixer(name, hidden, 2, head_dim, **options)


def build(case: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    """With no parameter at its start value: some are zeros there, which would hide what they multiply."""
    mixer = fresh(case)
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return mixer.to(dtype)


def tokens(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, HIDDEN, generator=generator, dtype=torch.float64).to(dtype)


def leaves(state: Any) -> list[Tensor]:
    """All tensors of a state."""
    if state is None:
        return []
    return [state] if isinstance(state, Tensor) else [x for field in state for x in leaves(field)]


def rows(state: Any, part: slice) -> Any:
    """Some sequences' rows of a state."""
    if state is None or isinstance(state, Tensor):
        return None if state is None else state[part]
    fields = [rows(x, part) for x in state]
    return type(state)(*fields) if hasattr(state, "_fields") else tuple(fields)


def assert_same_states(found: Any, expected: Any, **tolerance: float) -> None:
    assert type(found) is type(expected)
    for x, y in zip(leaves(found), leaves(expected), strict=True):
        torch.testing.assert_close(x, y, **tolerance)


def in_pieces(mixer: nn.Module, x: Tensor, cuts: list[int]) -> tuple[Tensor, Any]:
    """The outputs and last state of calls that end at `cuts`."""
    state, outputs = None, []
    for a, b in pairwise([0, *cuts, x.shape[1]]):
        y, state = mixer(x[:, a:b], state)
        outputs.append(y)
    return torch.cat(outputs, 1), state


TOLERANCE = {"atol": 1e-4, "rtol": 1e-4}


@each_case
@pytest.mark.parametrize("cuts", [[1], [2, 3, 7, 19], [64], [79], list(range(1, 80))], ids=str)
@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no-grad"])
def test_a_sequence_may_be_cut_anywhere(case: str, cuts: list[int], grad: bool) -> None:
    """Down to single tokens, which without gradients take the in-place kernel of `kdn.ops.decode`."""
    mixer, x = build(case), tokens(2, 80)
    with torch.set_grad_enabled(grad):
        whole, last = mixer(x)
        pieces, last_of_pieces = in_pieces(mixer, x, cuts)
    assert whole.shape == x.shape
    torch.testing.assert_close(pieces, whole, **TOLERANCE)
    assert_same_states(last_of_pieces, last, **TOLERANCE)


@each_case
def test_outputs_depend_on_the_past_and_present_only(case: str) -> None:
    mixer, x = build(case, torch.float64), tokens(1, 12, dtype=torch.float64)
    jacobian = torch.autograd.functional.jacobian(lambda x: mixer(x)[0][0].sum(-1), x)[:, 0].norm(dim=-1)
    assert (jacobian.triu(1) == 0).all()
    assert (jacobian.diagonal() > 0).all()


@each_case
@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no-grad"])
def test_packed_sequences_are_separate_sequences(case: str, grad: bool) -> None:
    """Three calls, two of them packed and with states passed on, with empty and 1-token sequences in each."""
    mixer = build(case)
    first, second, third = [3, 4, 0, 6, 0], [7, 0, 1, 12, 0], 2
    alone = [tokens(1, a + b + third, seed=n) for n, (a, b) in enumerate(zip(first, second, strict=True))]

    def packed(begins: list[int], lengths: list[int], state: Any) -> tuple[list[Tensor], Any]:
        x = torch.cat([s[:, a : a + n] for s, a, n in zip(alone, begins, lengths, strict=True)], 1)
        offsets = torch.tensor([0, *lengths]).cumsum(0)
        y, state = mixer(x, state, offsets)
        return list(y.split(lengths, 1)), state

    with torch.set_grad_enabled(grad):
        y1, after1 = packed([0] * 5, first, None)
        y2, after2 = packed(first, second, after1)
        y3, after3 = mixer(torch.cat([s[:, -third:] for s in alone]), after2)  # states of packs fit batches
        for n, x in enumerate(alone):
            expected, last = mixer(x)
            found = torch.cat([y1[n], y2[n], y3[n : n + 1]], 1)
            torch.testing.assert_close(found, expected, **TOLERANCE)
            if case.startswith("attention"):  # rows end together, what is before a row's first key is not its
                kept = last.k.shape[1]
                last = last._replace(k=last.k, v=last.v)
                found_last = rows(after3, slice(n, n + 1))
                found_last = found_last._replace(k=found_last.k[:, -kept:], v=found_last.v[:, -kept:])
            else:
                found_last = rows(after3, slice(n, n + 1))
            assert_same_states(found_last, last, **TOLERANCE)


@each_case
def test_an_empty_sequence_leaves_its_state_to_the_bit(case: str) -> None:
    mixer, x = build(case), tokens(3, 9)
    _, before = mixer(x)
    _, after = mixer(x[:1, :6], before, torch.tensor([0, 4, 4, 6]))
    before, after = rows(before, slice(1, 2)), rows(after, slice(1, 2))
    if case == "attention":  # the others grew, and keys are aligned at the end
        after = after._replace(k=after.k[:, -9:], v=after.v[:, -9:])
    assert_same_states(after, before, atol=0, rtol=0)


@each_case
def test_states_given_are_not_touched(case: str) -> None:
    mixer, x = build(case), tokens(2, 9)
    with torch.no_grad():
        _, state = mixer(x)
        before = [leaf.clone() for leaf in leaves(state)]
        mixer(x[:, :1], state)
        mixer(x, state)
        mixer(x[:1], state, torch.tensor([0, 4, 9]))
    mixer(x[:, :1], state)[0].sum().backward()
    for now, then in zip(leaves(state), before, strict=True):
        assert torch.equal(now, then)


@each_case
def test_gradients_reach_every_parameter(case: str) -> None:
    mixer, x = build(case), tokens(2, 9)
    y, _ = mixer(x)
    (y * tokens(2, 9, seed=2)).sum().backward()
    for name, parameter in mixer.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.abs().max() > 0, name


@each_case
@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
def test_gradients_do_not_see_where_a_sequence_was_cut(case: str, packed: bool) -> None:
    """Through the states of single calls, those of all inputs and parameters are those of one call."""
    mixer = build(case, torch.float64)
    x = tokens(2, 9, dtype=torch.float64).requires_grad_()
    weight = tokens(2, 9, dtype=torch.float64, seed=2)

    def run(x: Tensor, state: Any) -> tuple[Tensor, Any]:
        if not packed:
            return mixer(x, state)
        lengths = [x.shape[1]] * 2
        y, state = mixer(x.flatten(0, 1)[None], state, torch.tensor([0, *lengths]).cumsum(0))
        return y[0].unflatten(0, (2, -1)), state

    def gradients(cuts: list[int]) -> tuple[Tensor, ...]:
        state, loss = None, torch.zeros((), dtype=torch.float64)
        for a, b in pairwise([0, *cuts, 9]):
            y, state = run(x[:, a:b], state)
            loss = loss + (y * weight[:, a:b]).sum()
        return torch.autograd.grad(loss, [x, *mixer.parameters()])

    for found, expected in zip(gradients([1, 2, 6]), gradients([]), strict=True):
        torch.testing.assert_close(found, expected, atol=1e-8, rtol=1e-6)


@pytest.fixture
def compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@each_mixer
def test_compiled_equals_eager(case: str, compiler: None) -> None:
    """In one graph, with a state."""
    mixer, x = build(case), tokens(2, 9)
    compiled = torch.compile(mixer, backend="eager", fullgraph=True, dynamic=False)
    _, state = mixer(x)
    expected, expected_state = mixer(x, state)
    found, found_state = compiled(x, state)
    torch.testing.assert_close(found, expected, **TOLERANCE)
    assert_same_states(found_state, expected_state, **TOLERANCE)


@pytest.mark.parametrize("case", ["kdn-isotropic", "deltanet"])
def test_compiled_generation_equals_eager(case: str, compiler: None) -> None:
    """A single token without gradients, where eager mode has a kernel that is no operator."""
    mixer, x = build(case), tokens(2, 9)
    compiled = torch.compile(mixer, backend="eager", fullgraph=True, dynamic=False)
    with torch.no_grad():
        _, state = mixer(x)
        torch.testing.assert_close(compiled(x[:, :1], state)[0], mixer(x[:, :1], state)[0], **TOLERANCE)


@pytest.mark.parametrize("case", ["kdn-diagonal", "gated-deltanet", "mamba3-mimo"])
def test_compiled_equals_eager_with_packed_sequences(case: str, compiler: None) -> None:
    """From the start. (Attention needs the lengths as numbers, and so breaks the graph.)"""
    mixer, x, offsets = build(case), tokens(1, 9), torch.tensor([0, 4, 4, 9])
    compiled = torch.compile(mixer, backend="eager", fullgraph=True, dynamic=False)
    torch.testing.assert_close(compiled(x, None, offsets)[0], mixer(x, None, offsets)[0], **TOLERANCE)


def test_inductor_compiles(compiler: None) -> None:
    mixer, x = build("kdn-diagonal"), tokens(2, 9)
    with torch.no_grad():
        found, state = torch.compile(mixer, fullgraph=True, dynamic=False)(x)
        expected, expected_state = mixer(x)
    torch.testing.assert_close(found, expected, **TOLERANCE)
    assert_same_states(state, expected_state, **TOLERANCE)


def relative_error(found: Tensor, expected: Tensor) -> float:
    return float((found.float() - expected).norm() / expected.norm())


@each_case
@pytest.mark.parametrize("how", ["autocast", "cast"])
@pytest.mark.parametrize("cuts", [[], list(range(1, 40))], ids=["whole", "token by token"])
def test_bfloat16_is_close_to_float32(case: str, how: str, cuts: list[int]) -> None:
    """Within the rounding of bfloat16 (0.4% a step), with memories in float32 and no warnings."""
    mixer, x = fresh(case), tokens(2, 40)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        expected, _ = mixer(x)
        if how == "cast":
            found, state = in_pieces(mixer.to(torch.bfloat16), x.bfloat16(), cuts)
        else:
            with torch.autocast("cpu", torch.bfloat16):
                found, state = in_pieces(mixer, x, cuts)
    assert found.dtype == torch.bfloat16
    assert relative_error(found, expected) < 0.03
    for accumulator in ("memory", "cov", "last_weight", "angle"):
        if getattr(state, accumulator, None) is not None:
            assert getattr(state, accumulator).dtype == torch.float32
    for narrow in ("k", "v", "conv"):
        for leaf in leaves(getattr(state, narrow, None)):
            assert leaf.dtype == torch.bfloat16


@each_mixer
def test_gradients_under_autocast(case: str) -> None:
    mixer, x = build(case), tokens(2, 9)
    with torch.autocast("cpu", torch.bfloat16):
        y, _ = mixer(x)
    y.float().square().sum().backward()
    low = [p.grad.clone() for p in mixer.parameters()]
    mixer.zero_grad()
    mixer(x)[0].square().sum().backward()
    found = torch.cat([grad.flatten() for grad in low])
    expected = torch.cat([p.grad.flatten() for p in mixer.parameters()])
    assert relative_error(found, expected) < 0.1


@pytest.mark.parametrize("case", [name for name in CASES if name != "attention"])
def test_the_state_is_as_large_after_100_000_tokens_as_after_5_000(case: str) -> None:
    """In numbers, and in bytes kept alive behind them: a view of a call's inputs would keep all of those."""
    torch.manual_seed(0)
    name, options = CASES[case]
    if name.startswith("mamba3"):
        options = options | {"value_head_dim": 8, "state_dim": 4}
    mixer = make_mixer(name, 4, 1, 4, **options)
    x = torch.randn(1, 5000, 4, generator=torch.Generator().manual_seed(1))
    state, sizes = None, []
    with torch.no_grad():
        for _ in range(20):
            y, state = mixer(x, state)
            kept = {leaf.untyped_storage().data_ptr(): leaf.untyped_storage() for leaf in leaves(state)}
            sizes.append((sum(x.numel() for x in leaves(state)), sum(s.nbytes() for s in kept.values())))
    assert y.isfinite().all()
    assert len(set(sizes)) == 1
    assert sizes[0][1] <= 16 * sizes[0][0]


@each_case
def test_state_size_counts_the_memory(case: str) -> None:
    mixer, x = fresh(case), tokens(2, 9)
    _, state = mixer(x)
    if case == "attention":
        assert mixer.state_size() == 0
    elif case == "attention-window":
        assert mixer.state_size() == 2 * 5 * 16  # the token's own key and value are counted, and not kept
    else:
        counted = [state.memory, *leaves(getattr(state, "cov", None))]
        assert mixer.state_size() == sum(leaf[0].numel() for leaf in counted)


@each_case
def test_a_mixer_is_built_on_the_meta_device(case: str) -> None:
    """… and filled in later, parts first, as a model's initialisation does."""
    with torch.device("meta"):
        mixer = fresh(case)
    real = fresh(case)
    assert all(p.device.type == "meta" for p in mixer.parameters())
    shapes = {name: p.shape for name, p in real.named_parameters()}
    assert {name: p.shape for name, p in mixer.named_parameters()} == shapes
    assert (mixer.state_size(), mixer.flops_per_token()) == (real.state_size(), real.flops_per_token())

    mixer.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter.fill_(math.nan)
        mixer.apply(lambda part: part.reset_parameters() if hasattr(part, "reset_parameters") else None)
    assert mixer(tokens(1, 5))[0].isfinite().all()


@each_case
def test_reset_parameters_follows_the_seed(case: str) -> None:
    def reset(seed: int) -> list[Tensor]:
        torch.manual_seed(seed)
        mixer.reset_parameters()
        return [p.detach().clone() for p in mixer.parameters()]

    mixer = fresh(case)
    built = reset(3)
    for parameter in mixer.parameters():
        nn.init.normal_(parameter) if parameter.ndim == 1 else None
    again, other = reset(3), reset(4)
    untouched = {id(p) for m in mixer.modules() if m is not mixer for p in m.parameters()}
    for parameter, x, y, z in zip(mixer.parameters(), built, again, other, strict=True):
        if id(parameter) not in untouched:
            assert torch.equal(x, y)
        assert x.isfinite().all() and z.isfinite().all()


def test_initialisation_is_pytorch_s_with_biases_at_zero() -> None:
    for name, (mixer, options) in CASES.items():
        torch.manual_seed(0)
        built = make_mixer(
            mixer, 400, 2, 32, **(options | {"value_head_dim": 200} if "mamba3" in name else options)
        )
        for path, part in built.named_modules():
            if isinstance(part, nn.Linear):
                bound = part.in_features**-0.5
                if path != "w_proj.1" or not name.startswith("kdn"):
                    assert part.weight.detach().abs().max() == pytest.approx(bound, rel=0.05), (name, path)
                assert part.bias is None or (part.bias == 0).all(), (name, path)


@each_mixer
def test_wrong_calls_say_what_is_wrong(case: str) -> None:
    mixer, x = build(case), tokens(2, 9)
    _, state = mixer(x)
    with pytest.raises(ValueError, match="B must be 1, got 2"):
        mixer(x, None, torch.tensor([0, 9]))
    with pytest.raises(ValueError, match="end at T = 9, got 0 … 8"):
        mixer(x[:1], None, torch.tensor([0, 4, 8]))
    with pytest.raises(ValueError, match="must not decrease, got 5 then 4"):
        mixer(x[:1], None, torch.tensor([0, 5, 4, 9]))
    with pytest.raises(ValueError, match="state must have 3 rows"):
        mixer(x[:1], state, torch.tensor([0, 4, 4, 9]))
    with pytest.raises(ValueError, match="state must have 1 rows"):
        mixer(x[:1], state)


def test_make_mixer_refuses_what_it_cannot_make() -> None:
    with pytest.raises(ValueError, match="got 'kdn-diagnal', did you mean 'kdn-diagonal'"):
        make_mixer("kdn-diagnal", 32, 2, 16)
    with pytest.raises(ValueError, match=r"mixer must be one of kdn-diagonal, .*, attention, got 'zebra'$"):
        make_mixer("zebra", 32, 2, 16)
    with pytest.raises(TypeError, match="kda has no option 'info_scale', it has allow_neg_eigval, conv_size"):
        make_mixer("kda", 32, 2, 16, info_scale=1.0)
    for name in MIXERS:
        with pytest.raises(TypeError, match="no option 'layer_indx'"):
            make_mixer(name, 32, 2, 16, layer_indx=1)
        for size, sizes in {
            "hidden_size": (0, 2, 16),
            "num_heads": (32, -1, 16),
            "head_dim": (32, 2, 0.5),
        }.items():
            with pytest.raises(ValueError, match=f"{size} must be a whole number ≥ 1"):
                make_mixer(name, *sizes)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="num_heads must be a whole number"):
        make_mixer("kda", 32, True, 16)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("kda", {"expand_v": 0.01}, "expand_v must leave a head of 16 one value channel, got 0.01"),
        ("deltanet", {"conv_size": -1}, "conv_size must be ≥ 1, or 0 for no convolution, got -1"),
        ("kda", {"decay": "linear"}, "decay must be 'softplus' or 'sigmoid', got 'linear'"),
        ("kdn-diagonal", {"info_scale": 0}, "info_scale must be > 0, got 0"),
        ("kdn-diagonal", {"r_min": -1.0}, "r_min must be > 0"),
        ("kdn-exact", {"obs_noise": math.nan}, "obs_noise must be a finite number or None, got nan"),
        ("kdn-isotropic", {"process_noise": -0.1}, "process_noise must be ≥ 0, got -0.1"),
        ("attention", {"window": 0}, "window must be ≥ 1"),
        ("mamba3-mimo", {"mimo_rank": 1}, "mimo_rank must be ≥ 2"),
    ],
)
def test_options_out_of_range(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_mixer(name, 32, 2, 16, **options)


def test_options_are_those_of_the_class_with_its_own_defaults() -> None:
    assert mixer_options("attention") == {"window": None, "rope_theta": 10000.0}
    assert mixer_options("linear-attention") == {"expand_v": 1.0, "conv_size": 4, "norm_eps": 1e-5}
    assert mixer_options("deltanet")["output_gate"] is False
    assert mixer_options("gated-deltanet")["output_gate"] is True
    assert mixer_options("kdn-exact") == mixer_options("kdn-diagonal")
    assert mixer_options("mamba3-mimo").keys() - mixer_options("mamba3-siso").keys() == {"mimo_rank"}
    for name in MIXERS:
        make_mixer(name, 128, 2, 64, layer_index=3, **mixer_options(name))
