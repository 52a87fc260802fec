"""`kdn quickstart`: two small models, trained and measured side by side in minutes, and a page about them.

    text.py      what they read: the standard library's sources, and the needle task's documents
    needle.py    the needle task: facts that are stated once and asked for later
    measure.py   what is measured of a trained model
    charts.py    charts as SVG
    report.py    the page

The models are Diagonal KDN and KDA, which differ in one thing: KDA's tokens say how strongly they write, KDN's write
as strongly as the memory's uncertainty asks for. All else is the same for both: sizes (the feed-forward width makes up
for the few parameters between them), data and its order, seed, steps, schedule. `run` is the story, top to bottom.
"""

import json
import shutil
import statistics
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers.utils import logging

from kdn.models import KDNConfig, KDNForCausalLM
from kdn.probe import effective_writes
from kdn.probe.report import by_token, distribution
from kdn.progress import progress
from kdn.training import loop
from kdn.training.data import DataError
from kdn.training.quickstart import measure, report, text
from kdn.training.recipe import Recipe, build

__all__ = ["FULL", "MODELS", "QUICK", "Size", "model_fields", "run"]

MODELS = {"kdn-diagonal": "Diagonal KDN", "kda": "KDA"}
FACTS = "\n# harbor=violet falcon=amber comet=teal\n"
PROMPT = '\n\ndef read_lines(self, size=-1):\n    """Return '
ASKED = ("falcon", "comet", "harbor")


class Size(NamedTuple):
    """How large a quickstart is.

    That models this small learn to recall within minutes is a matter of these numbers: two layers with two wide heads,
    embeddings that are not tied to the head, and this learning rate got there soonest of what was tried.
    """

    vocabulary: int = 2048
    hidden: int = 128
    layers: int = 2
    heads: int = 2
    head_dim: int = 64
    intermediate: int = 384  # of KDN; KDA's is what makes them equal
    length: int = 256  # tokens of a training sequence
    tokens: int = 2_500_000
    batch: int = 8  # sequences of a step
    validation: int = 60_000  # tokens
    lengths: tuple[int, ...] = (64, 128, 256, 512, 1024, 2048)  # of the needle task, with 4 facts
    pairs: tuple[int, ...] = (1, 2, 4, 8, 16)  # facts, at the training length
    documents: int = 64  # of each kind of question
    sampled: int = 60
    timed: int = 200  # generated tokens


FULL = Size()
QUICK = Size(
    vocabulary=512,
    hidden=32,
    head_dim=16,
    intermediate=64,
    length=64,
    tokens=64 * 8 * 6,
    validation=3000,
    lengths=(64, 128),
    pairs=(1, 2),
    documents=8,
    sampled=12,
    timed=8,
)


def run(out: Path, *, quick: bool = False) -> Path:
    """Do it all in the folder `out`; the page's path. Raises DataError if `out` holds something else."""
    size, began = QUICK if quick else FULL, time.perf_counter()
    _clear(out)
    _say("1/4  text: the Python standard library, and a tokenizer for it")
    data = text.write(
        out / "data",
        vocabulary=size.vocabulary,
        length=size.length,
        train_tokens=size.tokens,
        validation_tokens=size.validation,
    )
    found: dict[str, Any] = {"models": {}}
    trained = {}
    for number, mixer in enumerate(MODELS, 2):
        recipe = _recipe(out, size, mixer)
        _say(
            f"{number}/4  {MODELS[mixer]}: {parameters(recipe.model):,} parameters, "
            f"{recipe.steps:,} steps of {recipe.train.batch_tokens:,} tokens"
        )
        trained[mixer] = (recipe, loop.train(recipe))
    _say("4/4  measuring both")
    with progress(len(trained) * 4, "measuring") as bar:
        for mixer, (recipe, result) in trained.items():
            found["models"][mixer] = {"name": MODELS[mixer]} | _measured(recipe, result, data, size, bar)
    found |= {
        "size": size._asdict(),
        "threads": torch.get_num_threads(),
        "quick": quick,
        "folder": str(out),
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "seconds": time.perf_counter() - began,
    }
    (out / "quickstart.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    page = out / "report.html"
    page.write_text(report.page(found), encoding="utf-8")
    _say("")
    for row in report.table(found):
        _say(f"{row[0]:<42}" + "".join(f"{cell:>16}" for cell in row[1:]))
    _say(f"\n{_minutes(found['seconds'])}; the report: {page.resolve()}")
    return page


def _clear(out: Path) -> None:
    """Make room for a new quickstart; only where an earlier one or nothing is."""
    mark = out / "quickstart.json"
    if out.exists() and not out.is_dir():
        raise DataError(f"{out} is a file, --out must name a folder")
    if out.exists() and any(out.iterdir()) and not mark.exists():
        raise DataError(f"{out} holds something else than a quickstart: give another folder with --out")
    for name in ("data", *MODELS):
        shutil.rmtree(out / name, ignore_errors=True)
    try:
        out.mkdir(parents=True, exist_ok=True)
        mark.write_text("{}\n", encoding="utf-8")
    except OSError as error:
        raise DataError(f"{out} cannot be written: {error.strerror}") from error


def parameters(fields: dict[str, Any]) -> int:
    with torch.device("meta"):
        model = KDNForCausalLM(KDNConfig(**fields))
    return sum(p.numel() for p in model.parameters())


def model_fields(size: Size, mixer: str) -> dict[str, Any]:
    """The model's configuration. KDN's width is given, any other's makes the parameters equal."""
    fields = {
        "mixer": mixer,
        "vocab_size": size.vocabulary,
        "hidden_size": size.hidden,
        "num_hidden_layers": size.layers,
        "num_heads": size.heads,
        "head_dim": size.head_dim,
        "intermediate_size": size.intermediate,
        "eos_token_id": 0,
    }
    if mixer != "kdn-diagonal":
        missing = parameters(fields | {"mixer": "kdn-diagonal"}) - parameters(fields)
        fields["intermediate_size"] = size.intermediate + round(missing / (3 * size.hidden * size.layers))
    return fields


def _recipe(out: Path, size: Size, mixer: str) -> Recipe:
    batch = size.batch * size.length
    steps = size.tokens // batch
    return build(
        {
            "model": model_fields(size, mixer),
            "data": {
                "train": str(out / "data/train"),
                "validation": str(out / "data/validation"),
                "length": size.length,
                "packing": "documents",
            },
            "train": {
                "tokens": size.tokens,
                "batch_tokens": batch,
                "micro_batch": size.batch,
                # As fast as bfloat16 at this size, and fast on every processor.
                "dtype": "float32",
                "validate_every": max(1, steps // 8),
                "validate_tokens": size.validation // 3,
            },
            "optimizer": {"peak": 3e-3, "final": 3e-4, "warmup": 0.03},
            "checkpoint": {"folder": str(out / mixer), "every": 0, "keep": 1},
            "log": {"every": max(1, steps // 40)},
        }
    )


def _measured(recipe: Recipe, result: loop.Result, data: text.Text, size: Size, bar: Any) -> dict[str, Any]:
    """All numbers of one model, ready for JSON."""
    log = [json.loads(line) for line in (result.folder.parent / "log.jsonl").read_text().splitlines()]
    torch.manual_seed(recipe.train.seed)  # the weights that training began with
    before = KDNForCausalLM(recipe.model_config()).eval()
    logging.disable_progress_bar()  # of loading: it takes no time
    model = KDNForCausalLM.from_pretrained(result.folder).eval()
    encoded = [data.tokenizer.encode(d, add_special_tokens=False) for d in data.documents]
    stream = torch.tensor([token for ids in encoded for token in ids])
    probed = stream[: len(stream) // size.length * size.length].view(-1, size.length)[:16]
    size_in_bytes = sum(len(document.encode()) for document in data.documents)
    numbers: dict[str, Any] = {
        "parameters": sum(p.numel() for p in model.parameters()),
        "intermediate": recipe.model["intermediate_size"],
        "bits_per_byte": measure.bits_per_byte(model, encoded, size_in_bytes),
        "training_tokens_per_second": statistics.median(x["tokens/s"] for x in log if "tokens/s" in x),
        "loss": [[x["step"], x["loss"]] for x in log if "loss" in x],
        "validation": [[x["step"], x["validation loss"]] for x in log if "validation loss" in x],
        "step_tokens": recipe.train.batch_tokens,
    }
    bar.advance()
    ask = lambda length, pairs: measure.recall(model, data.needle, length, pairs, size.documents)  # noqa: E731
    numbers["recall_by_length"] = [[length, ask(length, min(4, max(size.pairs)))] for length in size.lengths]
    numbers["recall_by_pairs"] = [[pairs, ask(size.length, pairs)] for pairs in size.pairs]
    bar.advance()
    numbers["generation_tokens_per_second"] = measure.generation_speed(model, size.timed)
    numbers["writes_before"] = distribution(effective_writes(before, probed))
    numbers["writes_after"] = distribution(effective_writes(model, probed))
    bar.advance()
    numbers["sample"] = _sample(model, data.tokenizer, size)
    bar.advance()
    return numbers


def _sample(model: KDNForCausalLM, tokenizer: Any, size: Size) -> dict[str, Any]:
    """Facts and the beginning of a function; what the model makes of it; then the facts are asked for."""

    def encode(said: str) -> list[int]:
        ids: list[int] = tokenizer.encode(said, add_special_tokens=False)
        return ids

    ids = encode(FACTS + PROMPT)
    by_model = [False] * len(ids)
    made = measure.sample(model, ids, size.sampled, temperature=0.7, seed=0)
    ids, by_model = ids + made, by_model + [True] * len(made)
    for i, name in enumerate(ASKED):
        question = encode(f"\n# {name}=" if i == 0 else f" {name}=")
        ids, by_model = ids + question, by_model + [False] * len(question)
        with torch.no_grad():
            answer = int(model(torch.tensor([ids]), use_cache=False, logits_to_keep=1).logits[0, -1].argmax())
        ids, by_model = [*ids, answer], [*by_model, True]
    known = by_token(model, ids, [tokenizer.decode([token]) for token in ids])
    return known | {"by_model": by_model}


def _say(words: str) -> None:
    print(words, flush=True)


def _minutes(seconds: float) -> str:
    return f"{seconds:.0f} seconds" if seconds < 90 else f"{seconds / 60:.1f} minutes"
