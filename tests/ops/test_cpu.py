"""What only the compiled kernels have: instruction sets, threads, decoding in place, types handed on."""

import pytest
import torch
import torch.nn.functional as F
from cases import GAINS, assert_close, distance, make, rounded, run

from kdn.ops import decode, delta_memory
from kdn.ops.backends.cpu.library import LIBRARY

pytestmark = pytest.mark.skipif(isinstance(LIBRARY, str), reason=str(LIBRARY))


@pytest.mark.parametrize("gain", GAINS)
@pytest.mark.parametrize(
    ("time", "width", "values"), [(1, 8, 16), (67, 128, 128), (130, 20, 37), (257, 64, 96), (70, 1, 1)]
)
def test_every_instruction_set(instructions: str, gain: str, time: int, width: int, values: int) -> None:
    if gain == "exact" and width > 64:
        width = 48
    case = rounded(make(gain, time, width, values, batch=2), torch.float32)
    want = run(case, "reference", torch.float64)
    assert_close(run(case, "cpu", torch.float32), want, 1e-5)


@pytest.mark.parametrize("decay", ["channel", "head", "none"])
def test_every_instruction_set_packed_without_keys(instructions: str, decay: str) -> None:
    lengths = [1, 0, 66, 130, 3]
    case = make("diagonal", sum(lengths), 24, 40, decay=decay, lengths=lengths)
    case.keyless = True
    case = rounded(case, torch.float32)
    want = run(case, "reference", torch.float64)
    assert_close(run(case, "cpu", torch.float32), want, 1e-5)


@pytest.mark.parametrize("gain", GAINS)
@pytest.mark.parametrize("heads", [1, 3])
def test_same_bits_from_run_to_run_and_for_any_number_of_threads(gain: str, heads: int) -> None:
    case = make(gain, 200, 32, 160, heads=heads)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one, again = (run(case, "cpu", torch.float32) for _ in range(2))
        for count in (2, 5):
            torch.set_num_threads(count)
            several = run(case, "cpu", torch.float32)
            assert all(torch.equal(one[name], several[name]) for name in one)
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(one[name], again[name]) for name in one)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gap_between_channels_and_expanded_inputs(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    q, k, v, g = torch.randn(4, 2, 70, 16, 3, dtype=dtype).transpose(3, 4)
    k = 0.3 * k
    g = g[:, :1].expand_as(g) * 0.1
    want = delta_memory(q.float(), k.float(), v.float(), g.float(), None, backend="reference")
    got = delta_memory(q, k, v, g, None, backend="cpu")
    bound = 1e-5 if dtype == torch.float32 else 1e-2
    assert max(distance(a, b) for a, b in zip(got, want, strict=True)) < bound


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_other_types_are_handed_to_the_torch_backend(dtype: torch.dtype) -> None:
    case = rounded(make("diagonal", 40, 16, 16), dtype)
    assert_close(run(case, "cpu", dtype), run(case, "torch", dtype), 0)


@pytest.mark.parametrize("kind", ["given", "diagonal", "isotropic", "exact"])
@pytest.mark.parametrize(("width", "values"), [(128, 128), (20, 37), (1, 1)])
@pytest.mark.parametrize("decay", ["channel", "head", "none"])
def test_decode_updates_states_in_place(backend: str, kind: str, width: int, values: int, decay: str) -> None:
    if kind == "exact":
        width = min(width, 32)
    torch.manual_seed(1)
    shape = (3, 1, 2, width)
    q, k, v = torch.randn(shape), F.normalize(torch.randn(shape), dim=-1), torch.randn(3, 1, 2, values)
    log_decay = {"channel": -torch.rand(shape), "head": -torch.rand(shape[:3]), "none": None}[decay]
    state = torch.randn(3, 2, width, values)
    cov = {
        "given": None,
        "diagonal": torch.rand(3, 2, width),
        "isotropic": torch.rand(3, 2),
        "exact": torch.eye(width).repeat(3, 2, 1, 1),
    }[kind]
    noises = {}
    if kind == "given":
        gain, want_cov = 0.5 * k, None
    else:
        w = torch.rand(shape[:3] if kind == "isotropic" else shape)
        noises = {"process_noise": w, "obs_noise": torch.rand(shape[:3]) + 0.1, "info_scale": 3.0}
        gain, want_cov = GAINS[kind](k, log_decay, **noises, initial_cov=cov, backend="reference")
    want, want_state = delta_memory(q, k, v, gain, log_decay, initial_state=state, backend="reference")
    out = torch.empty(3, 1, 2, values)
    given = {"gain": gain} if kind == "given" else noises
    result = decode(q, k, v, log_decay, kind=kind, state=state, cov=cov, out=out, backend=backend, **given)
    assert result is out
    assert distance(out, want) < 1e-5
    assert distance(state, want_state) < 1e-5
    if want_cov is not None and cov is not None:
        assert distance(cov, want_cov) < 1e-5


def test_decode_names_what_is_missing() -> None:
    x = torch.randn(1, 1, 1, 4)
    with pytest.raises(ValueError, match="gain must be a tensor"):
        decode(x, x, x, None, state=torch.zeros(1, 1, 4, 4))
    with pytest.raises(ValueError, match="kind must be given, diagonal"):
        decode(x, x, x, None, state=torch.zeros(1, 1, 4, 4), kind="dense")
    with pytest.raises(ValueError, match="one token"):
        decode(x.expand(1, 3, 1, 4), x, x, None, state=torch.zeros(1, 1, 4, 4), gain=x)
