"""`kdn generate`: go on with a text."""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kdn.cli.arguments import command, more_than_zero, stop, whole
from kdn.cli.loading import Text, add_device, add_tokenizer, device_of, load, make_folder, tokenizer_of

if TYPE_CHECKING:
    import torch

    from kdn.models import KDNCache

__all__ = ["add"]

CHUNK = 512  # tokens of a prompt read at a time: activations of one chunk, not of the whole prompt


def add(commands: argparse._SubParsersAction) -> None:
    generate = command(
        commands,
        "generate",
        "go on with a text",
        "Read a prompt and go on with it, token by token as they come. MODEL is a folder in which a\n"
        "model and its tokenizer are saved, or a model's name on the hub:\n\n"
        '    kdn generate runs/stories "Once upon a time"\n'
        "    kdn generate runs/stories --prompt-file book.txt --greedy --max-new-tokens 300\n\n"
        "The same without a trained model: a preset with random weights, which takes the bytes of a\n"
        "text for tokens and answers nonsense:\n\n"
        '    kdn generate kdn-diagonal-tiny "Once upon a time" --random-init\n\n'
        "What the model remembers of a prompt has a fixed size and can be kept as a file. Read a\n"
        "long text once, then ask as often as you like:\n\n"
        "    kdn generate runs/stories --prompt-file book.txt --save-state book.state --max-new-tokens 0\n"
        '    kdn generate runs/stories --load-state book.state "The moral of it all is"',
    )
    generate.add_argument("model", metavar="MODEL", help="folder, hub name or, with --random-init, preset")
    generate.add_argument("prompt", nargs="?", metavar="PROMPT", help="the text to go on with")
    generate.add_argument("--prompt-file", type=Path, metavar="FILE", help="read the prompt from there")
    generate.add_argument(
        "--max-new-tokens", type=whole(0), default=100, metavar="N", help="at most (default: %(default)s)"
    )
    generate.add_argument("--greedy", action="store_true", help="always the likeliest token")
    generate.add_argument(
        "--temperature",
        type=more_than_zero,
        default=0.8,
        metavar="X",
        help="below 1 prefers likely tokens, above 1 gives unlikely ones a chance (default: %(default)s)",
    )
    generate.add_argument(
        "--top-p",
        type=more_than_zero,
        default=0.95,
        metavar="P",
        help="sample among the likeliest tokens that together have this probability (default: %(default)s)",
    )
    generate.add_argument(
        "--seed", type=whole(0), default=0, metavar="N", help="of sampling and random weights (default: 0)"
    )
    generate.add_argument(
        "--save-state", type=Path, metavar="FILE", help="keep what is known after the prompt"
    )
    generate.add_argument("--load-state", type=Path, metavar="FILE", help="the prompt goes on from there")
    generate.add_argument("--random-init", action="store_true", help="fresh random weights, for trying out")
    generate.add_argument(
        "--dtype", choices=["float32", "bfloat16"], help="of the weights (default: as they were saved)"
    )
    add_device(generate)
    add_tokenizer(generate)
    generate.set_defaults(command=_generate, parser=generate)


def _generate(options: argparse.Namespace) -> int:
    prompt = _prompt(options)
    device = device_of(options.device)
    if options.save_state:
        make_folder(options.save_state.parent)
    import torch

    dtype = options.dtype and getattr(torch, options.dtype)
    model = load(options.model, options.random_init, options.seed, dtype=dtype).to(device)
    text = tokenizer_of(options.model, options.tokenizer, options.random_init)
    if text.vocabulary > model.config.vocab_size:
        stop(f"the tokenizer has {text.vocabulary} tokens, {options.model} knows {model.config.vocab_size}")
    ids = text.encode(prompt, start=options.load_state is None)
    if not ids:
        stop("the prompt is empty: the model needs a token to start from")
    cache = _first_cache(options.load_state, model, device)
    try:
        logits = _read(model, ids, cache)
    except (RuntimeError, ValueError) as error:
        if options.load_state is None:
            raise
        stop(f"the state in {options.load_state} is not one of {options.model}: {error}")
    if options.save_state:
        cache.save(options.save_state)
        print(
            f"saved {options.save_state}: {cache.tokens:,} tokens read, {cache.nbytes():,} bytes",
            file=sys.stderr,
        )
    if options.max_new_tokens:
        _write(text, ids, _continuation(model, text, logits, cache, options))
    return 0


def _prompt(options: argparse.Namespace) -> str:
    if (options.prompt is None) == (options.prompt_file is None):
        options.parser.error("give a prompt: PROMPT or --prompt-file FILE, one of them")
    if options.top_p > 1:
        options.parser.error(f"argument --top-p: must be a number in (0, 1], got {options.top_p}")
    if options.prompt_file is None:
        return str(options.prompt)
    try:
        return str(options.prompt_file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        stop(f"cannot read {options.prompt_file}: {error}")


def _first_cache(file: Path | None, model: Any, device: "torch.device") -> "KDNCache":
    from kdn.models import KDNCache

    if file is None:
        return KDNCache()
    if not file.is_file():
        stop(f"no such file: {file}")
    try:
        cache = KDNCache.load(file, device)
    except ValueError as error:
        stop(error)
    layers = model.config.num_hidden_layers
    if len(cache) != layers:
        stop(f"the state in {file} is of a model with {len(cache)} layers, this one has {layers}")
    return cache


def _read(model: Any, ids: list[int], cache: "KDNCache") -> "torch.Tensor":
    """Read tokens into the cache; the logits after the last one."""
    import torch

    from kdn.progress import progress

    tokens = torch.tensor([ids], device=model.device)
    with torch.no_grad(), progress(len(ids), "reading the prompt") as bar:
        for piece in tokens.split(CHUNK, 1):
            found = model(piece, past_key_values=cache, use_cache=True, logits_to_keep=1)
            bar.advance(piece.shape[1])
    logits: torch.Tensor = found.logits[0, -1]
    return logits


def _continuation(
    model: Any, text: Text, logits: "torch.Tensor", cache: "KDNCache", options: argparse.Namespace
) -> Iterator[int]:
    import torch

    generator = torch.Generator().manual_seed(options.seed)
    ends = {text.end} | set(_as_list(model.generation_config.eos_token_id))
    for done in range(1, options.max_new_tokens + 1):
        scores = logits[: text.vocabulary].float().cpu()
        if options.greedy:
            token = int(scores.argmax())
        else:
            token = _sample(scores / options.temperature, options.top_p, generator)
        if token in ends:
            return
        yield token
        if done < options.max_new_tokens:
            logits = _step(model, token, cache)


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _step(model: Any, token: int, cache: "KDNCache") -> "torch.Tensor":
    import torch

    with torch.no_grad():
        found = model(torch.tensor([[token]], device=model.device), past_key_values=cache, use_cache=True)
    logits: torch.Tensor = found.logits[0, -1]
    return logits


def _sample(scores: "torch.Tensor", top_p: float, generator: "torch.Generator") -> int:
    """One of the likeliest tokens that together have probability top_p; the likeliest one always counts."""
    import torch

    probabilities, order = scores.softmax(-1).sort(descending=True)
    before = probabilities.cumsum(-1) - probabilities
    before[0] = 0
    probabilities[before >= top_p] = 0
    return int(order[torch.multinomial(probabilities, 1, generator=generator)])


def _write(text: Text, prompt: list[int], tokens: Iterator[int]) -> None:
    """Print tokens as they come. A token may be part of a character, and tokenizers leave out the space
    before a text's first word: so what is decoded always starts with tokens that are known to be text."""
    ids = prompt[-8:]
    printed = len(text.decode(ids))
    for token in tokens:
        ids.append(token)
        whole_text = text.decode(ids)
        if whole_text.endswith("�"):  # more of this character may come
            continue
        print(whole_text[printed:], end="", flush=True)
        printed = len(whole_text)
        if whole_text.endswith("\n"):  # keeps the cost of a token constant
            ids = [token]
            printed = len(text.decode(ids))
    print(text.decode(ids)[printed:])
