"""Training: recipes, data, the loop, checkpoints and parallelism.

    recipe.py      a run in one TOML file, typed, with overrides
    data/          text → tokens → shards → the batches of a step
    optimizer.py   AdamW's groups, and the schedule of its learning rate
    measure.py     what is measured: arithmetic, memory, effective writes
    metrics.py     where it goes: console, JSONL, TensorBoard, Weights & Biases
    checkpoint.py  checkpoints: asynchronous, atomic, verified, the last few kept
    parallel.py    torchrun and FSDP2
    context.py     one long sequence over several processes
    loop.py        the loop itself
    quickstart/    what `make quickstart` runs

Nothing is imported here: each file loads what it needs.
"""

__all__ = ["TrainingStopped"]


class TrainingStopped(RuntimeError):
    """A run that could not go on, said in one sentence. Checkpoints written before stay and can be continued."""
