"""What the probes say of a model, against the same walked by hand from its weights."""

import math
from itertools import pairwise
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from torch import Tensor, nn

from kdn.mixers.kalman import KalmanMixer
from kdn.models import KDNCache, KDNForCausalLM
from kdn.models.modeling import Uncertainty
from kdn.models.presets import preset
from kdn.ops import diagonal_gain
from kdn.probe import effective_writes, gains_watched, info_scale_set, of_layer

KINDS = {"diagonal": oracle.diagonal_gain, "isotropic": oracle.isotropic_gain, "exact": oracle.exact_gain}
LAYERS, HEADS = 2, 2
each_kind = pytest.mark.parametrize("kind", list(KINDS))


def model_of(name: str, **changes: Any) -> KDNForCausalLM:
    torch.manual_seed(0)
    model = KDNForCausalLM(preset(f"{name}-tiny", vocab_size=50, **changes)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model


def ids(*shape: int) -> Tensor:
    return torch.randint(50, shape, generator=torch.Generator().manual_seed(1))


def known(model: nn.Module, tokens: Tensor, **options: Any) -> Uncertainty:
    with torch.no_grad():
        found = model(tokens, output_uncertainty=True, **options).uncertainty
    assert isinstance(found, Uncertainty)
    return found


def inputs_of_layers(model: nn.Module, tokens: Tensor) -> list[Tensor]:
    """What every layer's mixer is given."""
    seen: list[Tensor] = []
    hooks = [
        layer.mixer.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
        for layer in model.model.layers
    ]
    with torch.no_grad():
        model(tokens)
    for hook in hooks:
        hook.remove()
    return seen


def by_hand(model: nn.Module, kind: str, tokens: Tensor) -> tuple[list[Any], list[Any]]:
    """kᵀg and τ² qᵀ P_t q of every layer, one token after the other in float64."""
    writes, variances = [], []
    for layer, x in zip(model.model.layers, inputs_of_layers(model, tokens), strict=True):
        mixer = layer.mixer
        with torch.no_grad():
            q, k, v, _ = mixer.queries_keys_values(x)
            w = mixer.write(x, k, v)
            cov = mixer.first_cov(x.shape[0]).double().numpy()
            mu = mixer.mu() if isinstance(mixer.mu(), float) else mixer.mu().numpy()
            q, k, decay, omega, r = (
                y.double().numpy() for y in (q, k, w.log_decay, w.process_noise, w.obs_noise)
            )
        write, variance = np.empty(r.shape), np.empty(r.shape)
        for t in range(x.shape[1]):
            at = slice(t, t + 1)
            gain, cov, _ = KINDS[kind](
                k[:, at], decay[:, at], omega[:, at], r[:, at], info_scale=mu, initial_cov=cov
            )
            write[:, t] = (k[:, t] * gain[:, 0]).sum(-1)
            q_t = q[:, t]
            if kind == "exact":
                after = (cov @ q_t[..., None])[..., 0]
            else:
                after = (cov if kind == "diagonal" else cov[..., None]) * q_t
            variance[:, t] = (q_t * after).sum(-1) / q.shape[-1]
        writes.append(write)
        variances.append(variance)
    return writes, variances


CLOSE = {"rtol": 1e-3, "atol": 1e-6}


@each_kind
@pytest.mark.parametrize("options", [{}, {"learn_info_scale": True}], ids=["fixed", "learned"])
def test_effective_writes_and_read_variances_are_those_by_hand(kind: str, options: dict[str, Any]) -> None:
    model, tokens = model_of(f"kdn-{kind}", **options), ids(3, 12)
    writes, variances = by_hand(model, kind, tokens)
    found = effective_writes(model, tokens)
    assert list(found) == [0, 1]
    uncertainty = known(model, tokens)
    for field in uncertainty:
        assert field.shape == (LAYERS, 3, 12, HEADS) and field.dtype == torch.float32
    np.testing.assert_allclose(uncertainty.read_variance, np.stack(variances), **CLOSE)
    np.testing.assert_allclose(uncertainty.effective_write, np.stack(writes), **CLOSE)
    for layer, write in enumerate(writes):
        assert found[layer].shape == (3, 12, HEADS) and found[layer].dtype == torch.float32
        np.testing.assert_allclose(found[layer], write, **CLOSE)
        assert (found[layer] > 0).all() and (found[layer] < 1).all()


@each_kind
def test_uncertainty_changes_no_output(kind: str) -> None:
    model, tokens = model_of(f"kdn-{kind}"), ids(2, 9)
    with torch.no_grad():
        plain, probed = model(tokens), model(tokens, output_uncertainty=True)
    assert plain.uncertainty is None
    assert torch.equal(plain.logits, probed.logits)


@pytest.mark.parametrize("name", ["kdn-diagonal", "kdn-isotropic", "kdn-exact", "kda", "deltanet"])
def test_state_norm_is_that_of_the_state_after_a_shorter_prefix(name: str) -> None:
    model, tokens = model_of(name), ids(2, 7)
    norms = known(model, tokens).state_norm
    for t in range(1, 8):
        cache = KDNCache()
        with torch.no_grad():
            model(tokens[:, :t], past_key_values=cache)
        for layer in range(LAYERS):
            expected = cache.state(layer).memory.flatten(2).norm(dim=-1)
            torch.testing.assert_close(norms[layer, :, t - 1], expected, rtol=1e-4, atol=1e-6)


def test_what_a_layer_does_not_track_is_nan() -> None:
    tokens = ids(2, 5)
    plain = known(model_of("kda"), tokens)
    assert plain.read_variance.isnan().all()
    assert plain.effective_write.isfinite().all() and plain.state_norm.isfinite().all()
    for name in ("attention", "mamba3-siso"):
        for field in known(model_of(name), tokens):
            assert field.shape == (LAYERS, 2, 5, HEADS) and field.isnan().all()
    for field in known(model_of("kdn-diagonal-swa"), tokens):
        assert field[0].isfinite().all() and field[1].isnan().all()


@each_kind
def test_left_padding_is_not_there(kind: str) -> None:
    model, tokens = model_of(f"kdn-{kind}"), ids(2, 9)
    mask = torch.ones_like(tokens)
    mask[1, :4] = 0
    padded = known(model, tokens, attention_mask=mask)
    alone = known(model, tokens[:1]), known(model, tokens[1:, 4:])
    for name, field in zip(padded._fields, padded, strict=True):
        torch.testing.assert_close(field[:, :1], getattr(alone[0], name), **CLOSE)
        torch.testing.assert_close(field[:, 1:, 4:], getattr(alone[1], name), **CLOSE)


@each_kind
def test_a_continued_cache_knows_what_one_call_knows(kind: str) -> None:
    """Down to one token, whose layer does not go through the gain; the cache goes on as without the probe."""
    model, tokens, cache = model_of(f"kdn-{kind}"), ids(2, 9), KDNCache()
    whole = known(model, tokens)
    pieces = [known(model, tokens[:, a:b], past_key_values=cache) for a, b in ((0, 4), (4, 5), (5, 9))]
    for name, field in zip(whole._fields, whole, strict=True):
        found = torch.cat([getattr(piece, name) for piece in pieces], 2)
        torch.testing.assert_close(found, field, **CLOSE)


def test_packed_sequences_are_separate() -> None:
    model, tokens = model_of("kdn-diagonal"), ids(1, 9)
    packed = known(model, tokens, cu_seqlens=torch.tensor([0, 4, 4, 9]))
    first, second = known(model, tokens[:, :4]), known(model, tokens[:, 4:])
    for field, *alone in zip(packed, first, second, strict=True):
        torch.testing.assert_close(field, torch.cat(alone, 2), **CLOSE)


def test_a_read_is_surer_after_its_key_was_written() -> None:
    """The variance of reading at k falls with every write at k, to nothing without process noise."""
    torch.manual_seed(0)
    layer = model_of("kdn-exact", process_noise=0.0, obs_noise=0.1).model.layers[0].mixer
    layer.q_proj.weight.data.copy_(layer.k_proj.weight)
    layer.q_conv1d.weight.data.copy_(layer.k_conv1d.weight)
    x = torch.randn(1, 1, 64).expand(1, 20, 64)
    _, variance, _ = of_layer(layer, x)
    after_start = variance[0, 4:]  # the convolution has seen nothing but x by then
    assert (after_start.diff(dim=0) < 0).all() and (variance >= 0).all()
    assert (after_start[-1] < variance[0, 0] / 5).all()


def test_the_layer_s_state_is_not_touched() -> None:
    mixer, x = model_of("kdn-diagonal").model.layers[0].mixer, torch.randn(2, 6, 64)
    with torch.no_grad():
        _, state = mixer(x)
        before = [state.memory.clone(), state.cov.clone()]
        of_layer(mixer, x, state)
    assert torch.equal(state.memory, before[0]) and torch.equal(state.cov, before[1])


@each_kind
def test_writes_weaken_as_the_information_scale_grows(kind: str) -> None:
    model, tokens = model_of(f"kdn-{kind}"), ids(2, 40)
    weights = {name: w.clone() for name, w in model.state_dict().items()}
    means = [
        torch.cat(list(effective_writes(model, tokens, info_scale=mu).values())).mean()
        for mu in (0.5, 1.0, math.sqrt(32), 32.0, 128.0)
    ]
    assert all(a > b for a, b in pairwise(means)), means
    own = torch.cat(list(effective_writes(model, tokens).values())).mean()
    assert own == means[3]  # K = 32
    assert all(torch.equal(w, weights[name]) for name, w in model.state_dict().items())


def test_info_scale_set_restores_what_was_there() -> None:
    model = model_of("kdn-diagonal")
    mixers = [m for m in model.modules() if isinstance(m, KalmanMixer)]
    mixers[1].info_scale = 5.0
    with info_scale_set(model, 2.0):
        assert [m.mu() for m in mixers] == [2.0, 2.0]
        with info_scale_set(model, None):
            assert [m.mu() for m in mixers] == [2.0, 2.0]
    assert [m.info_scale for m in mixers] == [None, 5.0]
    with pytest.raises(KeyError), info_scale_set(model, 2.0):
        raise KeyError
    assert [m.mu() for m in mixers] == [32.0, 5.0]
    for wrong in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match="info_scale must be > 0"), info_scale_set(model, wrong):
            pass


def test_an_override_by_the_user_is_what_is_measured() -> None:
    model, tokens = model_of("kdn-diagonal"), ids(1, 20)
    expected = effective_writes(model, tokens, info_scale=1.0)
    for layer in model.model.layers:
        layer.mixer.info_scale = 1.0
    for layer, found in effective_writes(model, tokens).items():
        assert torch.equal(found, expected[layer])


def test_effective_writes_of_the_baselines() -> None:
    """β for a unit key; layers that erase nothing, or are no delta rule, are not in the answer."""
    model, tokens = model_of("kda"), ids(2, 6)
    found = effective_writes(model, tokens)
    for layer, x in enumerate(inputs_of_layers(model, tokens)):
        mixer = model.model.layers[layer].mixer
        with torch.no_grad():
            torch.testing.assert_close(found[layer], mixer.b_proj(x).sigmoid(), rtol=1e-3, atol=1e-5)
    assert effective_writes(model_of("linear-attention"), tokens) == {}
    assert effective_writes(model_of("attention"), tokens) == {}
    assert list(effective_writes(model_of("kdn-diagonal-swa"), tokens)) == [0]
    assert effective_writes(model.model, tokens).keys() == found.keys()


def test_progress_is_told() -> None:
    calls: list[tuple[int, int]] = []
    effective_writes(model_of("kda"), ids(3, 4), progress=lambda done, total: calls.append((done, total)))
    assert calls == [(0, 3), (1, 3), (2, 3), (3, 3)]


def test_watching_gains_leaves_training_as_it_is() -> None:
    """Nested watchers all see, gradients are the same, and nothing stays behind."""
    model, tokens = model_of("kdn-diagonal").train(), ids(2, 6)

    def gradients() -> list[Tensor]:
        model.zero_grad()
        model(tokens, labels=tokens).loss.backward()
        return [p.grad.clone() for p in model.parameters()]

    expected = gradients()
    outer: list[tuple[int, Tensor]] = []
    inner: list[int] = []
    with gains_watched(model, lambda layer, x: outer.append((layer, x))):
        with gains_watched(model, lambda layer, x: inner.append(layer)):
            model(tokens)
        assert inner == [layer for layer, _ in outer] == [0, 1]
        found = gradients()
    assert [layer for layer, _ in outer] == [0, 1, 0, 1] and len(inner) == 2
    assert all(x.shape == (2, 6, HEADS) and not x.requires_grad for _, x in outer)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    model(tokens)
    assert len(outer) == 4
    assert not [m for m in model.modules() if "gain" in vars(m)]


def test_double_precision_layers_can_be_probed() -> None:
    mixer = model_of("kdn-diagonal").model.layers[0].mixer.double()
    x = torch.randn(1, 5, 64, dtype=torch.float64)
    write, _, norm = of_layer(mixer, x)
    with torch.no_grad():
        _, k, v, _ = mixer.queries_keys_values(x)
        w = mixer.write(x, k, v)
        gain, _ = diagonal_gain(
            k, w.log_decay, w.process_noise, w.obs_noise, info_scale=32.0, initial_cov=mixer.first_cov(1)
        )
        torch.testing.assert_close(write, (k * gain).sum(-1).float())
        _, state = mixer(x)
        torch.testing.assert_close(norm[:, -1], state.memory.flatten(2).norm(dim=-1).float())
