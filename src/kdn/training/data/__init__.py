"""From text to the batches of a step.

    sources.py      documents: Hugging Face datasets, parquet, JSONL, plain text, the standard library
    tokenizer.py    a byte-level BPE trained on documents, saved and loaded as transformers does
    shards.py       tokens on disk: memory-mapped, checksummed, continued after a crash
    prepare.py      `kdn data`: documents → tokens → shards, in parallel, the same whatever the number of workers
    batches.py      what a step reads: seeded order, packing, exact resume from one number

Text goes through once (`kdn data prepare`); training reads shards only. Every mistake in the data is a `DataError`.
"""

__all__ = ["DataError"]


class DataError(ValueError):
    """Something about the data, said in one sentence. What was written before stays and can be continued."""
