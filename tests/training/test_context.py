"""Context parallelism: pieces on several ranks compute what one rank computes on the whole sequence.

Ranks are four processes of this file (`python test_context.py RANK FOLDER`). All of them, and then two of them as
a group of their own, run all cases and leave what they found in FOLDER; the tests look at that.
"""

import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from kdn.mixers.delta import ChannelDecayMixer
from kdn.models import KDNConfig, KDNForCausalLM
from kdn.ops import diagonal_gain, isotropic_gain
from kdn.training import context as cp

SIZES = {"vocab_size": 64, "hidden_size": 16, "num_heads": 2, "head_dim": 8, "intermediate_size": 16}
RECURRENT = ["kdn-diagonal", "kdn-isotropic", "kda", "gdn2", "gated-deltanet", "deltanet", "linear-attention"]
HYBRID = {"layers": ["kdn-diagonal", "attention", "kda", "attention"]}


# name: configuration, tokens, dtype, what else
CASES: dict[str, tuple[dict[str, Any], int, torch.dtype, str]] = {
    **{f"{m} f64": ({"mixer": m, "num_hidden_layers": 2}, 24, torch.float64, "") for m in RECURRENT},
    **{f"{m} f32": ({"mixer": m, "num_hidden_layers": 1}, 64, torch.float32, "") for m in RECURRENT},
    "window inside a piece": (HYBRID | {"window": 5}, 32, torch.float64, ""),
    "window over several pieces": (HYBRID | {"window": 20}, 32, torch.float64, ""),
    "window longer than the sequence": (HYBRID | {"window": 100}, 16, torch.float64, ""),
    "one token in window and convolution": (HYBRID | {"window": 1, "conv_size": 1}, 16, torch.float64, ""),
    "hybrid f32": (HYBRID | {"window": 9}, 32, torch.float32, ""),
    "pieces shorter than the convolution": (
        {"mixer": "kdn-diagonal", "num_hidden_layers": 2},
        8,
        torch.float64,
        "",
    ),
    "pieces of one token": (HYBRID | {"window": 3}, 4, torch.float64, ""),
    "no convolution": ({"mixer": "kda", "num_hidden_layers": 2, "conv_size": 0}, 24, torch.float64, ""),
    "learned information scale": (
        {"mixer": "kdn-isotropic", "num_hidden_layers": 2, "learn_info_scale": True, "expand_v": 2.0},
        24,
        torch.float64,
        "",
    ),
    "activations made again": (HYBRID | {"window": 5}, 32, torch.float64, "checkpointing"),
    "stress kdn-diagonal": (
        {"mixer": "kdn-diagonal", "num_hidden_layers": 1, "process_noise": 1e-30, "r_min": 1e-4},
        64,
        torch.float32,
        "stress",
    ),
    "stress kdn-isotropic": (
        {"mixer": "kdn-isotropic", "num_hidden_layers": 1, "process_noise": 1e-30, "r_min": 1e-4},
        64,
        torch.float32,
        "stress",
    ),
    "stress kda": ({"mixer": "kda", "num_hidden_layers": 1}, 64, torch.float32, "stress"),
    "bfloat16": ({"mixer": "kdn-diagonal", "num_hidden_layers": 2}, 32, torch.float32, "autocast"),
}
REFUSED = {
    "kdn-exact": {"mixer": "kdn-exact", "num_hidden_layers": 1},
    "attention": {"layers": ["kda", "attention"]},
}


# --- a rank ---


def _model(fields: dict[str, Any], dtype: torch.dtype) -> KDNForCausalLM:
    torch.manual_seed(0)
    model = KDNForCausalLM(KDNConfig(**SIZES, **fields)).train()
    with torch.no_grad():  # matrices that start at zero hide what comes before them
        for p in model.parameters():
            p.add_(torch.randn_like(p), alpha=0.1)
    return model.to(dtype)


def _tokens(length: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets, [2, T]."""
    ids = torch.randint(SIZES["vocab_size"], (2, length + 1), generator=torch.Generator().manual_seed(1))
    return ids[:, :-1], ids[:, 1:]


def _run(model: KDNForCausalLM, ids: Tensor, targets: Tensor, count: int, extra: str) -> dict[str, Any]:
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=extra == "autocast"):
        found = model.model(ids, use_cache=extra != "checkpointing")
        logits = model.lm_head(found.last_hidden_state)
        loss = model(ids, targets=targets, num_items_in_batch=count).loss
    loss.backward()
    cache = found.past_key_values
    return {
        "loss": loss.detach(),
        "logits": logits.detach(),
        "grads": {
            n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in model.named_parameters()
        },
        "states": [] if cache is None else [cache.state(i) for i in range(len(model.model.layers))],
    }


def _stress(model: KDNForCausalLM) -> None:
    """Decays of −50 and of 0 in one sequence, from the token alone."""
    for mixer in model.modules():
        if isinstance(mixer, ChannelDecayMixer):
            projected = mixer.f_proj

            def log_decay(x: Tensor, f_proj: Any = projected) -> Tensor:
                f = f_proj(x).unflatten(-1, (SIZES["num_heads"], -1))
                return -50.0 * (f > 0.6) + 0.0 * f

            mixer.log_decay = log_decay


def _difference(got: Tensor, expected: Tensor) -> Tensor:
    """Largest difference, relative to the largest expected value; not finite where `got` is not."""
    largest = expected.abs().max().clamp_min(1e-5)
    return ((got - expected).abs().max() / largest).double()


def _leaves(state: Any) -> list[Tensor]:
    return [state] if isinstance(state, Tensor) else [x for part in state or () for x in _leaves(part)]


def _piece(context: cp.Context, x: Tensor) -> Tensor:
    return x.chunk(context.size, 1)[context.rank]


def _compare(
    group: Any, fields: dict[str, Any], length: int, dtype: torch.dtype, extra: str
) -> dict[str, float]:
    """The largest differences on any rank between pieces and the whole.

    In bfloat16 both are far from what they stand for (a fifth, for the decay's gradient). There, a gradient's
    difference is how much further from float64 the pieces are than the whole is.
    """
    model = _model(fields, dtype)
    if extra == "stress":
        _stress(model)
    if extra == "checkpointing":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    ids, targets = _tokens(length)
    whole = _run(model, ids, targets, ids.numel(), extra)
    exact = None
    if extra == "autocast":
        exact = _run(_model(fields, torch.float64), ids, targets, ids.numel(), "")["grads"]
    context = cp.context_parallel(model, group)
    mine = _run(model, _piece(context, ids), _piece(context, targets), ids.numel(), extra)

    dist.all_reduce(mine["loss"], group=group)
    found = {
        "loss": _difference(mine["loss"], whole["loss"]),
        "logits": _difference(mine["logits"], _piece(context, whole["logits"])),
        "states": torch.zeros((), dtype=torch.float64),
    }
    if context.rank == context.size - 1 and mine["states"]:
        pairs = list(zip(_leaves(mine["states"]), _leaves(whole["states"]), strict=True))
        # Attention may hold keys from before the start, which are never read; the newest come last.
        ends = [(x, y) if x.ndim < 2 else (x[:, -y.shape[1] :], y) for x, y in pairs]
        found["states"] = torch.stack([_difference(x, y) for x, y in ends if y.numel()]).max()
    for name, d in mine["grads"].items():
        dist.all_reduce(d, group=group)
        found[name] = _difference(d, whole["grads"][name] if exact is None else exact[name])
        if exact is not None:
            found[name] = (found[name] - _difference(whole["grads"][name], exact[name])).clamp_min(0)
    for x in found.values():
        dist.all_reduce(x, dist.ReduceOp.MAX, group=group)
    return {name: float(x) for name, x in found.items()}


def _traffic(group: Any, length: int) -> dict[str, Any]:
    """What a step sends, and the shapes that the composition of pieces reads."""
    model = _model(HYBRID | {"window": 5}, torch.float32)
    context = cp.context_parallel(model, group)
    shapes = []
    originals = {name: getattr(cp, name) for name in ("compose_gain", "compose_memory")}

    def watched(name: str) -> Any:
        def compose(*args: Any) -> Tensor:
            shapes.append([tuple(x.shape) for x in args if isinstance(x, Tensor)])
            return originals[name](*args)

        return compose

    for name in originals:
        setattr(cp, name, watched(name))
    ids, targets = _tokens(length)
    model(_piece(context, ids), targets=_piece(context, targets)).loss.backward()
    for name, original in originals.items():
        setattr(cp, name, original)
    return {"calls": context.calls, "bytes": context.bytes_sent, "shapes": shapes}


def _refusals() -> dict[str, str]:
    """What users are told."""
    said = {}
    for name, fields in REFUSED.items():
        model = _model(fields, torch.float32)
        try:
            cp.context_parallel(model)
        except ValueError as error:
            said[name] = str(error)
        model(_tokens(4)[0])  # still what it was
    model = _model(HYBRID | {"window": 5}, torch.float32)
    cp.context_parallel(model)
    for name, layer in (("attention", 1), ("delta", 0)):
        mixer = model.model.layers[layer].mixer
        x = torch.zeros(1, 4, SIZES["hidden_size"])
        for argument in ({"state": ()}, {"cu_seqlens": torch.tensor([0, 4])}):
            try:
                mixer(x, **argument)
            except ValueError as error:
                said[f"{name} {next(iter(argument))}"] = str(error)
    return said


def _rank(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=4, timeout=timedelta(seconds=60)
    )
    two = dist.new_group([1, 3])  # whose ranks are not the ranks among all
    for group in (None, two):
        if dist.get_rank(group) < 0:
            continue
        found = {name: _compare(group, *case) for name, case in CASES.items()}
        found["traffic"] = [_traffic(group, length) for length in (64, 1024)]
        found["refusals"] = _refusals()
        if dist.get_rank(group) == 0:
            torch.save(found, folder / f"found{dist.get_world_size(group)}.pt")
    dist.destroy_process_group()


# --- what the ranks found ---


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    command = [sys.executable, "-W", "error:::kdn", __file__]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    running = [subprocess.Popen([*command, str(rank), str(folder)], env=environment) for rank in range(4)]
    try:
        codes = [process.wait(timeout=300) for process in running]
    finally:
        for process in running:
            process.kill()
    assert codes == [0] * 4
    return folder


@pytest.fixture(scope="module", params=[2, 4], ids=["2 ranks", "4 ranks"])
def found(request: pytest.FixtureRequest, folder: Path) -> dict[str, Any]:
    result: dict[str, Any] = torch.load(folder / f"found{request.param}.pt")
    return result


@pytest.mark.parametrize("case", CASES)
def test_pieces_compute_what_the_whole_does(found: dict[str, Any], case: str) -> None:
    dtype, extra = CASES[case][2:]
    tolerance = {"autocast": 0.05}.get(extra, 1e-5 if dtype == torch.float32 else 1e-11)
    wrong = {name: x for name, x in found[case].items() if not x <= tolerance}
    assert not wrong


def test_traffic_does_not_grow_with_the_sequence(found: dict[str, Any]) -> None:
    short, long = found["traffic"]
    assert short["bytes"] > 0
    assert short == long  # also the shapes that the composition reads: its time cannot grow either


def test_what_cannot_be_cut_is_refused_by_name(found: dict[str, Any]) -> None:
    said = found["refusals"]
    assert "model.layers.0.mixer (ExactKDN)" in said["kdn-exact"] and "sequential" in said["kdn-exact"]
    assert "model.layers.1.mixer (Attention)" in said["attention"] and "window" in said["attention"]
    for layer in ("delta", "attention"):
        assert "cu_seqlens" in said[f"{layer} cu_seqlens"] and "state" in said[f"{layer} state"]


# --- without ranks ---


@pytest.mark.parametrize("diagonal", [True, False], ids=["diagonal", "isotropic"])
@pytest.mark.parametrize("size", [1.0, 1e-30, 1e10])
def test_summaries_compose_to_the_gains_own_scan(diagonal: bool, size: float) -> None:
    """Three pieces of uneven lengths, decays of −50 and 0, process noises over 20 orders of magnitude."""
    torch.manual_seed(0)
    b, t, h, width = 2, 77, 3, 4
    shape = (b, t, h, width) if diagonal else (b, t, h)
    k = torch.randn(b, t, h, width)
    log_decay = -50.0 * (torch.rand(b, t, h, width) > 0.8)
    noise = size * torch.randn(shape).mul(4).exp()
    r = 1e-3 + torch.rand(b, t, h)
    mu = torch.tensor([1.0, 4.0, 32.0])
    first = 1 + torch.rand(b, h, width if diagonal else 1)
    inputs = [x.requires_grad_() for x in (k, log_decay, noise, r, mu, first)]

    cuts = [slice(0, 1), slice(1, 40), slice(40, t)]
    pieces = [
        cp.gain_summary(k[:, c], log_decay[:, c], noise[:, c], r[:, c], mu, diagonal=diagonal) for c in cuts
    ]
    cov = cp.compose_gain(first, torch.stack(pieces), len(cuts))
    kalman = diagonal_gain if diagonal else isotropic_gain
    wide = [x.detach().double().requires_grad_() for x in inputs]
    start = wide[5] if diagonal else wide[5][..., 0]
    _, expected = kalman(*wide[:4], info_scale=wide[4], initial_cov=start, backend="torch")
    expected = expected if diagonal else expected[..., None]
    torch.testing.assert_close(cov.double(), expected, rtol=1e-4, atol=0)

    weight = 1 / expected.detach()
    got = torch.autograd.grad((cov * weight).sum(), inputs)
    wanted = torch.autograd.grad((expected * weight).sum(), wide)
    for i, (x, y) in enumerate(zip(got, wanted, strict=True)):
        # By how much the covariance changes, relatively, with a relative change of an input (of α, not log α).
        per_cent = 1 if inputs[i] is log_decay else wide[i].detach()
        torch.testing.assert_close(x.double() * per_cent, y * per_cent, rtol=1e-4, atol=1e-4)


if __name__ == "__main__":
    _rank(int(sys.argv[1]), Path(sys.argv[2]))
