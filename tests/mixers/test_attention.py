"""The attention mixer against the formula with an explicit mask, and against transformers' Llama."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kdn.mixers import attention
from kdn.mixers.attention import Attention, AttentionState

WIDTH, HEADS, HEAD_DIM = 24, 3, 8
WINDOWS = [1, 2, 5, 64, 1000, None]


def build(window: int | None, dtype: torch.dtype = torch.float32, **options: Any) -> Attention:
    torch.manual_seed(1)
    return Attention(WIDTH, HEADS, HEAD_DIM, window=window, **options).to(dtype)


def tokens(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, WIDTH, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def naive(mixer: Attention, x: Tensor, weights: list[Tensor] | None = None) -> Tensor:
    """The formula in float64: every score, one T × T mask, each pair of channels a complex number."""
    if weights is None:
        projections = (mixer.q_proj, mixer.k_proj, mixer.v_proj, mixer.o_proj)
        weights = [p.weight.detach().double() for p in projections]
    batch, time, _ = x.shape
    half = HEAD_DIM // 2
    theta = mixer.rope_theta ** (-2 * torch.arange(half, dtype=torch.float64) / HEAD_DIM)
    turn = torch.polar(torch.ones(time, half).double(), torch.arange(time).double()[:, None] * theta)

    def heads(w: Tensor, rotated: bool) -> Tensor:
        y = (x.double() @ w.T).view(batch, time, HEADS, HEAD_DIM).transpose(1, 2)
        if not rotated:
            return y
        z = torch.complex(y[..., :half], y[..., half:]) * turn
        return torch.cat([z.real, z.imag], -1)

    q, k, v = heads(weights[0], True), heads(weights[1], True), heads(weights[2], False)
    seen = torch.zeros(time, time, dtype=torch.bool)
    for t in range(time):
        seen[t, 0 if mixer.window is None else max(0, t - mixer.window + 1) : t + 1] = True
    scores = (q @ k.mT / HEAD_DIM**0.5).masked_fill(~seen, -float("inf"))
    return (scores.softmax(-1) @ v).transpose(1, 2).flatten(-2) @ weights[3].T


def close(got: Tensor, expected: Tensor, tolerance: float = 2e-6) -> None:
    assert got.shape == expected.shape
    if got.numel():
        assert (got.double() - expected.double()).abs().max().item() <= tolerance


def in_pieces(
    mixer: Attention, x: Tensor, lengths: list[int], state: AttentionState | None = None
) -> tuple[Tensor, AttentionState]:
    outputs = []
    for piece in x.split(lengths, 1):
        y, state = mixer(piece, state)
        outputs.append(y)
    assert state is not None
    return torch.cat(outputs, 1), state


def offsets(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 16 queries: short sequences cross every boundary there is."""
    monkeypatch.setattr(attention, "BLOCK", 16)


# --- the formula ---


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("time", [1, 2, 16, 17, 65, 150])
def test_is_the_formula(window: int | None, time: int, small_blocks: None) -> None:
    mixer, x = build(window), tokens(2, time)
    y, state = mixer(x)
    close(y, naive(mixer, x))
    assert state.position.tolist() == [time, time]


@pytest.mark.parametrize("window", [5, 600, 1024])
def test_is_the_formula_in_blocks_of_full_size(window: int) -> None:
    mixer, x = build(window), tokens(1, 1700)
    close(mixer(x)[0], naive(mixer, x))


@pytest.mark.parametrize("window", [7, 32, 40, None])
@pytest.mark.parametrize("lengths", [[100], [33, 67], [1, 20, 79], [99, 1]])
def test_gradients_are_those_of_the_formula(
    window: int | None, lengths: list[int], small_blocks: None
) -> None:
    mixer = build(window, torch.float64)
    x = tokens(2, 100, dtype=torch.float64).requires_grad_()
    weights = list(mixer.parameters())
    loss_weight = tokens(2, 100, dtype=torch.float64, seed=5)
    got = torch.autograd.grad((in_pieces(mixer, x, lengths)[0] * loss_weight).sum(), [x, *weights])
    expected = torch.autograd.grad((naive(mixer, x, weights) * loss_weight).sum(), [x, *weights])
    for g, e in zip(got, expected, strict=True):
        close(g, e, 1e-11)


@pytest.mark.parametrize("rope_theta", [10000.0, 500.0])
def test_is_llamas_attention(rope_theta: float) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRotaryEmbedding

    config = LlamaConfig(
        hidden_size=WIDTH,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        head_dim=HEAD_DIM,
        rope_parameters={"rope_type": "default", "rope_theta": rope_theta},
        attn_implementation="sdpa",
    )
    peer, mixer = LlamaAttention(config, layer_idx=0), build(None, rope_theta=rope_theta)
    assert peer.load_state_dict(mixer.state_dict())
    x = tokens(2, 70)
    rotation = LlamaRotaryEmbedding(config)(x, torch.arange(70)[None])
    close(mixer(x)[0], peer(x, rotation, attention_mask=None)[0], 1e-5)


# --- states ---


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("lengths", [[1, 149], [149, 1], [17, 70, 63], [64, 1, 1, 84], [0, 90, 0, 60]])
def test_split_anywhere(window: int | None, lengths: list[int], small_blocks: None) -> None:
    mixer, x = build(window), tokens(2, 150)
    y, state = in_pieces(mixer, x, lengths)
    whole, at_once = mixer(x)
    close(y, whole)
    for got, expected in zip(state, at_once, strict=True):
        close(got, expected)


@pytest.mark.parametrize("window", [*WINDOWS[:-2], None])
def test_token_by_token(window: int | None) -> None:
    mixer, x = build(window), tokens(3, 90)
    close(in_pieces(mixer, x, [1] * 90)[0], naive(mixer, x))


@pytest.mark.parametrize("window", [1, 5, 64])
def test_a_windows_state_stays_small(window: int) -> None:
    mixer = build(window)
    state = None
    with torch.no_grad():
        for time in [3000, 1, 1, 1, 700, *[1] * 200]:
            _, state = mixer(tokens(2, time), state)
            for kept in (state.k, state.v):
                assert kept.shape == (2, window - 1, HEADS, HEAD_DIM)
                # Nor does a view hold on to more than the token that was dropped.
                assert kept.untyped_storage().nbytes() <= 2 * window * HEADS * HEAD_DIM * 4
    assert mixer.state_size() == 2 * window * HEADS * HEAD_DIM


def test_states_are_not_touched() -> None:
    mixer = build(5)
    _, state = mixer(tokens(2, 9))
    before = [t.clone() for t in state]
    first, _ = mixer(tokens(2, 1, seed=3), state)
    mixer(tokens(2, 1, seed=4), state)
    assert all(torch.equal(a, b) for a, b in zip(state, before, strict=True))
    assert torch.equal(first, mixer(tokens(2, 1, seed=3), state)[0])


# --- packed sequences ---


@pytest.mark.parametrize("window", WINDOWS)
def test_packed_sequences_do_not_see_each_other(window: int | None, small_blocks: None) -> None:
    """Three packed calls in a row, with empty and short sequences, against each sequence alone."""
    mixer = build(window)
    alone: list[AttentionState | None] = [None] * 5
    state = None
    for seed, lengths in enumerate([[3, 0, 40, 1, 100], [0, 2, 1, 0, 70], [0, 0, 0, 1, 0]]):
        x = tokens(1, sum(lengths), seed=seed)
        before = state
        y, state = mixer(x, state, offsets(lengths))
        for n, (x_n, y_n) in enumerate(zip(x.split(lengths, 1), y.split(lengths, 1), strict=True)):
            if lengths[n]:
                expected, alone[n] = mixer(x_n, alone[n])
                close(y_n, expected)
            kept = alone[n]
            if kept is None:
                assert state.position[n] == 0
                continue
            assert state.position[n] == kept.position
            start = state.k.shape[1] - kept.k.shape[1]
            close(state.k[n, start:], kept.k[0])
            close(state.v[n, start:], kept.v[0])
            if before is not None and lengths[n] == 0:  # then nothing about it changes
                start_before = before.k.shape[1] - kept.k.shape[1]
                assert torch.equal(state.k[n, start:], before.k[n, start_before:])
                assert torch.equal(state.v[n, start:], before.v[n, start_before:])
    assert state.position.tolist() == [3, 2, 41, 2, 170]
    assert state.k.shape[1] == (170 if window is None else min(170, window - 1))


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("lengths", [[1] * 8, [30, 1, 20], [100]])
def test_rows_with_different_positions_go_on_together(
    window: int | None, lengths: list[int], small_blocks: None
) -> None:
    """What a left-padded batch becomes: read packed, then decoded (or read on) as a batch."""
    mixer, prompts = build(window), [4, 0, 70, 1]
    prompt, more = tokens(1, sum(prompts)), tokens(4, sum(lengths), seed=1)
    _, state = mixer(prompt, None, offsets(prompts))
    # What stands before a row's keys must not be read.
    hole = torch.arange(state.k.shape[1]) < (state.k.shape[1] - state.position)[:, None]
    state = state._replace(k=state.k.masked_fill(hole[..., None, None], 1e4))
    y, state = in_pieces(mixer, more, lengths, state)
    for n, x_n in enumerate(prompt.split(prompts, 1)):
        whole = naive(mixer, torch.cat([x_n, more[n : n + 1]], 1))
        close(y[n : n + 1], whole[:, prompts[n] :])
        assert state.position[n] == prompts[n] + sum(lengths)


def test_gradients_flow_through_packed_states() -> None:
    mixer, lengths = build(6, torch.float64), [5, 0, 12]
    first = tokens(1, 17, dtype=torch.float64).requires_grad_()
    then = tokens(3, 2, dtype=torch.float64, seed=1)
    _, state = mixer(first, None, offsets(lengths))
    (got,) = torch.autograd.grad(mixer(then, state)[0].square().sum(), first)
    expected = []
    for n, x in enumerate(first.detach().split(lengths, 1)):
        x = x.requires_grad_()
        y = naive(mixer, torch.cat([x, then[n : n + 1]], 1))[:, lengths[n] :]
        expected.append(torch.autograd.grad(y.square().sum(), x)[0])
    close(got, torch.cat(expected, 1), 1e-12)


# --- positions, precision ---


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rotation_is_exact_far_from_the_start(dtype: torch.dtype) -> None:
    position = torch.tensor([[0, 1, 100_000, 1_000_003]])
    q = torch.zeros(1, 4, 1, 128, dtype=dtype)
    q[..., :64] = 1  # turned, this is (cos, sin)
    mixer = Attention(8, 1, 128)
    turned, _ = attention.rotate(q, q, position, mixer.frequency)
    angle = position[..., None].double() * 10000.0 ** (-torch.arange(64).double() / 64)
    expected = torch.cat([angle.cos(), angle.sin()], -1)[:, :, None]
    close(turned, expected, 5e-7 if dtype == torch.float32 else 1e-9)


def test_only_distances_matter() -> None:
    """A sequence that begins at position 100,000 reads as one that begins at 0."""
    mixer, x = build(20), tokens(2, 60)
    empty = torch.zeros(2, 0, HEADS, HEAD_DIM)
    far = AttentionState(empty, empty, torch.full((2,), 100_000))
    close(in_pieces(mixer, x, [30, 1, 29], far)[0], mixer(x)[0])


def test_low_precision_and_autocast() -> None:
    wide, x = build(40), tokens(2, 100)
    exact = naive(wide, x)
    narrow = build(40, torch.bfloat16)
    assert narrow.frequency.dtype == torch.int64  # casting a module must not round its positions
    y, state = in_pieces(narrow, x.bfloat16(), [50, 1, 49])
    assert {y.dtype, state.k.dtype, state.v.dtype} == {torch.bfloat16}
    close(y, exact, 0.02)
    with torch.autocast("cpu", torch.bfloat16):
        y, state = in_pieces(wide, x, [50, 1, 49])
    close(y, exact, 0.02)
    y.square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in wide.parameters())
    y, state = wide(x, state)  # a state made under autocast goes on without
    assert {y.dtype, state.k.dtype} == {torch.float32}


# --- cost ---


@pytest.fixture
def masks(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Tensor | None]]:
    """The masks that PyTorch's attention is called with."""
    seen: list[Tensor | None] = []
    original = F.scaled_dot_product_attention

    def spy(*args: Any, attn_mask: Tensor | None = None, **options: Any) -> Tensor:
        seen.append(attn_mask)
        return original(*args, attn_mask=attn_mask, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", spy)
    return seen


def storages(tensors: list[Tensor]) -> int:
    """Bytes behind the tensors, each storage once."""
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def test_a_window_takes_one_small_mask(masks: list[Tensor | None]) -> None:
    build(64)(tokens(1, 8192))
    assert masks[0] is None
    rest = [m for m in masks if m is not None]
    assert len(rest) == len(masks) - 1
    assert storages(rest) <= 4 * attention.BLOCK * (attention.BLOCK + 64)


@pytest.mark.parametrize("window", [None, 500, 4096])
def test_a_window_longer_than_the_sequence_is_full_attention(
    window: int | None, masks: list[Tensor | None]
) -> None:
    build(window)(tokens(1, 500))
    assert masks == [None]


def test_full_attention_reads_on_in_blocks(masks: list[Tensor | None]) -> None:
    mixer = build(None)
    with torch.no_grad():
        in_pieces(mixer, tokens(1, 4000), [1000, 3000])
    assert masks[0] is None and all(m is not None and m.shape[-2] <= attention.BLOCK for m in masks[1:])


@pytest.mark.parametrize(
    ("window", "lengths"), [(64, [1]), (None, [1]), (64, [0.5, 0.5]), (None, [0.2, 0.8])]
)
def test_memory_of_training_is_linear_in_time(window: int | None, lengths: list[float]) -> None:
    """What the forward pass keeps for the backward pass, at two lengths."""
    mixer = build(window)

    def kept(time: int) -> int:
        held: list[Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: held.append(t) or t, lambda t: t):
            result = in_pieces(mixer, tokens(1, time), [int(part * time) for part in lengths])
        size = storages(held)
        del result
        return size

    short, long = kept(1500), kept(6000)
    assert long <= 4.5 * short
    assert long < 6000 * 6000


def test_peak_memory_of_a_window() -> None:
    """T = 8,192 needs far less than one T × T mask of bytes, in forward and backward."""
    mixer, x = build(64), tokens(1, 8192)
    with torch.profiler.profile(
        profile_memory=True, activities=[torch.profiler.ProfilerActivity.CPU]
    ) as trace:
        mixer(x)[0].sum().backward()
    now = peak = 0
    for event in trace.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            peak = max(peak, now)
    assert 8192 * WIDTH * 4 < peak < 8192 * 8192 / 2


# --- compiling, construction, errors ---


@pytest.mark.parametrize("window", [9, None])
def test_compiles_whole(window: int | None, small_blocks: None) -> None:
    torch._dynamo.reset()
    mixer = build(window)
    compiled = torch.compile(mixer, fullgraph=True, backend="aot_eager")
    x = tokens(2, 41).requires_grad_()
    outputs, state = [], None
    for piece in x.split([20, 20, 1], 1):
        y, state = compiled(piece, state)
        outputs.append(y)
    y = torch.cat(outputs, 1)
    close(y, naive(mixer, x.detach()))
    (got,) = torch.autograd.grad(y.square().sum(), x)
    (expected,) = torch.autograd.grad(mixer(x)[0].square().sum(), x)
    close(got, expected, 1e-5)
    torch._dynamo.reset()


def test_decoding_compiles_a_few_times_only() -> None:
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounter()
    mixer = build(6)
    compiled = torch.compile(mixer, fullgraph=True, backend=counter)
    x, state, outputs = tokens(2, 40), None, []
    with torch.no_grad():
        for piece in x.split(1, 1):
            y, state = compiled(piece, state)
            outputs.append(y)
    close(torch.cat(outputs, 1), naive(mixer, x))
    assert counter.frame_count <= 6
    torch._dynamo.reset()


def test_construction_without_memory() -> None:
    with torch.device("meta"):
        mixer = Attention(WIDTH, HEADS, HEAD_DIM, window=5)
    assert mixer(torch.empty(2, 9, WIDTH, device="meta"))[0].shape == (2, 9, WIDTH)
    expected = build(5)
    mixer.to_empty(device="cpu").load_state_dict(expected.state_dict())
    mixer.reset_parameters()  # touches what no checkpoint holds, and nothing else
    assert torch.equal(mixer(tokens(1, 9))[0], expected(tokens(1, 9))[0])


def test_counts() -> None:
    mixer = Attention(64, 4, 16, window=2048)
    assert sum(p.numel() for p in mixer.parameters()) == 4 * 64 * 64
    assert mixer.state_size() == 2 * 2048 * 64
    assert mixer.flops_per_token() == 4 * 2048 * 64 + 8 * 64
    full = Attention(64, 4, 16)
    assert full.state_size() == 0
    assert full.flops_per_token() == 4 * 4096 * 64 + 8 * 64


def test_errors_name_the_argument() -> None:
    with pytest.raises(ValueError, match=r"head_dim must be even .*got 7"):
        Attention(8, 1, 7)
    with pytest.raises(ValueError, match=r"window must be ≥ 1 .*got 0"):
        Attention(8, 1, 8, window=0)
    with pytest.raises(ValueError, match=r"rope_theta must be ≥ 1, got 0.5"):
        Attention(8, 1, 8, rope_theta=0.5)
    mixer = build(5)
    _, state = mixer(tokens(2, 3))
    with pytest.raises(ValueError, match="state must have 1 rows, one per sequence, got 2"):
        mixer(tokens(1, 3), state)
    with pytest.raises(ValueError, match="state must have 3 rows, one per sequence, got 2"):
        mixer(tokens(1, 3), state, offsets([1, 1, 1]))
    with pytest.raises(ValueError, match="cu_seqlens packs all sequences into one row: B must be 1, got 2"):
        mixer(tokens(2, 3), None, offsets([1, 2]))
    with pytest.raises(ValueError, match="cu_seqlens must start at 0 and end at T = 3, got 0 … 4"):
        mixer(tokens(1, 3), None, offsets([1, 3]))
