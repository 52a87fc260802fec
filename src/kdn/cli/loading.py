"""Models and tokenizers by what a user calls them: a folder, a name on the hub, a preset."""

import argparse
import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from kdn.cli.arguments import stop

if TYPE_CHECKING:
    import torch

    from kdn.models import KDNConfig

__all__ = [
    "Bytes",
    "Text",
    "add_device",
    "add_tokenizer",
    "config_of",
    "device_of",
    "load",
    "make_folder",
    "needs",
    "tokenizer_of",
]


class Text(Protocol):
    """What the commands ask of a tokenizer."""

    vocabulary: int  # ids from here on are not text
    end: int | None  # the id that ends a text

    def encode(self, text: str, start: bool = True) -> list[int]: ...

    def decode(self, ids: list[int]) -> str: ...


class Bytes:
    """The bytes of a text are its ids: for models that have no tokenizer because they have learned nothing."""

    vocabulary = 256
    end: int | None = None

    def encode(self, text: str, start: bool = True) -> list[int]:
        return list(text.encode("utf-8"))

    def decode(self, ids: list[int]) -> str:
        return bytes(ids).decode("utf-8", errors="replace")


class Tokenizer:
    """One of transformers' tokenizers."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self.end = tokenizer, tokenizer.eos_token_id
        self.vocabulary = len(tokenizer)

    def encode(self, text: str, start: bool = True) -> list[int]:
        """`start`: with whatever this tokenizer puts before a text."""
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=start)
        while start and len(ids) > 1 and ids[-1] == self.end:  # some also put the end behind it
            ids.pop()
        return ids

    def decode(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, clean_up_tokenization_spaces=False))


@contextmanager
def needs(package: str) -> Iterator[None]:
    """Around an import: a package that is not installed is named, with how to get it."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        stop(f"this needs {package}: pip install {package}")


def make_folder(folder: Path) -> None:
    """Make the folder that results are to go to, or stop; before the work that would be lost."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        stop(f"cannot make the folder {folder}: {error.strerror}")
    if not os.access(folder, os.W_OK):
        stop(f"cannot write to the folder {folder}")


def add_device(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--device", metavar="DEVICE", help="cpu, cuda, … (default: an accelerator if there is one)"
    )


def add_tokenizer(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--tokenizer", metavar="TOKENIZER", help="folder or hub name of one (default: the model's own)"
    )


def device_of(name: str | None) -> "torch.device":
    import torch

    if name is None:
        found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        return found or torch.device("cpu")
    try:
        torch.empty(0, device=name)
        return torch.device(name)
    except (RuntimeError, AssertionError) as error:  # the latter where torch is built without that device
        stop(f"no device {name!r} here: {str(error).splitlines()[0]}")


def config_of(name: str, random_init: bool) -> "KDNConfig":
    """The configuration of a saved model or, with random_init, also of a preset."""
    with needs("transformers"):
        from kdn.models import KDNConfig
        from kdn.models.presets import preset, preset_names

    if Path(name).is_dir():
        return _loaded(name, KDNConfig.from_pretrained)
    if name in preset_names():
        if not random_init:
            stop(f"{name} is a preset, sizes without trained weights: add --random-init to try it out")
        return preset(name)
    if random_init and "/" not in name:
        try:
            return preset(name)
        except ValueError as error:
            stop(f"no such folder: {name}, and {error}")
    if "/" not in name or name.count("/") > 1 or name.startswith((".", "/", "~")):
        stop(f"no such folder: {name}")
    return _loaded(name, KDNConfig.from_pretrained)


def load(name: str, random_init: bool, seed: int, *, backbone: bool = False, dtype: Any = None) -> Any:
    """The model of that name: in evaluation mode, with the weights it has or fresh ones.

    backbone: without its head. dtype: None is what was saved, float32 for fresh weights.
    """
    import torch

    config = config_of(name, random_init) if random_init or not Path(name).is_dir() else None
    from transformers.utils import logging

    from kdn.models import KDNForCausalLM, KDNModel

    cls: Any = KDNModel if backbone else KDNForCausalLM
    if random_init:
        torch.manual_seed(seed)
        return cls(config).to(dtype or torch.float32).eval()
    logging.disable_progress_bar()
    return _loaded(name, cls.from_pretrained, dtype=dtype or "auto").eval()


def _loaded(name: str, load: Any, **options: Any) -> Any:
    try:
        return load(name, **options)
    except ValueError as error:
        stop(error)
    except OSError as error:
        why = str(error).splitlines()[0]
        stop(
            why
            if Path(name).is_dir()
            else f"{name} is no folder here, and it cannot be had from the hub: {why}"
        )


def tokenizer_of(model: str, tokenizer: str | None, random_init: bool) -> Text:
    """The named tokenizer, else the model's own; a model with random weights may do without one."""
    where = tokenizer or model
    folder = Path(where)
    if random_init and tokenizer is None and not (folder.is_dir() and _has_tokenizer(folder)):
        return Bytes()
    if folder.is_dir() and not _has_tokenizer(folder):
        stop(
            f"{where} has no tokenizer (no tokenizer.json or tokenizer_config.json): save one there with "
            f"tokenizer.save_pretrained({where!r}), or name one with --tokenizer"
        )
    if tokenizer is not None and not folder.is_dir() and "/" not in tokenizer.strip("/."):
        stop(f"no such folder: {tokenizer}")
    with needs("transformers"):
        transformers = importlib.import_module("transformers")
    try:
        if (folder / "tokenizer.json").is_file() and not (folder / "tokenizer_config.json").is_file():
            # Nothing there says which class it is; the file itself says all that matters.
            cls = transformers.PreTrainedTokenizerFast
            return Tokenizer(cls(tokenizer_file=str(folder / "tokenizer.json")))
        return Tokenizer(transformers.AutoTokenizer.from_pretrained(where))
    except (OSError, ValueError, KeyError) as error:
        stop(f"{where}: its tokenizer cannot be loaded: {str(error).splitlines()[0]}")


def _has_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json"))
