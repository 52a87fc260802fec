"""The KDN layers against their equations, walked token by token in float64 from the weights alone."""

import math
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from kdn.mixers import DiagonalKDN, ExactKDN, IsotropicKDN
from kdn.mixers.kalman import KalmanMixer

Array = NDArray[np.float64]
HIDDEN, H, K = 24, 2, 8
KDNS: dict[str, type[KalmanMixer]] = {
    "diagonal": DiagonalKDN,
    "isotropic": IsotropicKDN,
    "exact": ExactKDN,
}
each_kind = pytest.mark.parametrize("kind", list(KDNS))


def build(
    kind: str, *, perturb: float = 0.3, dtype: torch.dtype = torch.float64, **options: Any
) -> KalmanMixer:
    torch.manual_seed(0)
    mixer = KDNS[kind](HIDDEN, H, K, **options)
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter.add_(perturb * torch.randn_like(parameter))
    return mixer.to(dtype)


def tokens(time: int = 40, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(2, time, HIDDEN, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(
        dtype
    )


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def softplus(x: Array) -> Array:
    return np.log1p(np.exp(x))


def noises(p: dict[str, Array], kind: str, x: Array, options: dict[str, Any]) -> tuple[Array, Array]:
    """ω and r of every token."""
    shape = (*x.shape[:2], H) if kind == "isotropic" else (*x.shape[:2], H, K)
    if "process_noise" in options:
        omega = np.full(shape, options["process_noise"])
    elif kind == "isotropic":
        omega = softplus(x @ p["w_proj.weight"].T + p["w_proj.bias"])
    else:
        low = x @ p["w_proj.0.weight"].T
        omega = softplus(low @ p["w_proj.1.weight"].T + p["w_proj.1.bias"]).reshape(shape)
    if "obs_noise" in options:
        return omega, np.full((*x.shape[:2], H), options["obs_noise"])
    return omega, options.get("r_min", 0.01) + softplus(x @ p["r_proj.weight"].T + p["r_proj.bias"])


def layer(mixer: KalmanMixer, kind: str, x_: Tensor, mu: float | Array, options: dict[str, Any]) -> Array:
    """The layer's output from its weights, for one sequence from the start."""
    p = {name: parameter.detach().double().numpy() for name, parameter in mixer.named_parameters()}
    x = x_.double().numpy()
    batch, time, _ = x.shape
    v_width = p["v_proj.weight"].shape[0] // H

    def prepared(name: str) -> Array:
        y, w = x @ p[f"{name}_proj.weight"].T, p[f"{name}_conv1d.weight"][:, 0]
        out = np.zeros_like(y)
        for t in range(time):
            for j in range(min(w.shape[1], t + 1)):
                out[:, t] += w[:, -1 - j] * y[:, t - j]
        return (out * sigmoid(out)).reshape(batch, time, H, -1)

    q, k, v = prepared("q"), prepared("k"), prepared("v")
    q, k = (y / np.sqrt((y**2).sum(-1, keepdims=True) + 1e-6) for y in (q, k))
    f = (x @ p["f_proj.0.weight"].T) @ p["f_proj.1.weight"].T + p["dt_bias"]
    f = f.reshape(batch, time, H, K)
    sigmoid_decay = options.get("decay") == "sigmoid"
    log_decay = np.log(sigmoid(f)) if sigmoid_decay else -np.exp(p["A_log"])[:, None] * softplus(f)
    omega, r = noises(p, kind, x, options)
    c0 = 1 / (0.1 + softplus(p["prior_precision"]))
    prior = {
        "diagonal": np.broadcast_to(c0[:, None], (batch, H, K)),
        "isotropic": np.broadcast_to(c0, (batch, H)),
        "exact": np.broadcast_to(c0[:, None, None] * np.eye(K), (batch, H, K, K)),
    }[kind]
    gain_of = {
        "diagonal": oracle.diagonal_gain,
        "isotropic": oracle.isotropic_gain,
        "exact": oracle.exact_gain,
    }
    gain, _, _ = gain_of[kind](k, log_decay, omega, r, info_scale=mu, initial_cov=prior)
    out, _ = oracle.delta_memory(q, k, v, gain, log_decay)
    out = out / np.sqrt((out**2).mean(-1, keepdims=True) + 1e-5) * p["o_norm.weight"]
    gate = sigmoid((x @ p["g_proj.0.weight"].T) @ p["g_proj.1.weight"].T + p["g_proj.1.bias"])
    y: Array = (out.reshape(batch, time, H * v_width) * gate) @ p["o_proj.weight"].T
    return y


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "info_scale": {"info_scale": 1.7},
    "noises": {"process_noise": 0.05, "obs_noise": 0.3},
    "no process noise": {"process_noise": 0.0},
    "r_min": {"r_min": 0.5},
    "sigmoid": {"decay": "sigmoid"},
    "wide values": {"expand_v": 1.5, "conv_size": 3},
}


@each_kind
@pytest.mark.parametrize("options", OPTIONS.values(), ids=list(OPTIONS))
def test_the_layer_is_its_equations(kind: str, options: dict[str, Any]) -> None:
    mixer, x = build(kind, **options), tokens()
    expected = layer(mixer, kind, x, options.get("info_scale", float(K)), options)
    np.testing.assert_allclose(mixer(x)[0].detach().numpy(), expected, atol=1e-9, rtol=1e-6)
    found = mixer.float()(x.float())[0].detach().numpy()
    np.testing.assert_allclose(found, expected, atol=1e-4, rtol=1e-4)


@each_kind
def test_learned_information_scale(kind: str) -> None:
    """Positive, one per head, K (or what is given) at the start, in the equations, with a gradient."""
    assert build(kind, perturb=0, learn_info_scale=True).mu().tolist() == pytest.approx([K] * H)
    assert build(kind, perturb=0, learn_info_scale=True, info_scale=3).mu().tolist() == pytest.approx([3] * H)
    mixer, x = build(kind, learn_info_scale=True), tokens()
    with torch.no_grad():
        mixer.log_info_scale.copy_(torch.tensor([-6.0, 3.0]))
    assert (mixer.mu() > 0).all()
    expected = layer(mixer, kind, x, np.exp([-6.0, 3.0]), {})
    y, _ = mixer(x)
    np.testing.assert_allclose(y.detach().numpy(), expected, atol=1e-9, rtol=1e-6)
    y.square().sum().backward()
    assert (mixer.log_info_scale.grad != 0).all() and mixer.log_info_scale.grad.isfinite().all()


@each_kind
@pytest.mark.parametrize("learned", [False, True])
def test_information_scale_can_be_overridden_at_run_time(kind: str, learned: bool) -> None:
    """For whole sequences and for single tokens, and back; no weight changes and none is added."""
    mixer, x = build(kind, learn_info_scale=learned), tokens(12)
    weights = {name: w.clone() for name, w in mixer.state_dict().items()}
    own, _ = mixer(x)
    mixer.info_scale = 0.25
    assert mixer.mu() == 0.25
    expected = layer(mixer, kind, x, 0.25, {})
    np.testing.assert_allclose(mixer(x)[0].detach().numpy(), expected, atol=1e-9, rtol=1e-6)
    with torch.no_grad():
        y, state = mixer(x[:, :5])
        found = [y]
        for t in range(5, 12):
            y, state = mixer(x[:, t : t + 1], state)
            found.append(y)
    np.testing.assert_allclose(torch.cat(found, 1).numpy(), expected, atol=1e-9, rtol=1e-6)
    assert (torch.cat(found, 1) - own).abs().max() > 1e-4
    mixer.info_scale = None
    assert torch.equal(mixer(x)[0], own)
    assert mixer.state_dict().keys() == weights.keys()
    assert all(torch.equal(w, weights[name]) for name, w in mixer.state_dict().items())


@each_kind
def test_start_values(kind: str) -> None:
    """c₀ = 1, biases zero, ω of the low-rank kinds ln 2 whatever the token, r what its projection says."""
    mixer, x = build(kind, perturb=0, dtype=torch.float32), tokens(dtype=torch.float32)
    torch.testing.assert_close(mixer.prior(), torch.ones(H))
    _, k, v, _ = mixer.queries_keys_values(x)
    written = mixer.write(x, k, v)
    assert (mixer.r_proj.bias == 0).all()
    torch.testing.assert_close(written.obs_noise, 0.01 + torch.nn.functional.softplus(mixer.r_proj(x)))
    at_zero = mixer.write(torch.zeros_like(x), k, v)
    torch.testing.assert_close(at_zero.obs_noise, torch.full((2, 40, H), 0.01 + math.log(2)))
    torch.testing.assert_close(at_zero.process_noise, torch.full(written.process_noise.shape, math.log(2)))
    if kind == "isotropic":
        assert mixer.w_proj.weight.abs().min() > 0 and (mixer.w_proj.bias == 0).all()
        assert written.process_noise.std() > 0.01
    else:
        torch.testing.assert_close(written.process_noise, torch.full((2, 40, H, K), math.log(2)))
        assert mixer.w_proj[0].weight.abs().min() > 0


@each_kind
def test_prior_has_a_gradient_and_is_used_at_the_start_only(kind: str) -> None:
    mixer, x = build(kind), tokens(6)
    _, state = mixer(x)
    state = type(state)(state.memory.detach(), state.cov.detach(), tuple(c.detach() for c in state.conv))
    mixer(x, state)[0].square().sum().backward()
    assert mixer.prior_precision.grad is None
    mixer(x)[0].square().sum().backward()
    assert (mixer.prior_precision.grad != 0).all()


@pytest.mark.parametrize("decay", ["softplus", "sigmoid"])
def test_both_decays_start_from_the_same_distribution(decay: str) -> None:
    """−log α = A·Δ with A uniform in [1, 16] and Δ log-uniform in [1e-3, 1e-1], where f is 0."""
    torch.manual_seed(0)
    mixer = DiagonalKDN(4, 4000, 8, decay=decay)
    rate = -mixer.log_decay(torch.zeros(1, 1, 4)).detach().flatten()
    assert rate.min() >= 0.999e-3 and rate.max() <= 1.601
    low, high = math.log(1e-3), math.log(1e-1)
    # E log A for A uniform in [1, 16] is (16 ln 16 − 15) / 15.
    expected = (low + high) / 2 + (16 * math.log(16) - 15) / 15
    assert rate.log().mean() == pytest.approx(expected, abs=0.05)
    within_heads = rate.unflatten(0, (4000, 8)).log().var(1).mean()
    assert within_heads == pytest.approx((high - low) ** 2 / 12, rel=0.03)
    if decay == "sigmoid":
        assert not hasattr(mixer, "A_log")


def test_state_size_of_the_paper_s_layers() -> None:
    with torch.device("meta"):
        sizes = {kind: cls(2048, 16, 128).state_size() for kind, cls in KDNS.items()}
    assert sizes == {"diagonal": 262144 + 2048, "isotropic": 262144 + 16, "exact": 2 * 262144}


@each_kind
@pytest.mark.parametrize("info_scale", [1e-3, 1.0, 1e4])
def test_effective_writes_are_in_the_unit_interval(kind: str, info_scale: float) -> None:
    """kᵀg, with weights far from their start (observation noise at its floor for many tokens)."""
    mixer = build(kind, perturb=3.0, dtype=torch.float32, info_scale=info_scale)
    x = 5 * tokens(dtype=torch.float32)
    _, k, v, _ = mixer.queries_keys_values(x)
    written = mixer.write(x, k, v)
    gain, _ = mixer.gain(k, written)
    effective = (k * gain).sum(-1)
    assert (effective >= 0).all() and (effective <= 1 + 1e-6).all()
    assert written.obs_noise.min() < 0.02  # so that the upper end was tried


def test_a_fixed_noise_has_no_parameters() -> None:
    names = {n for n, _ in build("diagonal", process_noise=0.1, obs_noise=0.1).named_parameters()}
    assert not [n for n in names if n.startswith(("w_proj", "r_proj"))]


@pytest.mark.parametrize("options", [{"process_noise": 0.1}, {"obs_noise": 0.1}])
def test_fixed_noises_are_not_rounded_to_bfloat16(options: dict[str, float]) -> None:
    mixer, x = build("diagonal", dtype=torch.bfloat16, **options), tokens(dtype=torch.bfloat16)
    _, k, v, _ = mixer.queries_keys_values(x)
    written = mixer.write(x, k, v)
    fixed = written.process_noise if "process_noise" in options else written.obs_noise
    torch.testing.assert_close(fixed, torch.full(fixed.shape, 0.1))
    assert written.log_decay.dtype == torch.float32
