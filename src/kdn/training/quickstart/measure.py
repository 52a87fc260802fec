"""What is measured of a model that was trained, on this machine, one model after the other.

bits_per_byte       how well it predicts files it has not seen
recall              how many of the needle task's questions it answers
generation_speed    tokens per second, one sequence
sample              a text it goes on with
"""

import math
import statistics
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from kdn.models import KDNCache, KDNForCausalLM
from kdn.training.quickstart.needle import Needle, accuracy

__all__ = ["bits_per_byte", "generation_speed", "recall", "sample"]

PIECE = 2048  # tokens in one pass; the state goes on from piece to piece


@torch.no_grad()
def bits_per_byte(model: KDNForCausalLM, documents: Sequence[Sequence[int]], size: int) -> float:
    """Bits to write `documents` (tokens of `size` bytes in all) with the model's predictions, per byte.

    Each is read from its start to its end. Nothing predicts its first token, which costs log₂ of the vocabulary.
    """
    nats = 0.0
    for document in documents:
        tokens, cache = torch.tensor([list(document)]), KDNCache()
        nats += math.log(model.config.vocab_size)
        for start in range(0, tokens.shape[1] - 1, PIECE):
            piece, targets = tokens[:, start : start + PIECE], tokens[:, start + 1 : start + 1 + PIECE]
            piece = piece[:, : targets.shape[1]]
            found = model(piece, targets=targets, past_key_values=cache, use_cache=True, num_items_in_batch=1)
            nats += float(found.loss)
    return nats / math.log(2) / size


def recall(model: KDNForCausalLM, needle: Needle, length: int, pairs: int, documents: int) -> float:
    """The share of right answers in `documents` of the needle task."""

    def answer(tokens: Tensor) -> Tensor:
        found: Tensor = model(tokens, use_cache=False).logits.argmax(-1)
        return found

    questions = list(needle.questions(length, pairs, documents, seed=0))
    # At most some 4,000 tokens in a pass: there are logits for each.
    rows = max(1, 4096 // length)
    right = [accuracy(answer, questions[i : i + rows]) for i in range(0, documents, rows)]
    sizes = [len(questions[i : i + rows]) for i in range(0, documents, rows)]
    return sum(r * n for r, n in zip(right, sizes, strict=True)) / documents


@torch.no_grad()
def generation_speed(model: KDNForCausalLM, tokens: int) -> float:
    """Tokens per second of one sequence, the median of `tokens` steps after a few."""
    cache, token, seconds = KDNCache(), torch.zeros(1, 1, dtype=torch.long), []
    for _ in range(tokens + 8):
        start = time.perf_counter()
        token = model(token, past_key_values=cache, use_cache=True).logits[:, -1:].argmax(-1)
        seconds.append(time.perf_counter() - start)
    return 1 / statistics.median(seconds[8:])


@torch.no_grad()
def sample(
    model: KDNForCausalLM, prompt: Sequence[int], tokens: int, *, temperature: float, seed: int
) -> list[int]:
    """`tokens` tokens that follow the prompt, none of them the end of the text."""
    generator, cache = torch.Generator().manual_seed(seed), KDNCache()
    read, made = torch.tensor([list(prompt)]), []
    for _ in range(tokens):
        logits = model(read, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[0, -1]
        logits[model.config.eos_token_id or 0] = -math.inf
        made.append(int(torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)))
        read = torch.tensor([made[-1:]])
    return made
