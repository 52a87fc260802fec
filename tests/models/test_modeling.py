"""The backbone: loss, packing, checkpointing, compilation and how weights start."""

import math
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import DataCollatorWithFlattening, DynamicCache

from kdn.mixers import MIXERS
from kdn.models import KDNCache, KDNConfig, KDNForCausalLM, KDNModel

VOCABULARY = 50
KINDS: dict[str, dict[str, Any]] = {
    "kdn-diagonal": {"mixer": "kdn-diagonal"},
    "kdn-isotropic": {"mixer": "kdn-isotropic"},
    "hybrid": {"layers": ["kdn-diagonal", "attention"], "window": 5},
    "mamba3": {"mixer": "mamba3-mimo"},
}
each_kind = pytest.mark.parametrize("kind", KINDS)


def config_of(kind: str, **fields: Any) -> KDNConfig:
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_heads": 2,
        "head_dim": 16,
    }
    return KDNConfig(**(sizes | KINDS[kind] | fields))


def model_of(kind: str, seed: int = 0, **fields: Any) -> KDNForCausalLM:
    torch.manual_seed(seed)
    model = KDNForCausalLM(config_of(kind, **fields)).eval()
    nn.init.normal_(model.lm_head.weight, std=0.5)  # so that mistakes are not hidden in a flat softmax
    return model


def tokens(batch: int, length: int, seed: int = 1) -> Tensor:
    return torch.randint(VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    found = {name: p.grad for name, p in model.named_parameters()}
    assert not [name for name, grad in found.items() if grad is None]
    return {name: grad.clone() for name, grad in found.items() if grad is not None}


def assert_same_gradients(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    scale = max(float(grad.abs().max()) for grad in a.values())
    for name, grad in a.items():
        torch.testing.assert_close(
            b[name], grad, atol=1e-5 * scale, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}"
        )


# --- the loss ---


@each_kind
def test_loss_is_the_cross_entropy_of_the_logits(kind: str) -> None:
    model, ids = model_of(kind), tokens(2, 13)
    labels = ids.clone()
    labels[0, 3:6] = -100
    logits = model(ids).logits
    expected = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    wanted = gradients(model, expected)
    found = model(ids, labels=labels)
    assert found.logits is None
    torch.testing.assert_close(found.loss, expected)
    assert_same_gradients(wanted, gradients(model, found.loss))


@pytest.mark.parametrize("side", ["left", "right"])
@each_kind
def test_loss_of_padded_rows_is_that_of_the_rows(kind: str, side: str) -> None:
    model, ids, lengths = model_of(kind), tokens(3, 11), [11, 4, 7]
    mask = torch.zeros_like(ids)
    rows = []
    for row, length in enumerate(lengths):
        here = slice(11 - length, 11) if side == "left" else slice(0, length)
        mask[row, here] = 1
        rows.append(ids[row : row + 1, here])
    terms = [F.cross_entropy(model(row).logits[0, :-1], row[0, 1:], reduction="sum") for row in rows]
    expected = sum(terms) / (sum(lengths) - 3)
    wanted = gradients(model, expected)
    found = model(ids, attention_mask=mask, labels=ids).loss
    torch.testing.assert_close(found, expected)
    assert_same_gradients(wanted, gradients(model, found))


def test_loss_divides_by_the_count_that_is_given() -> None:
    model, ids = model_of("kdn-diagonal"), tokens(2, 9)
    mean = model(ids, labels=ids).loss
    torch.testing.assert_close(model(ids, labels=ids, num_items_in_batch=4).loss, mean * 16 / 4)
    torch.testing.assert_close(model(ids, labels=ids, num_items_in_batch=torch.tensor(4)).loss, mean * 16 / 4)


def test_loss_without_anything_to_predict_is_zero() -> None:
    model, ids = model_of("kdn-diagonal"), tokens(2, 1)
    loss = model(ids, labels=ids).loss
    assert loss.item() == 0
    loss.backward()


# --- packed and padded rows ---


@each_kind
def test_packed_sequences_are_as_if_apart(kind: str) -> None:
    model = model_of(kind)
    rows = [tokens(1, length, seed) for seed, length in enumerate((5, 1, 8, 3))]
    packed = torch.cat(rows, 1)
    offsets = torch.tensor([0, 5, 6, 14, 17])
    logits = model(packed, cu_seqlens=offsets).logits
    torch.testing.assert_close(
        logits, torch.cat([model(row).logits for row in rows], 1), atol=1e-4, rtol=1e-4
    )
    terms = [F.cross_entropy(model(row).logits[0, :-1], row[0, 1:], reduction="sum") for row in rows]
    expected = sum(terms) / 13
    wanted = gradients(model, expected)
    found = model(packed, cu_seqlens=offsets, labels=packed).loss
    torch.testing.assert_close(found, expected)
    assert_same_gradients(wanted, gradients(model, found))


def test_packed_rows_of_transformers_collators_are_sequences_apart() -> None:
    model = model_of("kdn-diagonal")
    rows = [{"input_ids": row, "labels": row} for row in (tokens(1, n)[0].tolist() for n in (5, 3, 1))]
    ids = torch.tensor([[token for row in rows for token in row["input_ids"]]])
    offsets = torch.tensor([0, 5, 8, 9])
    expected = model(ids, cu_seqlens=offsets).logits
    assert not torch.allclose(model(ids).logits, expected)
    for arguments in ({}, {"return_flash_attn_kwargs": True, "return_position_ids": False}):
        batch = DataCollatorWithFlattening(**arguments)(rows)
        assert torch.equal(batch["input_ids"], ids)
        loss = model(**batch).loss
        torch.testing.assert_close(loss, model(ids, cu_seqlens=offsets, labels=ids).loss)
        del batch["labels"]
        torch.testing.assert_close(model(**batch).logits, expected)
        torch.testing.assert_close(model.model(**batch)[0], model.model(ids, cu_seqlens=offsets)[0])
    going_on = torch.arange(9)[None] + 4  # positions behind a cache: one sequence
    torch.testing.assert_close(model(ids, position_ids=going_on).logits, model(ids).logits)


@each_kind
def test_a_split_anywhere_gives_the_same(kind: str) -> None:
    model, ids = model_of(kind), tokens(2, 15)
    whole = model(ids).logits
    for cuts in ([1] * 15, [4, 11], [14, 1]):
        cache = KDNCache()
        pieces = [model(piece, past_key_values=cache).logits for piece in ids.split(cuts, 1)]
        torch.testing.assert_close(torch.cat(pieces, 1), whole, atol=1e-4, rtol=1e-4)
        assert cache.get_seq_length() == 15


def test_padding_has_no_influence() -> None:
    model, ids = model_of("hybrid"), tokens(2, 9)
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    found = model(ids, attention_mask=mask).logits
    ids[0, :4] = 17
    torch.testing.assert_close(model(ids, attention_mask=mask).logits[:, 4:], found[:, 4:], atol=0, rtol=0)


def test_inputs_that_contradict_each_other_are_refused() -> None:
    model, ids = model_of("kdn-diagonal"), tokens(1, 4)
    offsets = torch.tensor([0, 4])
    with pytest.raises(ValueError, match="either input_ids or inputs_embeds"):
        model()
    with pytest.raises(ValueError, match="not both"):
        model(ids, attention_mask=torch.ones_like(ids), cu_seqlens=offsets)


@pytest.mark.parametrize("shape", [(2, 3), (1, 4), (2, 1, 4, 4), (4,)])
@pytest.mark.parametrize("padded", [False, True])
def test_a_mask_of_another_shape_is_refused(shape: tuple[int, ...], padded: bool) -> None:
    mask = torch.ones(shape, dtype=torch.int64)
    mask.view(-1)[0] = 0 if padded else 1
    with pytest.raises(ValueError, match=r"attention_mask must be \[B, ≥ T\] = \[2, ≥ 4\], .* got \["):
        model_of("kdn-diagonal")(tokens(2, 4), attention_mask=mask)


def test_inputs_that_are_no_tokens_are_refused() -> None:
    model = model_of("kdn-diagonal")
    with pytest.raises(ValueError, match=r"input_ids must be \[B, T\] with at least one token, got \[1, 0\]"):
        model.generate(tokens(1, 0), max_new_tokens=2)
    with pytest.raises(ValueError, match=r"input_ids must be \[B, T\] .* got \[4\]"):
        model(tokens(1, 4)[0])
    with pytest.raises(TypeError, match=r"whole numbers \(int64 or int32\), got torch.float32"):
        model(tokens(1, 4).float())
    with pytest.raises(TypeError, match=r"input_ids must be a tensor \[B, T\], got list"):
        model([[1, 2]])
    with pytest.raises(TypeError, match=r"KDNCache, got DynamicCache"):
        model(tokens(1, 4), past_key_values=DynamicCache())


# --- what comes out ---


@each_kind
def test_hidden_states_are_every_layers(kind: str) -> None:
    model, ids = model_of(kind), tokens(2, 7)
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    found = model(ids, attention_mask=mask, output_hidden_states=True)
    hidden = found.hidden_states
    assert [h.shape for h in hidden] == [(2, 7, 32)] * 3  # before each layer, and after the last norm
    first, last = model.model.layers
    for row, start in ((0, 0), (1, 3)):
        inside = [h[row : row + 1, start:] for h in hidden]
        torch.testing.assert_close(inside[0], model.model.embeddings(ids)[row : row + 1, start:])
        torch.testing.assert_close(inside[1], first(inside[0])[0], atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(inside[2], model.model.norm(last(inside[1])[0]), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(model.lm_head(hidden[2]), found.logits)
    assert model(ids).hidden_states is None


def test_inputs_may_be_embeddings_and_outputs_a_tuple() -> None:
    model, ids = model_of("kdn-diagonal"), tokens(2, 6)
    expected = model(ids, logits_to_keep=2)
    assert expected.logits.shape == (2, 2, VOCABULARY)
    given = model(inputs_embeds=model.model.embeddings(ids), logits_to_keep=2)
    torch.testing.assert_close(given.logits, expected.logits)
    torch.testing.assert_close(model(ids, logits_to_keep=2, return_dict=False)[0], expected.logits)


def test_logits_of_chosen_positions() -> None:
    model, ids = model_of("kdn-diagonal"), tokens(2, 7)
    every = model(ids).logits
    assert torch.equal(model(ids, logits_to_keep=2).logits, every[:, -2:])
    assert torch.equal(model(ids, logits_to_keep=torch.tensor([1, 4])).logits, every[:, [1, 4]])


def test_training_keeps_no_cache_unless_asked() -> None:
    model, ids = model_of("kdn-diagonal"), tokens(1, 6)
    assert model(ids).past_key_values is not None
    assert model(ids, labels=ids).past_key_values is None
    assert model.train()(ids).past_key_values is None
    assert model(ids, use_cache=True).past_key_values is not None


# --- training tools ---


@each_kind
def test_gradient_checkpointing_changes_nothing_but_memory(kind: str) -> None:
    model, ids = model_of(kind).train(), tokens(2, 12)
    loss = model(ids, labels=ids).loss
    wanted = gradients(model, loss)
    with warnings.catch_warnings():  # its new name is not in older versions of transformers
        warnings.simplefilter("ignore", FutureWarning)
        model.gradient_checkpointing_enable()
    calls = []
    handle = model.model.layers[1].mixer.register_forward_hook(lambda *_: calls.append(1))
    again = model(ids, labels=ids).loss
    torch.testing.assert_close(again, loss, atol=0, rtol=0)
    assert_same_gradients(wanted, gradients(model, again))
    assert len(calls) == 2  # forward, and once more for the backward pass
    handle.remove()


def test_compiled_it_is_the_same_model() -> None:
    model, ids = model_of("hybrid"), tokens(2, 12)
    loss = model(ids, labels=ids).loss
    wanted = gradients(model, loss)
    compiled = torch.compile(model, backend="eager")
    found = compiled(ids, labels=ids).loss
    torch.testing.assert_close(found, loss)
    assert_same_gradients(wanted, gradients(model, found))


@each_kind
def test_autocast_and_bfloat16_stay_near_float32(kind: str) -> None:
    model, ids = model_of(kind), tokens(2, 12)
    exact = model(ids, labels=ids).loss.item()
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(ids, labels=ids).loss
    assert loss.item() == pytest.approx(exact, rel=0.03)
    gradients(model, loss)
    half = model.bfloat16()
    assert half(ids, labels=ids).loss.item() == pytest.approx(exact, rel=0.03)


# --- how weights start ---


def test_embeddings_start_at_a_fiftieth() -> None:
    torch.manual_seed(0)
    model = KDNModel(config_of("kdn-diagonal", vocab_size=4000))
    weight = model.embeddings.weight
    assert weight.std().item() == pytest.approx(0.02, rel=0.01)
    assert abs(weight.mean().item()) < 3 * 0.02 / math.sqrt(weight.numel())
    assert weight.abs().max() > 0.08  # normal, not uniform


@pytest.mark.parametrize("mixer", MIXERS)
def test_linear_layers_start_as_pytorchs(mixer: str) -> None:
    """Uniform in ±1/√inputs; the SwiGLU's last a factor √(2·layers) smaller; biases zero."""
    torch.manual_seed(0)
    model = KDNForCausalLM(
        KDNConfig(mixer=mixer, vocab_size=300, hidden_size=64, num_hidden_layers=3, num_heads=2, head_dim=32)
    )
    zero = {"w_proj.1.weight"} if mixer in ("kdn-diagonal", "kdn-exact") else set()
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear):
            continue
        if any(f"{name}.weight".endswith(z) for z in zero):
            assert not module.weight.any()
            continue
        bound = module.in_features**-0.5
        if name.endswith("mlp.down_proj"):
            bound /= (2 * 3) ** 0.5
        size = module.weight.abs().max().item()
        # Of n uniform numbers the largest is within 20/n of the bound, but for one case in e^20.
        assert bound * (1 - 20 / module.weight.numel()) <= size <= bound, name
        assert module.weight.std().item() == pytest.approx(
            bound / 3**0.5, rel=5 / module.weight.numel() ** 0.5
        )
        if module.bias is not None:
            assert not module.bias.any(), name


def test_norms_start_as_the_identity_and_no_parameter_is_left_out() -> None:
    """Construction from meta to memory goes through `_init_weights` alone, so it must reach everything."""
    for kind in KINDS:
        torch.manual_seed(0)
        model = KDNForCausalLM(config_of(kind))
        for name, module in model.named_modules():
            if isinstance(module, nn.RMSNorm):
                assert (module.weight == 1).all(), name
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(float("nan"))
        for module in [*model.modules()][::-1]:
            model._init_weights(module)
        left = [name for name, p in model.named_parameters() if not p.isfinite().all()]
        assert not left, left


@each_kind
def test_the_same_seed_gives_the_same_model(kind: str) -> None:
    first, second = model_of(kind).state_dict(), model_of(kind).state_dict()
    other = model_of(kind, seed=1).state_dict()
    assert all(torch.equal(value, second[name]) for name, value in first.items())
    assert not torch.equal(first["model.embeddings.weight"], other["model.embeddings.weight"])


def test_tied_weights_are_one() -> None:
    model = KDNForCausalLM(config_of("kdn-diagonal", tie_word_embeddings=True))
    assert model.lm_head.weight is model.model.embeddings.weight
    assert model.lm_head.weight.std().item() == pytest.approx(0.02, rel=0.1)
    loose = KDNForCausalLM(config_of("kdn-diagonal"))
    assert loose.lm_head.weight is not loose.model.embeddings.weight


def test_the_vocabulary_can_grow() -> None:
    model, ids = model_of("kdn-diagonal"), tokens(1, 5)
    before = model(ids).logits
    model.resize_token_embeddings(VOCABULARY + 6, mean_resizing=False)
    assert model.config.vocab_size == VOCABULARY + 6
    torch.testing.assert_close(model(ids).logits[..., :VOCABULARY], before)
