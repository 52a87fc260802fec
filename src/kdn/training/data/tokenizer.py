"""Tokenizers: a byte-level BPE trained on one's own documents, or any that transformers loads.

Byte-level means that every text has tokens and comes back from them unchanged; there is no unknown token.
"""

import hashlib
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from kdn.training.data import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

__all__ = ["EOS", "description", "load", "save", "train", "vocab_size"]

EOS = "<|endoftext|>"
TRAIN_CHARACTERS = 10**9


def train(
    documents: Iterable[str], size: int, folder: str | os.PathLike[str], characters: int = TRAIN_CHARACTERS
) -> "PreTrainedTokenizerFast":
    """Train a byte-level BPE with `size` tokens on the first `characters` of `documents`; saved in `folder`.

    Token 0 is eos, the 256 bytes follow, then the merges. The same documents give the same tokenizer. Documents that
    hold fewer merges than asked for give a smaller one.
    """
    if size < 257:
        raise ValueError(f"size must be ≥ 257 (eos and 256 bytes), got {size}")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(_first(documents, characters), trainer)
    made = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=EOS, clean_up_tokenization_spaces=False)
    save(made, folder)
    return load(folder)


def _first(documents: Iterable[str], characters: int) -> Iterator[str]:
    for text in documents:
        yield text
        characters -= len(text)
        if characters <= 0:
            return


def save(tokenizer: "PreTrainedTokenizerFast", folder: str | os.PathLike[str]) -> None:
    """Save as a folder that transformers loads. The folder appears whole."""
    target = Path(folder)
    part = target.with_name(target.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    try:
        tokenizer.save_pretrained(part)
        shutil.rmtree(target, ignore_errors=True)
        part.rename(target)
    except Exception as error:  # a full disk, among others, is a bare Exception of the tokenizers library
        raise DataError(f"the tokenizer cannot be saved in {target}: {error}") from error


def load(name: str | os.PathLike[str]) -> "PreTrainedTokenizerFast":
    """The tokenizer in a folder, or of a model on the Hugging Face hub."""
    from transformers import AutoTokenizer

    path = Path(name)
    if path.is_absolute() and not path.is_dir():
        raise DataError(f"there is no tokenizer folder {path}")
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(name))
    except (OSError, ValueError) as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise DataError(f"tokenizer {name} cannot be loaded: {reason}") from error
    if not tokenizer.is_fast:
        raise DataError(f"tokenizer {name} is one without a tokenizer.json; a fast tokenizer is needed")
    if tokenizer.eos_token_id is None:
        raise DataError(f"tokenizer {name} has no eos token, which must end every document")
    return tokenizer


def vocab_size(tokenizer: "PreTrainedTokenizerFast") -> int:
    """The highest token id and one: ids of added tokens may lie beyond the count of tokens."""
    return max(tokenizer.get_vocab().values()) + 1


def description(tokenizer: "PreTrainedTokenizerFast") -> dict[str, str]:
    """What the index of shards says about the tokenizer: the checksum of all it does."""
    return {"sha256": hashlib.sha256(tokenizer.backend_tokenizer.to_str().encode()).hexdigest()}
