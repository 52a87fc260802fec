"""`generate` and the cache: whatever the route, the same tokens as reading everything anew."""

import copy
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers.generation.streamers import BaseStreamer

from kdn.models import KDNCache, KDNConfig, KDNForCausalLM

VOCABULARY = 40
KINDS: dict[str, dict[str, Any]] = {
    "kdn-diagonal": {"mixer": "kdn-diagonal", "num_hidden_layers": 2},
    "kdn-isotropic": {"mixer": "kdn-isotropic", "num_hidden_layers": 2},
    "hybrid": {"layers": ["kdn-diagonal", "attention"], "window": 6},
    "mamba3": {"mixer": "mamba3-siso", "num_hidden_layers": 2},
}
each_kind = pytest.mark.parametrize("kind", KINDS)


def model_of(kind: str, vocabulary: int = VOCABULARY, **fields: Any) -> KDNForCausalLM:
    torch.manual_seed(0)
    sizes = {"vocab_size": vocabulary, "hidden_size": 32, "num_heads": 2, "head_dim": 16}
    model = KDNForCausalLM(KDNConfig(**(sizes | KINDS[kind] | fields))).eval()
    # Untrained heads are nearly indifferent; a sharper one makes wrong states change the tokens.
    torch.nn.init.normal_(model.lm_head.weight, std=0.5)
    return model


def prompts(batch: int, length: int, vocabulary: int = VOCABULARY) -> Tensor:
    return torch.randint(1, vocabulary, (batch, length), generator=torch.Generator().manual_seed(1))


def greedy(model: KDNForCausalLM, ids: Tensor, steps: int) -> Tensor:
    """Without a cache and without `generate`."""
    for _ in range(steps):
        with torch.no_grad():
            ids = torch.cat([ids, model(ids, use_cache=False).logits[:, -1:].argmax(-1)], 1)
    return ids


@each_kind
def test_greedy_is_the_argmax_of_a_full_reading(kind: str) -> None:
    model, ids = model_of(kind), prompts(2, 9)
    expected = greedy(model, ids, 12)
    torch.testing.assert_close(model.generate(ids, max_new_tokens=12, do_sample=False), expected)
    without = model.generate(ids, max_new_tokens=12, do_sample=False, use_cache=False)
    torch.testing.assert_close(without, expected)


@each_kind
def test_cached_logits_are_those_of_a_full_reading(kind: str) -> None:
    model, ids = model_of(kind), prompts(2, 9)
    found = model.generate(
        ids, max_new_tokens=12, do_sample=False, output_logits=True, return_dict_in_generate=True
    )
    with torch.no_grad():
        whole = model(found.sequences).logits
    torch.testing.assert_close(torch.stack(found.logits, 1), whole[:, 8:-1], atol=1e-4, rtol=1e-4)


def test_sampling_repeats_with_its_seed_and_follows_the_distribution() -> None:
    model, ids = model_of("kdn-diagonal"), prompts(1, 5)

    def sampled(seed: int, count: int) -> Tensor:
        torch.manual_seed(seed)
        return model.generate(ids, max_new_tokens=3, do_sample=True, top_k=0, num_return_sequences=count)

    torch.testing.assert_close(sampled(3, 4), sampled(3, 4))
    assert not torch.equal(sampled(3, 4), sampled(4, 4))
    draws = sampled(5, 4000)
    with torch.no_grad():
        wanted = model(ids).logits[0, -1].softmax(-1)
    share = torch.bincount(draws[:, 5], minlength=VOCABULARY) / len(draws)
    assert (share - wanted).abs().max() < 5 * (0.25 / len(draws)) ** 0.5


def test_several_sequences_of_a_prompt_are_that_prompt_several_times() -> None:
    model, ids = model_of("hybrid"), prompts(2, 6)
    torch.manual_seed(7)
    found = model.generate(ids, max_new_tokens=5, do_sample=True, num_return_sequences=3)
    torch.manual_seed(7)
    repeated = model.generate(ids.repeat_interleave(3, 0), max_new_tokens=5, do_sample=True)
    torch.testing.assert_close(found, repeated)


def best_continuations(
    model: KDNForCausalLM, prompt: Tensor, steps: int, end: int | None, penalty: float
) -> list[tuple[float, list[int]]]:
    """All continuations, best first: Σ log p / tokens^penalty, up to `steps` tokens or to the end token."""
    vocabulary = model.config.vocab_size
    found = []
    for length in range(1, steps + 1):
        for tail in itertools.product(range(vocabulary), repeat=length):
            ended = tail[-1] == end
            if end in tail[:-1] or (not ended and length < steps):
                continue
            found.append(list(tail))
    longest = torch.tensor([tail + [0] * (steps - len(tail)) for tail in found])
    ids = torch.cat([prompt.expand(len(found), -1), longest], 1)
    with torch.no_grad():
        log_p = model(ids).logits.log_softmax(-1)[:, prompt.shape[1] - 1 : -1]
    steps_log_p = log_p.gather(-1, longest[..., None])[..., 0]
    scored = [
        (float(steps_log_p[i, : len(tail)].sum()) / len(tail) ** penalty, tail)
        for i, tail in enumerate(found)
    ]
    return sorted(scored, reverse=True)


@pytest.mark.parametrize("penalty", [0.0, 1.0])
@pytest.mark.parametrize("end", [None, 2])
@pytest.mark.parametrize("kind", ["kdn-diagonal", "hybrid", "mamba3"])
def test_exhaustive_beams_find_the_best_of_all_continuations(
    kind: str, end: int | None, penalty: float
) -> None:
    steps, vocabulary = 3, 4
    model, prompt = model_of(kind, vocabulary, window=3 if kind == "hybrid" else None), prompts(1, 5, 4)
    expected = best_continuations(model, prompt, steps, end, penalty)[:4]
    found = model.generate(
        prompt,
        max_new_tokens=steps,
        do_sample=False,
        num_beams=vocabulary**steps,  # none is ever dropped
        num_return_sequences=4,
        length_penalty=penalty,
        early_stopping="never",
        eos_token_id=end,
        pad_token_id=0,
        output_scores=True,
        return_dict_in_generate=True,
    )
    for (score, tail), row, value in zip(expected, found.sequences, found.sequences_scores, strict=True):
        assert row[5 : 5 + len(tail)].tolist() == tail
        assert value.item() == pytest.approx(score, abs=1e-4)


@each_kind
def test_few_beams_with_a_cache_are_few_beams_without(kind: str) -> None:
    model, ids = model_of(kind), prompts(2, 7)
    asked = {"max_new_tokens": 8, "do_sample": False, "num_beams": 3, "num_return_sequences": 2}
    torch.testing.assert_close(model.generate(ids, **asked), model.generate(ids, use_cache=False, **asked))


@each_kind
def test_left_padded_rows_are_as_if_alone(kind: str) -> None:
    model = model_of(kind)
    lengths = [9, 4, 1, 7]
    ids, mask = prompts(4, 9), torch.zeros(4, 9, dtype=torch.long)
    for row, length in enumerate(lengths):
        mask[row, -length:] = 1
        ids[row, :-length] = 0
    asked = {
        "max_new_tokens": 8,
        "do_sample": False,
        "output_logits": True,
        "return_dict_in_generate": True,
    }
    together = model.generate(ids, attention_mask=mask, **asked)
    for row, length in enumerate(lengths):
        alone = model.generate(ids[row : row + 1, -length:], **asked)
        assert together.sequences[row, 9:].tolist() == alone.sequences[0, length:].tolist()
        logits = torch.stack(together.logits, 1)[row], torch.stack(alone.logits, 1)[0]
        torch.testing.assert_close(*logits, atol=1e-4, rtol=0)


@each_kind
@pytest.mark.parametrize("padded", [False, True])
def test_a_second_turn_goes_on_from_the_cache(kind: str, padded: bool) -> None:
    """As users do it: the conversation so far and the new words, with the cache of the turn before."""
    model, ids = model_of(kind), prompts(2, 8)
    mask = torch.ones_like(ids)
    if padded:
        mask[1, :5] = 0
    first = model.generate(
        ids, attention_mask=mask, max_new_tokens=6, do_sample=False, return_dict_in_generate=True
    )
    assert isinstance(first.past_key_values, KDNCache)
    more = torch.cat([first.sequences, prompts(2, 5) % 7 + 1], 1)
    mask = torch.nn.functional.pad(mask, (0, more.shape[1] - mask.shape[1]), value=1)
    asked = {
        "attention_mask": mask,
        "max_new_tokens": 6,
        "do_sample": False,
        "output_logits": True,
        "return_dict_in_generate": True,
    }
    fresh = model.generate(more, **asked)
    seen = []
    handle = model.model.embeddings.register_forward_hook(lambda _, args, __: seen.append(args[0].shape[1]))
    second = model.generate(more, past_key_values=first.past_key_values, **asked)
    handle.remove()
    assert seen == [6, 1, 1, 1, 1, 1]  # the last token of the first turn was not read yet
    torch.testing.assert_close(second.sequences, fresh.sequences)
    torch.testing.assert_close(torch.stack(second.logits), torch.stack(fresh.logits), atol=1e-4, rtol=0)


@each_kind
def test_a_prompt_read_in_pieces_is_the_same_prompt(kind: str) -> None:
    model, ids = model_of(kind), prompts(2, 17)
    plain = model.generate(ids, max_new_tokens=8, do_sample=False)
    pieces = model.generate(ids, max_new_tokens=8, do_sample=False, prefill_chunk_size=5)
    torch.testing.assert_close(pieces, plain)
    mask = torch.ones_like(ids)
    mask[0, :8] = 0  # the first piece has no token of this row
    plain = model.generate(ids, attention_mask=mask, max_new_tokens=8, do_sample=False)
    asked = {"max_new_tokens": 8, "do_sample": False, "prefill_chunk_size": 5}
    torch.testing.assert_close(model.generate(ids, attention_mask=mask, **asked), plain)


class Listener(BaseStreamer):
    def __init__(self) -> None:
        self.heard: list[Tensor] = []
        self.ended = False

    def put(self, value: Tensor) -> None:
        assert not self.ended
        self.heard.append(value.flatten())

    def end(self) -> None:
        self.ended = True


def test_a_streamer_hears_prompt_and_tokens_in_order() -> None:
    model, ids, listener = model_of("hybrid"), prompts(1, 6), Listener()
    found = model.generate(ids, max_new_tokens=7, do_sample=False, streamer=listener)
    assert listener.ended
    assert [len(piece) for piece in listener.heard] == [6] + [1] * 7
    torch.testing.assert_close(torch.cat(listener.heard), found[0])


# --- the cache itself ---


def read(model: KDNForCausalLM, ids: Tensor) -> KDNCache:
    with torch.no_grad():
        return model(ids).past_key_values


@each_kind
def test_a_prompt_kept_in_a_file_goes_on_identically(kind: str, tmp_path: Path) -> None:
    model, ids = model_of(kind), prompts(2, 9)
    more = prompts(2, 12)
    cache = read(model, ids)
    cache.save(tmp_path / "prompt.safetensors")
    loaded = KDNCache.load(tmp_path / "prompt.safetensors")
    assert loaded.get_seq_length() == 9
    assert loaded.nbytes() == cache.nbytes()
    with torch.no_grad():
        for piece in more.split(4, 1):
            expected = model(piece, past_key_values=cache).logits
            torch.testing.assert_close(model(piece, past_key_values=loaded).logits, expected, atol=0, rtol=0)


def test_an_empty_cache_is_kept_too(tmp_path: Path) -> None:
    KDNCache().save(tmp_path / "empty")
    model, ids = model_of("kdn-diagonal"), prompts(1, 5)
    with torch.no_grad():
        found = model(ids, past_key_values=KDNCache.load(tmp_path / "empty")).logits
        torch.testing.assert_close(found, model(ids).logits)


@pytest.mark.parametrize("damage", ["cut", "text", "foreign", "newer"])
def test_a_file_that_is_no_cache_is_one_clear_error(damage: str, tmp_path: Path) -> None:
    file = tmp_path / "prompt.safetensors"
    read(model_of("kdn-diagonal"), prompts(1, 5)).save(file)
    if damage == "cut":
        file.write_bytes(file.read_bytes()[:-40])
    elif damage == "text":
        file.write_text("not tensors at all")
    elif damage == "foreign":
        save_file({"x": torch.ones(2)}, file)
    else:
        save_file({"x": torch.ones(2)}, file, metadata={"kdn-cache": '{"tokens": 3, "states": ["Other"]}'})
    with pytest.raises(
        ValueError, match=r"prompt.safetensors is not a cache that was saved by KDNCache.save"
    ):
        KDNCache.load(file)


def test_a_cache_of_another_model_or_library_is_refused() -> None:
    model, ids = model_of("kdn-diagonal"), prompts(1, 5)
    other = read(model_of("kdn-diagonal", num_hidden_layers=3), ids)
    with pytest.raises(ValueError, match="3 layers"):
        model(ids, past_key_values=other)
    with pytest.raises(TypeError, match=r"must be a kdn\.models\.KDNCache, got tuple"):
        model.generate(ids, past_key_values=(), max_new_tokens=2)


@each_kind
def test_a_copy_of_a_cache_is_a_branch(kind: str) -> None:
    model, ids = model_of(kind), prompts(1, 9)
    cache = model(ids, use_cache=True).past_key_values  # with gradients
    branch = copy.deepcopy(cache)
    one, other = torch.tensor([[3, 4, 5]]), torch.tensor([[6, 7, 8]])
    with torch.no_grad():
        for token in one.split(1, 1):
            first = model(token, past_key_values=cache).logits
        for token in other.split(1, 1):
            second = model(token, past_key_values=branch).logits
        for tail, found in ((one, first), (other, second)):
            whole = model(torch.cat([ids, tail], 1)).logits[:, -1:]
            torch.testing.assert_close(found, whole, atol=1e-4, rtol=0)


def test_a_cache_cannot_go_back() -> None:
    cache = read(model_of("kdn-diagonal"), prompts(1, 5))
    assert not cache.is_croppable
    with pytest.raises(ValueError, match=r"copy\.deepcopy"):
        cache.crop(3)


def storage_bytes(cache: KDNCache) -> int:
    """What the states keep alive, views' storages in full."""
    found: dict[int, int] = {}
    cache.change(lambda x: found.update({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes()}) or x)
    return sum(found.values())


@each_kind
def test_memory_of_a_running_text_does_not_grow(kind: str) -> None:
    """From token 1,000 to token 100,000."""
    sizes = {} if kind == "mamba3" else {"hidden_size": 8, "num_heads": 1, "head_dim": 8}
    model = model_of(kind, intermediate_size=8, **sizes)
    cache, sizes = KDNCache(), []
    text = prompts(1, 1000)
    with torch.no_grad():
        for _ in range(100):
            model.model(text, past_key_values=cache)
            sizes.append((cache.nbytes(), storage_bytes(cache)))
    assert cache.get_seq_length() == 100_000
    assert len(set(sizes[1:])) == 1
    assert sizes[0][0] == sizes[-1][0]
    assert max(held for _, held in sizes) < 4 * sizes[0][0]
