"""What the two models read: Python's standard library, and documents of the needle task, one part to two.

OUT/tokenizer     a byte-level BPE trained on both
OUT/train         documents of exactly one sequence each, so that none is cut in two
OUT/validation    whole files of the standard library that are not trained on
"""

import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from kdn.progress import progress
from kdn.training.data import tokenizer as tokenizers
from kdn.training.data.shards import ShardWriter
from kdn.training.data.sources import STDLIB, Source
from kdn.training.quickstart.needle import Needle, facts, line

__all__ = ["Text", "write"]

TOKENIZER_CHARACTERS = 3_000_000
VALIDATION_FILE = 20_000  # characters at most, so that there are many of them


class Text(NamedTuple):
    """The data of a quickstart: folders, and what is measured on."""

    train: Path
    validation: Path
    tokenizer: Any
    documents: list[str]  # those that validate
    needle: Needle  # asks with lines of those documents between


def write(out: Path, *, vocabulary: int, length: int, train_tokens: int, validation_tokens: int) -> Text:
    """Train the tokenizer and write the shards."""
    rng = random.Random(0)
    documents = list(Source(STDLIB).documents())
    rng.shuffle(documents)
    # So many facts that every name and value becomes a token.
    lines = (line(facts(8, rng)) for _ in range(1500))
    tokenizer = tokenizers.train([*lines, *documents], vocabulary, out / "tokenizer", TOKENIZER_CHARACTERS)

    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
        return ids

    held_out: list[str] = []
    validation: list[list[int]] = []
    while sum(map(len, validation)) < validation_tokens:
        document = documents.pop()
        if len(document) <= VALIDATION_FILE:
            held_out.append(document)
            validation.append(encode(document))
    stream: list[int] = []
    wanted = train_tokens // 3 + 3 * length
    with progress(wanted, "tokens") as bar:
        while documents and len(stream) < wanted:
            ids = [*encode(documents.pop()), tokenizer.eos_token_id]
            stream += ids
            bar.advance(len(ids))

    def rows() -> Iterable[list[int]]:
        """Of `length` − 1 tokens, since eos ends every document."""
        needle, inside = Needle(encode, stream), length - 1
        for start in range(0, len(stream) - inside, inside):
            yield stream[start : start + inside]
            yield needle.training(inside, rng)
            yield needle.training(inside, rng)

    _write(out / "train", tokenizer, rows())
    _write(out / "validation", tokenizer, validation)
    unseen = [token for ids in validation for token in ids]
    return Text(out / "train", out / "validation", tokenizer, held_out, Needle(encode, unseen))


def _write(folder: Path, tokenizer: Any, documents: Iterable[list[int]]) -> None:
    with ShardWriter(
        folder,
        vocab_size=tokenizers.vocab_size(tokenizer),
        eos_token_id=tokenizer.eos_token_id,
        tokenizer={"folder": "../tokenizer", **tokenizers.description(tokenizer)},
        source={"name": "kdn quickstart"},
    ) as shards:
        for ids in documents:
            shards.add(ids)
