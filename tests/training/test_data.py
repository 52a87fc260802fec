"""Data: what is read is what was written, in the order promised, whatever interrupts."""

import errno
import gzip
import itertools
import json
import re
import subprocess
import sys
import time

import numpy as np
import pytest
import torch

pytest.importorskip("tokenizers")
pytest.importorskip("pyarrow")
pytest.importorskip("transformers")

import pyarrow as pa
from pyarrow import parquet

from kdn.training.data import DataError, shards, tokenizer
from kdn.training.data.batches import Batches, permuted
from kdn.training.data.prepare import add_parser, prepare
from kdn.training.data.shards import ShardWriter, TokenShards
from kdn.training.data.sources import Source

EOS = 9999


def writer(folder, **options):
    known = {"vocab_size": 10_000, "eos_token_id": EOS, "tokenizer": {}, "source": {}, "shard_tokens": 50}
    return ShardWriter(folder, **{**known, **options})


def documents(count=40, seed=0):
    """Token = 100 · document + place, so that a token tells where it is from; some documents are empty."""
    lengths = np.random.default_rng(seed).integers(0, 30, count)
    return [[100 * i + j for j in range(n)] for i, n in enumerate(lengths)]


def written(folder, docs=None, **options):
    with writer(folder, **options) as w:
        for doc in docs or documents():
            w.add(doc)
    return TokenShards(folder)


def contents(folder):
    return {p.relative_to(folder): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def one_sentence(error):
    assert re.fullmatch(r"[^\n]+[^\n.]", str(error.value)), str(error.value)


# ------------------------------------------------------------------------------------------------ shards


@pytest.mark.parametrize(
    ("vocab_size", "dtype"), [(10_000, "uint16"), (65_535, "uint16"), (65_536, "uint32")]
)
def test_shards_give_back_what_was_written(tmp_path, vocab_size, dtype):
    docs = [*documents(), [vocab_size - 1, 0]]
    found = written(tmp_path, docs, vocab_size=vocab_size)
    stream = [t for doc in docs for t in [*doc, EOS]]
    starts = np.cumsum([0, *(len(doc) + 1 for doc in docs)])
    assert len(found.shards) > 3 and all(s["tokens"] >= 50 for s in found.shards[:-1])
    assert found.tokens == len(stream) and found.documents == len(docs)
    assert json.loads((tmp_path / "index.json").read_text())["dtype"] == dtype
    rng = np.random.default_rng(0)
    for a, b in [(0, len(stream)), (7, 7), *np.sort(rng.integers(0, len(stream) + 1, (50, 2))).tolist()]:
        assert found.read(a, b).tolist() == stream[a:b]
        assert found.document_starts(a, b).tolist() == [s for s in starts[:-1] if a <= s < b]
    with pytest.raises(ValueError, match="start and stop"):
        found.read(0, len(stream) + 1)
    found.verify()


def test_a_token_beyond_the_vocabulary_is_refused(tmp_path):
    with writer(tmp_path) as w:
        for bad in (10_000, -1):
            with pytest.raises(
                DataError, match=f"token {bad} of document 0 is beyond the vocabulary of 10000"
            ) as e:
                w.add([1, bad])
            one_sentence(e)
        w.add([1])
    assert TokenShards(tmp_path).read(0, 2).tolist() == [1, EOS]


def reseal(folder, **changes):
    index = json.loads((folder / "index.json").read_text())
    index.pop("sha256")
    index.update(changes)
    (folder / "index.json").write_text(json.dumps({**index, "sha256": shards._digest(index)}))


def flip(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


DAMAGES = {
    "is not JSON": lambda f: (f / "index.json").write_text('{"format": "kd'),
    "format is not": lambda f: (f / "index.json").write_text("{}"),
    "own checksum": lambda f: (f / "index.json").write_text(
        (f / "index.json").read_text().replace('"documents": 40', '"documents": 41')
    ),
    "version 2": lambda f: reseal(f, version=2),
    "holds no token shards": lambda f: (f / "index.json").unlink(),
    "000001.bin is missing": lambda f: (f / "000001.bin").unlink(),
    "000001.docs is missing": lambda f: (f / "000001.docs").unlink(),
    "000001.bin is damaged: it has 4 bytes": lambda f: (f / "000001.bin").write_bytes(b"1234"),
    "000001.docs is damaged: it has 3 bytes": lambda f: (f / "000001.docs").write_bytes(b"123"),
}


@pytest.mark.parametrize("said", DAMAGES)
def test_opening_finds_damage(tmp_path, said):
    written(tmp_path)
    DAMAGES[said](tmp_path)
    with pytest.raises(DataError, match=said) as e:
        TokenShards(tmp_path)
    one_sentence(e)


@pytest.mark.parametrize(
    ("said", "damage"),
    [
        ("000001.bin is damaged: it does not match", lambda f: flip(f / "000001.bin", 0)),
        ("000002.docs is damaged: it does not match", lambda f: flip(f / "000002.docs", -8)),
        ("beyond the vocabulary of 3000", lambda f: reseal(f, vocab_size=3000)),
        ("does not end with eos, token 7", lambda f: reseal(f, eos_token_id=7)),
    ],
)
def test_verify_finds_what_opening_does_not(tmp_path, said, damage):
    written(tmp_path)
    damage(tmp_path)
    found = TokenShards(tmp_path)
    with pytest.raises(DataError, match=said) as e:
        found.verify()
    one_sentence(e)
    if "vocabulary" in said:
        with pytest.raises(DataError, match=said):
            found.read(0, found.tokens)


def test_an_exception_keeps_whole_shards_and_resume_goes_on(tmp_path):
    docs = documents()
    written(tmp_path / "whole", docs)
    folder = tmp_path / "stopped"
    for stop in (17, 18, 31):
        with pytest.raises(RuntimeError), writer(folder, resume=True) as w:
            for doc in docs[w.documents : stop]:
                w.add(doc)
            raise RuntimeError
        with pytest.raises(DataError, match=r"is unfinished: .* whole shards") as e:
            TokenShards(folder)
        one_sentence(e)
    with pytest.raises(DataError, match="holds unfinished token shards"):
        writer(folder)
    with pytest.raises(DataError, match="was begun with eos_token_id 9999, not 1") as e:
        writer(folder, resume=True, eos_token_id=1)
    one_sentence(e)
    with writer(folder, resume=True) as w:
        assert 0 < w.documents <= 31
        for doc in docs[w.documents :]:
            w.add(doc)
    assert contents(folder) == contents(tmp_path / "whole")
    with writer(folder, resume=True) as w:
        assert w.complete and w.documents == len(docs)
        with pytest.raises(DataError, match="is complete"):
            w.add([1])
    with pytest.raises(DataError, match="holds complete token shards"):
        writer(folder)
    with pytest.raises(DataError, match="no document"), writer(tmp_path / "none"):
        pass


@pytest.mark.parametrize("failing", ["tokens", "index"])
def test_a_full_disk_is_one_sentence_and_keeps_whole_shards(tmp_path, monkeypatch, failing):
    docs = documents()
    written(tmp_path / "whole", docs)
    folder, real, budget = tmp_path / "full", open, itertools.count()

    class Full:
        def __init__(self, file):
            self.file = file

        def write(self, data):
            if next(budget) >= 20:
                raise OSError(errno.ENOSPC, "No space left on device")
            return self.file.write(data)

        def __getattr__(self, name):
            return getattr(self.file, name)

        def __enter__(self):
            return self

        def __exit__(self, *_):
            self.file.close()

    def opened(path, mode, *args, **kwargs):
        file = real(path, mode, *args, **kwargs)
        return Full(file) if ("index" in str(path)) == (failing == "index") else file

    if failing == "index":
        budget = itertools.count(17)  # the first two shards' and no more
    monkeypatch.setattr(shards, "open", opened, raising=False)
    with (
        pytest.raises(DataError, match=r"No space left on device while writing .* whole shards") as e,
        writer(folder) as w,
    ):
        for doc in docs:
            w.add(doc)
    one_sentence(e)
    monkeypatch.undo()
    assert not list(folder.glob("*.part"))
    with writer(folder, resume=True) as w:
        assert 0 < w.documents < len(docs)
        for doc in docs[w.documents :]:
            w.add(doc)
    assert contents(folder) == contents(tmp_path / "whole")


# ----------------------------------------------------------------------------------------------- batches


@pytest.mark.parametrize("count", [1, 2, 3, 5, 64, 65, 1000])
def test_the_order_is_a_permutation_that_changes_with_seed_and_epoch(count):
    orders = {tuple(permuted(np.arange(count), count, s, e)) for s, e in [(0, 0), (0, 1), (1, 0)]}
    assert all(sorted(order) == list(range(count)) for order in orders)
    if count >= 64:
        assert len(orders) == 3
        for order in orders:
            assert abs(np.corrcoef(order, np.arange(count))[0, 1]) < 4 / count**0.5
            assert np.mean(np.diff(order) == 1) < 0.1


T, G = 16, 8


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return written(tmp_path_factory.mktemp("corpus"))


def rows(batch):
    return [tuple(r) for r in batch.input_ids.view(-1, T).tolist()]


def steps(corpus, count, world=1, micro=None, **options):
    """What each step reads, over all ranks, in rank order."""
    size = (micro and G // world // micro) or 1
    ranks = [
        Batches(corpus, length=T, sequences=G, seed=3, world=world, rank=r, micro_batch=micro, **options)
        for r in range(world)
    ]
    return [[row for b in ranks for _ in range(size) for row in rows(next(b))] for _ in range(count)]


def test_an_epoch_reads_every_sequence_once(corpus):
    batches = Batches(corpus, length=T, sequences=1, seed=3)
    n = batches.per_epoch
    assert n == (corpus.tokens - 1) // T
    stream = corpus.read(0, corpus.tokens)
    expected = sorted(
        (tuple(stream[i * T : i * T + T]), tuple(stream[i * T + 1 : i * T + T + 1])) for i in range(n)
    )
    read = []
    for epoch in range(2):
        assert batches.epoch == epoch
        read.append(
            [
                (tuple(b.input_ids[0].tolist()), tuple(b.targets[0].tolist()))
                for b in itertools.islice(batches, n)
            ]
        )
        assert sorted(read[-1]) == expected
    assert read[0] != read[1]


def test_a_step_reads_the_same_whatever_the_ranks_and_micro_batches(corpus):
    expected = steps(corpus, 12)  # crosses the end of an epoch
    for world, micro in [(2, None), (4, None), (8, 1), (1, 2), (2, 1), (4, 2)]:
        assert steps(corpus, 12, world, micro) == expected
    assert steps(corpus, 12, 2, packing="documents") == expected


@pytest.mark.parametrize("packing", ["concatenate", "documents"])
def test_reading_resumes_from_any_position(corpus, packing):
    def batches(position=0):
        return Batches(
            corpus, length=T, sequences=G, seed=3, micro_batch=4, packing=packing, position=position
        )

    def same(a, b):
        both = zip(a[:3], b[:3], strict=True)
        return a.position == b.position and all((x is None and y is None) or x.equal(y) for x, y in both)

    reading = batches()
    read = list(itertools.islice(reading, 24))
    assert reading.position == 12 * G
    assert [b.position for b in read[:4]] == [0, G, G, 2 * G]  # half a step done is none
    for done in (1, 5, 11):
        again = batches(read[2 * done - 1].position)
        assert all(same(next(again), b) for b in read[2 * done :])
    assert not same(next(batches(1)), read[0])


def test_packed_documents_are_sequences_of_their_own(corpus):
    batches = Batches(corpus, length=T, sequences=G, seed=3, packing="documents")
    plain = Batches(corpus, length=T, sequences=G, seed=3)
    ends = 0
    for batch, whole in itertools.islice(zip(batches, plain, strict=True), batches.per_epoch // G):
        x, y, cu = batch.input_ids[0], batch.targets[0], batch.cu_seqlens
        assert batch.input_ids.shape == (1, G * T) and x.equal(whole.input_ids.flatten())
        assert cu.dtype.is_signed and str(cu.dtype) == "torch.int32" and cu[0] == 0 and cu[-1] == G * T
        assert (cu.diff() > 0).all() and set(range(0, G * T, T)) <= set(cu.tolist())
        # Nothing is predicted from an eos, all else is, and is what comes next.
        assert (y == -100).equal(x == EOS)
        assert y[x != EOS].equal(whole.targets.flatten()[x != EOS])
        for a, b in itertools.pairwise(cu.tolist()):
            of = (x[a:b][x[a:b] != EOS] // 100).unique()
            assert len(of) <= 1 and (x[a : b - 1] != EOS).all()
            told = y[a:b][(y[a:b] != -100) & (y[a:b] != EOS)] // 100
            assert told.eq(of).all() if len(told) else True
            ends += int((y[a:b] == EOS).sum())
    assert ends > 10  # eos is itself a target, the last of its document


@pytest.mark.parametrize("packing", ["concatenate", "documents"])
def test_validation_reads_every_token_once_in_order(corpus, packing):
    batches = list(Batches.in_order(corpus, length=T, packing=packing))
    inputs = np.concatenate([b.input_ids[0] for b in batches])
    targets = np.concatenate([b.targets[0] for b in batches])
    stream = corpus.read(0, corpus.tokens)
    assert (inputs[: corpus.tokens - 1] == stream[:-1]).all()
    wanted = stream[1:].copy()
    if packing == "documents":
        wanted[stream[:-1] == EOS] = -100
    assert (targets[: corpus.tokens - 1] == wanted).all() and (targets[corpus.tokens - 1 :] == -100).all()
    assert len(list(Batches.in_order(corpus, length=T, packing=packing, limit=3))) == 3


@pytest.mark.parametrize("limit", [None, 7])
@pytest.mark.parametrize("packing", ["concatenate", "documents"])
def test_validation_is_shared_among_ranks(corpus, packing, limit):
    """All targets once, and equally many batches of one size for every rank."""
    alone = Batches.in_order(corpus, length=16, packing=packing, limit=limit)
    ranks = [
        list(
            Batches.in_order(
                corpus, length=16, packing=packing, limit=limit, micro_batch=2, rank=rank, world=3
            )
        )
        for rank in range(3)
    ]
    assert len({len(batches) for batches in ranks}) == 1
    shared = torch.cat([b.targets.view(-1, 16) for step in zip(*ranks, strict=True) for b in step])
    rows = torch.cat([b.targets.view(-1, 16) for b in alone])
    assert len(shared) >= len(rows) and len(shared) % 6 == 0
    assert torch.equal(shared[: len(rows)], rows) and (shared[len(rows) :] == -100).all()


def test_batches_explain_what_cannot_be(corpus):
    for said, options in {
        "holds .* tokens, fewer than one sequence of 5000": {"length": 5000},
        "length must be ≥ 1": {"length": 0},
        "multiple of the 3 processes": {"world": 3},
        "rank must be in": {"rank": 1},
        "micro_batch must divide the 8": {"micro_batch": 3},
        "packing must be": {"packing": "none"},
        "position must be": {"position": -1},
    }.items():
        with pytest.raises(ValueError, match=said):
            Batches(corpus, **{"length": T, "sequences": G, **options})


# ----------------------------------------------------------------------------------------------- sources


def read(path, **options):
    return list(Source(str(path), **options).documents())


def test_sources_give_the_same_documents_from_every_format(tmp_path):
    docs = ["Größe ☃\nzwei", "b" * 3000, "third\r\n"]
    lines = "".join(json.dumps({"body": d, "n": 1}) + "\n" for d in [*docs[:2], "", None, docs[2]])
    (tmp_path / "a.jsonl").write_text(lines)
    with gzip.open(tmp_path / "b.jsonl.gz", "wt") as file:
        file.write(lines)
    with pa.output_stream(str(tmp_path / "c.jsonl.zst"), compression="zstd") as file:
        file.write(lines.encode())
    parquet.write_table(pa.table({"n": [0, 1, 2], "body": docs}), tmp_path / "d.parquet", row_group_size=2)
    for name in ("a.jsonl", "b.jsonl.gz", "c.jsonl.zst", "d.parquet"):
        assert read(tmp_path / name, column="body") == docs
    (tmp_path / ".hidden").write_bytes(b"\xff")
    assert read(tmp_path, column="body") == docs * 4
    text = tmp_path / "t.txt"
    text.write_bytes("\ufeffone\ntwo\n\n \nthree".encode())
    assert read(text) == ["one\ntwo\n\n \nthree"]
    assert read(text, blank_lines=True) == ["one\ntwo\n", "three"]


@pytest.mark.parametrize(
    ("name", "data", "said"),
    [
        (
            "a.jsonl",
            b'{"text": "x"}\n{"body": "", "n": 1}',
            r"a.jsonl, line 2: there is no column 'text', there are body, n",
        ),
        ("a.jsonl", b'{"text": "x"}\n{"text": 3}', r"line 2: column 'text' holds int, not text"),
        ("a.jsonl", b'{"text": "\\ud800"}', r"line 1: .* surrogate"),
        ("a.jsonl", b'{"text": "x"}\n{"text": "x', r"a.jsonl, line 2 is not JSON"),
        ("a.jsonl", b"[1]", r"line 1 is not a JSON object"),
        ("a.jsonl", b'{"text": "x"}\n{"text": "\xff"}', r"a.jsonl, line 2: byte 24 of the file is not UTF-8"),
        ("a.txt", b"good\nb\xe9d", r"a.txt, line 2: byte 6 of the file is not UTF-8"),
        ("a.txt", b"", r"a.txt is empty"),
        ("a.jsonl", b"\n", r"a.jsonl is empty"),
        ("a.parquet", b"", r"a.parquet is not a readable parquet file"),
        ("a.parquet", b"PAR1 but no more PAR1", r"a.parquet is not a readable parquet file"),
        ("a.txt.gz", gzip.compress(b"x" * 10_000)[:20], r"a.txt.gz cannot be read"),
    ],
)
def test_sources_name_the_place_of_what_they_cannot_read(tmp_path, name, data, said):
    (tmp_path / name).write_bytes(data)
    for where in (tmp_path / name, tmp_path):
        with pytest.raises(DataError, match=said) as e:
            read(where)
        one_sentence(e)


def test_sources_name_missing_columns_and_places(tmp_path):
    parquet.write_table(pa.table({"body": ["x"], "n": [1]}), tmp_path / "a.parquet")
    empty = tmp_path / "empty"
    empty.mkdir()
    for said, where, options in [
        ("no column 'text', there are body, n", tmp_path / "a.parquet", {}),
        ("column 'n' holds int", tmp_path / "a.parquet", {"column": "n"}),
        ("holds no files", empty, {}),
        ("no file or folder .*nothing.jsonl", tmp_path / "nothing.jsonl", {}),
        ("no file or folder text/none.jsonl", "text/none.jsonl", {}),
        ("config and split belong to", tmp_path / "a.parquet", {"split": "train"}),
    ]:
        with pytest.raises(DataError, match=said) as e:
            read(where, **options)
        one_sentence(e)


def test_hub_datasets_are_streamed(monkeypatch):
    datasets = pytest.importorskip("datasets")
    asked = []

    def rows():
        yield {"text": "one", "id": 1}
        yield {"text": "two", "id": 2}
        raise ConnectionError("the line went dead\nmore")

    def load(*args, **kwargs):
        asked.append((args, kwargs))
        return rows()

    monkeypatch.setattr(datasets, "load_dataset", load)
    found = Source("owner/set", config="small").documents()
    assert [next(found), next(found)] == ["one", "two"]
    assert asked == [(("owner/set", "small"), {"split": "train", "streaming": True})]
    with pytest.raises(DataError, match=r"dataset owner/set, row 2, cannot be read: the line went dead$"):
        next(found)
    with pytest.raises(DataError, match="row 0: there is no column 'body', there are id, text"):
        read("owner/set", column="body")


def test_the_standard_library_is_a_source():
    docs = read("stdlib")
    assert docs[:100] == list(itertools.islice(Source("stdlib").documents(), 100))
    assert sum(map(len, docs)) > 5 * 10**6 and sum("def " in d for d in docs) > 300
    assert any("builtins.str.split\n" in d for d in docs[-60:])


# ------------------------------------------------------------------------------------------------ tokenizer, prepare


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """A folder with a source and a tokenizer."""
    folder = tmp_path_factory.mktemp("texts")
    words = ["memory", "gain", "keys", "values", "noise", "<|endoftext|>", "Größe", "雪", "🙂", "\t"]
    rng = np.random.default_rng(1)
    docs = [" ".join(rng.choice(words, n)) for n in rng.integers(1, 3000, 150)]
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": d}) + "\n" for d in docs))
    tokenizer.train(docs, 300, folder / "tokenizer")
    return folder, docs


def test_a_tokenizer_is_deterministic_and_loses_nothing(texts, tmp_path):
    folder, docs = texts
    again = tokenizer.train(iter(docs), 300, tmp_path / "again")
    assert contents(tmp_path / "again") == contents(folder / "tokenizer")
    assert again.eos_token == tokenizer.EOS and again.eos_token_id == 0 and tokenizer.vocab_size(again) == 300
    assert tokenizer.description(again) == tokenizer.description(tokenizer.load(folder / "tokenizer"))
    text = "every byte \x00 é 🙂\r\n\t"
    assert again.decode(again(text)["input_ids"]) == text
    with pytest.raises(DataError, match="no tokenizer folder"):
        tokenizer.load(tmp_path / "none")
    with pytest.raises(ValueError, match="size must be ≥ 257"):
        tokenizer.train(docs, 200, tmp_path / "small")


def made(texts, out, **options):
    folder, _ = texts
    known = {"shard_tokens": 20_000, "validation": 0.1}
    return prepare(Source(str(folder / "a.jsonl")), out, folder / "tokenizer", **{**known, **options})


@pytest.fixture(scope="module")
def prepared(texts, tmp_path_factory):
    return made(texts, tmp_path_factory.mktemp("prepared") / "out")


def test_prepare_writes_every_document_once(texts, prepared):
    train, held_out = TokenShards(prepared.train), TokenShards(prepared.validation)
    train.verify()
    held_out.verify()
    assert held_out.documents == 15 and train.documents == 135 and len(train.shards) > 3
    known = tokenizer.load(prepared.tokenizer)

    def told(of):
        bounds = [*of.document_starts(0, of.tokens), of.tokens]
        return [known.decode(of.read(a, b - 1)) for a, b in itertools.pairwise(bounds)]

    # "<|endoftext|>" in a text is text: it neither ends the document nor becomes eos.
    assert (train.read(0, train.tokens) == 0).sum() == train.documents
    docs = texts[1]
    assert told(held_out) == docs[::10]
    assert told(train) == [d for i, d in enumerate(docs) if i % 10]
    assert (prepared.train / train.tokenizer["folder"]).resolve() == prepared.tokenizer.resolve()


def test_a_model_can_take_the_tokenizer_along(prepared, corpus, tmp_path):
    TokenShards(prepared.train).copy_tokenizer(tmp_path)
    assert contents(tmp_path) == contents(prepared.tokenizer)
    corpus.copy_tokenizer(tmp_path)  # was written without one


def test_two_workers_write_the_same(texts, prepared, tmp_path):
    made(texts, tmp_path / "out", workers=2)
    assert contents(tmp_path / "out") == contents(prepared.train.parent)


def test_a_limit_ends_with_the_document_that_reaches_it(texts, prepared, tmp_path):
    train = TokenShards(prepared.train)
    limited = TokenShards(made(texts, tmp_path / "out", limit_tokens=70_000).train)
    last = int(train.document_starts(0, limited.tokens)[-1])
    assert (
        last < 70_000 <= limited.tokens
        and (limited.read(0, limited.tokens) == train.read(0, limited.tokens)).all()
    )
    first = TokenShards(made(texts, tmp_path / "first", limit_tokens=1000, validation=3).validation)
    assert first.documents == 3


def test_a_bad_line_stops_prepare_and_a_good_one_lets_it_go_on(texts, prepared, tmp_path, monkeypatch):
    folder, docs = texts
    good = (folder / "a.jsonl").read_bytes()
    source = tmp_path / "a.jsonl"
    source.write_bytes(good + b"{")
    source_of = Source(str(source))
    options = {"shard_tokens": 20_000, "validation": 0.1}
    with pytest.raises(DataError, match=f"line {len(docs) + 1} is not JSON"):
        prepare(source_of, tmp_path / "out", folder / "tokenizer", **options)
    kept = contents(tmp_path / "out" / "train")
    assert len(kept) > 3
    source.write_bytes(good)
    result = prepare(source_of, tmp_path / "out", folder / "tokenizer", resume=True, **options)
    for name in ("train", "validation"):
        files, expected = contents(tmp_path / "out" / name), contents(prepared.train.parent / name)
        assert {k: v for k, v in files.items() if k.suffix != ".json"} == {
            k: v for k, v in expected.items() if k.suffix != ".json"
        }
    assert all(contents(result.train)[k] == v for k, v in kept.items() if k.suffix != ".json")
    with pytest.raises(DataError, match="was begun with source"):
        prepare(
            source_of, tmp_path / "out", folder / "tokenizer", resume=True, **{**options, "validation": 0.2}
        )


def test_a_killed_run_resumes_to_identical_shards(texts, prepared, tmp_path):
    folder, _ = texts
    out = tmp_path / "out"
    program = f"""
import time
from kdn.training.data import shards
from kdn.training.data.prepare import prepare, Source
if __name__ == "__main__":
    add = shards.ShardWriter.add
    def slow(self, tokens):
        time.sleep(0.01)
        add(self, tokens)
    shards.ShardWriter.add = slow
    prepare(Source({str(folder / "a.jsonl")!r}), {str(out)!r}, {str(folder / "tokenizer")!r},
            shard_tokens=20_000, validation=0.1)
"""
    (tmp_path / "run.py").write_text(program)
    process = subprocess.Popen([sys.executable, tmp_path / "run.py"])
    end = time.monotonic() + 40
    while not (out / "train" / "000001.bin").exists():
        assert process.poll() is None and time.monotonic() < end
        time.sleep(0.005)
    process.kill()
    process.wait()
    assert (out / "train" / "index.partial.json").exists() and not (out / "train" / "index.json").exists()
    with pytest.raises(DataError, match="is unfinished"):
        TokenShards(out / "train")
    made(texts, out, resume=True)
    assert contents(out) == contents(prepared.train.parent)
    before = contents(out)
    made(texts, out, resume=True)  # nothing left to do
    assert contents(out) == before


def test_the_command_prepares_verifies_and_explains(texts, tmp_path, capsys):
    import argparse

    parser = argparse.ArgumentParser()
    add_parser(parser.add_subparsers())

    def kdn(*arguments):
        options = parser.parse_args(["data", *map(str, arguments)])
        status = options.command(options)
        return status, capsys.readouterr()

    out = tmp_path / "out"
    status, said = kdn(
        "prepare", texts[0] / "a.jsonl", "--out", out, "--train-tokenizer", 300, "--workers", 1
    )
    assert status == 0 and "tokens, 150 documents, 1 shards" in said.out
    status, said = kdn("verify", out / "train")
    assert status == 0 and said.out.rstrip().endswith("all in order")
    before = contents(out)
    status, said = kdn("prepare", texts[0] / "a.jsonl", "--out", out, "--train-tokenizer", 290)
    assert status == 1 and "exists already" in said.err and contents(out) == before
    flip(out / "train" / "000000.bin", 5)
    status, said = kdn("verify", out / "train")
    assert (
        status == 1 and said.err.startswith("kdn: ") and "checksum" in said.err and said.err.count("\n") == 1
    )
