"""`kdn data`: documents → tokens → shards.

    OUT/train, OUT/validation   token shards (shards.py)
    OUT/tokenizer               the tokenizer that made them

Documents are tokenized one by one, in other processes, and written in their order: the shards are the same whatever
the number of workers. Which documents validate is a matter of their number alone. Hence a run that was killed, or
that a bad document stopped, goes on with `resume` as if nothing had been: it reads the source from the start, leaves
out what whole shards hold, and tokenizes the rest.
"""

import argparse
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, closing
from math import floor
from multiprocessing import get_context, parent_process
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from kdn.progress import progress
from kdn.training.data import DataError
from kdn.training.data.sources import STDLIB, Source

if TYPE_CHECKING:
    import numpy as np
    from tokenizers import Tokenizer

    from kdn.training.data.shards import ShardWriter

__all__ = ["Prepared", "add_parser", "prepare", "run"]

JOB_CHARACTERS = 2**18  # that travel to a worker at a time
JOBS_AHEAD = 3  # per worker


class Prepared(NamedTuple):
    train: Path
    validation: Path | None
    tokenizer: Path


class _Job(NamedTuple):
    sides: list[bool]  # of each text: True if it validates
    texts: list[str]


def prepare(
    source: Source,
    out: str | os.PathLike[str],
    tokenizer: str | os.PathLike[str],
    *,
    workers: int = 1,
    shard_tokens: int | None = None,
    limit_tokens: int | None = None,
    validation: float = 0,
    resume: bool = False,
) -> Prepared:
    """Tokenize `source` into shards in `out`.

    tokenizer: a folder, or a name on the Hugging Face hub. limit_tokens: stop with the document that brings the
    training shards to so many. validation: below 1 the share of documents, spread evenly, that validate and are not
    trained on; from 1 on their number, and they are the first ones. resume: go on where an earlier call was stopped.
    Raises DataError.
    """
    if workers < 1:
        raise ValueError(f"workers must be ≥ 1, got {workers}")
    if validation < 0 or (validation > 1 and validation != int(validation)):
        raise ValueError(f"validation must be a share below 1 or a number of documents, got {validation}")
    if limit_tokens is not None and limit_tokens < 1:
        raise ValueError(f"limit_tokens must be ≥ 1, got {limit_tokens}")
    from kdn.training.data import tokenizer as tokenizers
    from kdn.training.data.shards import SHARD_TOKENS, ShardWriter

    folder = Path(out)
    made = Prepared(folder / "train", folder / "validation" if validation else None, folder / "tokenizer")
    loaded = tokenizers.load(tokenizer)
    made_of = {**vars(source), "limit_tokens": limit_tokens, "validation": validation}
    with ExitStack() as open_:

        def writer(path: Path) -> ShardWriter:
            return open_.enter_context(
                ShardWriter(
                    path,
                    vocab_size=tokenizers.vocab_size(loaded),
                    eos_token_id=int(loaded.eos_token_id),
                    tokenizer={"folder": f"../{made.tokenizer.name}", **tokenizers.description(loaded)},
                    source=made_of,
                    shard_tokens=shard_tokens or SHARD_TOKENS,
                    resume=resume,
                )
            )

        # Closed in reverse: complete training shards mean that all is complete.
        train = writer(made.train)
        held_out = writer(made.validation) if made.validation else None
        if train.complete:
            return made
        if Path(tokenizer).resolve() != made.tokenizer.resolve():
            tokenizers.save(loaded, made.tokenizer)
        bar = open_.enter_context(progress(limit_tokens, "tokens"))
        bar.advance(train.tokens)
        jobs = _jobs(source, validation, train, held_out, limit_tokens)
        with closing(_tokenized(jobs, made.tokenizer / "tokenizer.json", workers)) as tokenized:
            for side, tokens in tokenized:
                if side:
                    assert held_out is not None
                    held_out.add(tokens)
                    continue
                train.add(tokens)
                bar.advance(len(tokens) + 1)
                if limit_tokens is not None and train.tokens >= limit_tokens:
                    break
    return made


def _validates(document: int, validation: float) -> bool:
    if validation >= 1:
        return document < validation
    return floor(document * validation) != floor((document - 1) * validation)


def _jobs(
    source: Source,
    validation: float,
    train: "ShardWriter",
    held_out: "ShardWriter | None",
    limit_tokens: int | None,
) -> Iterator[_Job]:
    """Documents that are not in whole shards yet, in order, a handful at a time."""
    done = {False: train.documents, True: held_out.documents if held_out else 0}
    whole = limit_tokens is not None and train.tokens >= limit_tokens
    seen = {False: 0, True: 0}
    job, size = _Job([], []), 0
    for document, text in enumerate(source.documents()):
        if whole and seen[False] == done[False]:
            break
        side = _validates(document, validation)
        seen[side] += 1
        # A validation folder may have been completed just before the training shards' last moment.
        if seen[side] <= done[side]:
            continue
        job.sides.append(side)
        job.texts.append(text)
        size += len(text)
        if size >= JOB_CHARACTERS:
            yield job
            job, size = _Job([], []), 0
    if job.texts:
        yield job


def _tokenized(
    jobs: Iterator[_Job], file: Path, workers: int
) -> "Generator[tuple[bool, np.ndarray], None, None]":
    """(side, tokens) of every document, in order."""
    if workers == 1:
        tokenizer = _load(file)
        for job in jobs:
            yield from zip(job.sides, _encode(tokenizer, job.texts), strict=True)
        return
    # Threads of torch and of the tokenizer would not survive a fork.
    pool = ProcessPoolExecutor(workers, get_context("spawn"), _start_worker, (file,))
    pending: deque[tuple[list[bool], Future[list[np.ndarray]]]] = deque()
    try:
        for job in jobs:
            pending.append((job.sides, pool.submit(_encode_in_worker, job.texts)))
            if len(pending) > JOBS_AHEAD * workers:
                sides, result = pending.popleft()
                yield from zip(sides, result.result(), strict=True)
        for sides, result in pending:
            yield from zip(sides, result.result(), strict=True)
    except BrokenProcessPool:
        raise DataError(
            "a tokenizing process was killed, as happens when memory runs out: resume (--resume), with fewer workers"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


def _load(file: Path) -> "Tokenizer":
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    # A text that spells a special token must not be one: only we write eos.
    tokenizer.encode_special_tokens = True
    return tokenizer


def _encode(tokenizer: "Tokenizer", texts: list[str]) -> "list[np.ndarray]":
    import numpy as np

    # One text a call: the library's own threads would take all cores in every worker.
    found = (tokenizer.encode_batch_fast([text], add_special_tokens=False)[0] for text in texts)
    return [np.asarray(encoding.ids, np.uint32) for encoding in found]


_worker_tokenizer: Any = None


def _start_worker(file: Path) -> None:
    global _worker_tokenizer
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to answer
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _worker_tokenizer = _load(file)


def _end_with_parent() -> None:
    """A killed parent cannot tell its workers, who would wait for work for ever."""
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _encode_in_worker(texts: list[str]) -> "list[np.ndarray]":
    return _encode(_worker_tokenizer, texts)


def add_parser(commands: argparse._SubParsersAction) -> None:
    """`kdn data prepare` and `kdn data verify`."""
    formatter = argparse.RawDescriptionHelpFormatter
    data = commands.add_parser(
        "data",
        help="text to token shards, which training reads",
        description="Make token shards from text, and check them.",
        formatter_class=formatter,
    )
    whats = data.add_subparsers(metavar="what", required=True)
    made = whats.add_parser(
        "prepare",
        help="tokenize text into shards",
        description="Tokenize text into shards: OUT/train, OUT/validation and OUT/tokenizer. The source is a dataset\n"
        "of the Hugging Face hub (owner/name), a .parquet, .jsonl or text file (.gz and .zst too), a\n"
        f"folder of such files, or {STDLIB!r}: the standard library of this Python.\n\n"
        f"    kdn data prepare {STDLIB} --out data --train-tokenizer 4096 --validation 0.02\n"
        "    kdn data prepare HuggingFaceFW/fineweb-edu --config sample-10BT --out fineweb \\\n"
        "        --tokenizer gpt2 --workers 16 --validation 2000\n\n"
        "A run that was stopped goes on with --resume and the same arguments. docs/data.md says more.",
        formatter_class=formatter,
    )
    made.add_argument("source", metavar="SOURCE", help=f"owner/name, a file, a folder, or {STDLIB!r}")
    made.add_argument("--out", required=True, metavar="FOLDER", help="where it all goes")
    which = made.add_mutually_exclusive_group(required=True)
    which.add_argument("--tokenizer", metavar="NAME", help="a folder, or a name on the Hugging Face hub")
    which.add_argument(
        "--train-tokenizer", type=int, metavar="SIZE", help="train a byte-level BPE of that many tokens first"
    )
    made.add_argument("--column", default="text", help="column or key of the text (default: %(default)s)")
    made.add_argument("--config", metavar="NAME", help="of a Hugging Face dataset")
    made.add_argument("--split", metavar="NAME", help="of a Hugging Face dataset (default: train)")
    made.add_argument("--blank-lines", action="store_true", help="text files: blank lines divide documents")
    made.add_argument("--workers", type=int, default=os.cpu_count(), metavar="N", help="default: %(default)s")
    made.add_argument("--shard-tokens", type=int, metavar="N", help="tokens in a shard (default: 2^26)")
    made.add_argument("--limit-tokens", type=int, metavar="N", help="stop at so many training tokens")
    made.add_argument(
        "--validation",
        type=float,
        default=0,
        metavar="X",
        help="below 1: share of documents that validate; from 1 on: how many, the first ones (default: none)",
    )
    made.add_argument("--resume", action="store_true", help="go on where an earlier run was stopped")
    made.set_defaults(command=run, parser=made)
    checked = whats.add_parser(
        "verify",
        help="read shards and check everything",
        description="Read shards and check every checksum, token and document.\n\n    kdn data verify data/train",
        formatter_class=formatter,
    )
    checked.add_argument("folder", metavar="FOLDER", help="a folder of token shards")
    checked.set_defaults(command=run, parser=checked)


def run(args: argparse.Namespace) -> int:
    """What `kdn data` does; returns the exit status."""
    try:
        if "folder" in args:
            _verify(args.folder)
        else:
            _prepare(args)
    except ImportError as error:
        print(f"kdn: this needs pip install 'kalman-delta-networks[train]' ({error})", file=sys.stderr)
        return 1
    except ValueError as error:
        print(f"kdn: {error}", file=sys.stderr)
        return 1
    return 0


def _prepare(args: argparse.Namespace) -> None:
    from kdn.training.data import tokenizer
    from kdn.training.data.shards import TokenShards

    source = Source(args.source, args.column, args.config, args.split, args.blank_lines)
    name = args.tokenizer
    if name is None:
        name = Path(args.out) / "tokenizer"
        # It must stay the one that the shards so far were made with.
        if not name.exists():
            tokenizer.train(source.documents(), args.train_tokenizer, name)
        elif not args.resume:
            raise DataError(
                f"{name} exists already: resume (--resume) to go on with it, or give another folder"
            )
    made = prepare(
        source,
        args.out,
        name,
        workers=args.workers,
        shard_tokens=args.shard_tokens,
        limit_tokens=args.limit_tokens,
        validation=args.validation,
        resume=args.resume,
    )
    for folder in (made.train, made.validation):
        if folder is not None:
            print(_said(TokenShards(folder)))


def _verify(folder: str) -> None:
    from kdn.training.data.shards import TokenShards

    shards = TokenShards(folder)
    with progress(shards.tokens, "tokens read") as bar:
        shards.verify(bar.advance)
    print(f"{_said(shards)}: all in order")


def _said(shards: Any) -> str:
    return f"{shards.folder}: {shards.tokens:,} tokens, {shards.documents:,} documents, {len(shards.shards)} shards"
