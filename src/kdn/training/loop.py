"""The loop.

    train(recipe)   trains, checkpoints, resumes, and leaves a model that `from_pretrained` loads

What happens in a step stands in `_step`; all else is set-up. A run is a function of its recipe and data: the same
steps on the same machine give the same bits, however often it was interrupted.
"""

import math
import time
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from kdn.models.modeling import KDNForCausalLM
from kdn.probe.writes import gains_watched
from kdn.training.checkpoint import Checkpoints
from kdn.training.data.batches import Batch, Batches
from kdn.training.data.shards import TokenShards
from kdn.training.metrics import Metrics
from kdn.training.optimizer import make_optimizer, set_learning_rate
from kdn.training.parallel import Ranks, set_up, shard
from kdn.training.recipe import Recipe

__all__ = ["Result", "TrainingStopped", "evaluate", "train"]


class TrainingStopped(RuntimeError):
    """The loss is no longer a number."""


class Result(NamedTuple):
    steps: int
    loss: float  # of the last step
    validation_loss: float | None
    tokens_per_second: float  # over the steps of this process
    folder: Path  # the model, as `from_pretrained` loads it


def train(recipe: Recipe, *, stop_after: int | None = None) -> Result:
    """Run the recipe from its newest checkpoint, or from the start; `stop_after` ends at that step, as if killed."""
    ranks = set_up(recipe)
    folder = Path(recipe.checkpoint.folder)
    model, config = _make_model(recipe, ranks)
    optimizer = make_optimizer(model, recipe)
    checkpoints = Checkpoints(folder / "checkpoints", recipe.checkpoint.keep, ranks)
    restored = checkpoints.restore(model, optimizer) or {"step": 0, "position": 0}
    step = int(restored["step"])
    metrics = Metrics(recipe, folder, first=ranks.first, resumed_at=step)
    for note in checkpoints.notes:
        metrics.say(note)
    if step:
        metrics.say(f"resumed at step {step}")
    shards = TokenShards(recipe.data.train)
    batches = _batches(recipe, ranks, shards, int(restored["position"]))
    if recipe.train.compile:
        model.compile()
    flops = 3 * _flops_per_token(model, config)
    peak = _matmul_peak(recipe, ranks.device) * ranks.world
    validation, loss, began, first_step = None, math.nan, time.perf_counter(), step
    last, last_step = began, step
    end = recipe.steps if stop_after is None else min(stop_after, recipe.steps)
    while step < end:
        watch = (step + 1) % recipe.log.every == 0 or step + 1 == recipe.steps
        position = batches.position
        micro = [next(batches) for _ in range(recipe.sequences // ranks.readers // recipe.train.micro_batch)]
        set_learning_rate(optimizer, recipe.learning_rate(step))
        loss, norm, write = _step(model, optimizer, micro, recipe, ranks, watch=watch)
        step += 1
        if not math.isfinite(loss) or not math.isfinite(norm):
            where = checkpoints.save(step - 1, model, optimizer, {"position": position}, name=f"nan-{step}")
            checkpoints.finish()
            raise TrainingStopped(
                f"loss {loss}, gradient norm {norm} at step {step}, sequences {position} to "
                f"{position + recipe.sequences} of the data order; the state before that step is in {where}"
            )
        if watch:
            now = time.perf_counter()
            seconds = (now - last) / (step - last_step)
            last, last_step = now, step
            rate = recipe.train.batch_tokens / seconds
            numbers = {
                "tokens": step * recipe.train.batch_tokens,
                "loss": loss,
                "learning rate": recipe.learning_rate(step - 1),
                "gradient norm": norm,
                "tokens/s": rate,
                "seconds per step": seconds,
                "MFU": rate * flops / peak,
                "memory GiB": _memory(ranks.device),
            }
            metrics.log(step, numbers | ({} if write is None else {"effective write": write}))
        every = recipe.train.validate_every
        if recipe.data.validation and (step == recipe.steps or (every and step % every == 0)):
            validation = evaluate(model, recipe, ranks)
            metrics.log(step, {"validation loss": validation})
        every = recipe.checkpoint.every
        if (every and step % every == 0) or step == recipe.steps:
            checkpoints.save(step, model, optimizer, {"position": batches.position})
    checkpoints.finish()
    speed = (step - first_step) * recipe.train.batch_tokens / max(1e-9, time.perf_counter() - began)
    if step == recipe.steps:
        _export(model, config, shards, folder / "model", ranks)
    metrics.close()
    return Result(step, loss, validation, speed, folder / "model")


def _make_model(recipe: Recipe, ranks: Ranks) -> tuple[KDNForCausalLM, Any]:
    config = recipe.model_config()
    torch.manual_seed(recipe.train.seed)
    model = KDNForCausalLM(config).to(ranks.device)
    if recipe.train.checkpoint_activations:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if ranks.context is not None:
        from kdn.training.context import context_parallel

        context_parallel(model, ranks.context)
    shard(model, ranks, recipe)
    return model.train(), config


def _batches(recipe: Recipe, ranks: Ranks, shards: TokenShards, position: int) -> Batches:
    return Batches(
        shards,
        length=recipe.data.length,
        sequences=recipe.sequences,
        micro_batch=recipe.train.micro_batch,
        seed=recipe.data.seed,
        packing=recipe.data.packing,
        rank=ranks.reader,
        world=ranks.readers,
        position=position,
    )


def _step(
    model: KDNForCausalLM,
    optimizer: torch.optim.Optimizer,
    micro: list[Batch],
    recipe: Recipe,
    ranks: Ranks,
    *,
    watch: bool,
) -> tuple[float, float, float | None]:
    """One optimizer step: mean loss, gradient norm before clipping, and mean effective write if watched.

    Nothing is changed if loss or norm is not finite.
    """
    mine = sum(int((batch.targets != -100).sum()) for batch in micro)
    count = ranks.sum(mine) / ranks.context_size  # targets of the whole batch
    total, writes = 0.0, []
    optimizer.zero_grad(set_to_none=True)
    for i, batch in enumerate(micro):
        if ranks.world > 1:  # gradients travel once per step
            model.set_requires_gradient_sync(i + 1 == len(micro))  # type: ignore[operator]
        with ExitStack() as open_:
            if watch and i == 0:
                seen = gains_watched(model, lambda _, x: writes.append(float(x.mean())))
                open_.enter_context(seen)
            open_.enter_context(_precision(recipe, ranks.device))
            # FSDP averages gradients over ranks; each rank's share is therefore scaled up by their number.
            loss = _loss(model, batch, ranks, count / ranks.world)
        loss.backward()
        total += float(loss.detach()) / ranks.world
    total = ranks.sum(total)
    norm_of = torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.optimizer.clip)
    norm = float(norm_of.full_tensor() if hasattr(norm_of, "full_tensor") else norm_of)
    if math.isfinite(total) and math.isfinite(norm):
        optimizer.step()
    return total, norm, sum(writes) / len(writes) if writes else None


def _loss(model: KDNForCausalLM, batch: Batch, ranks: Ranks, count: float) -> Tensor:
    width = batch.input_ids.shape[1] // ranks.context_size
    piece = slice(ranks.context_rank * width, (ranks.context_rank + 1) * width)
    cu_seqlens = None if batch.cu_seqlens is None else batch.cu_seqlens.to(ranks.device)
    found = model(
        input_ids=batch.input_ids[:, piece].to(ranks.device),
        targets=batch.targets[:, piece].to(ranks.device),
        cu_seqlens=cu_seqlens,
        num_items_in_batch=count,
        use_cache=False,
    )
    loss: Tensor = found.loss
    return loss


def _precision(recipe: Recipe, device: torch.device) -> Any:
    if recipe.train.dtype == "float32":
        return nullcontext()
    return torch.autocast(device.type, dtype=torch.bfloat16)


@torch.no_grad()
def evaluate(model: KDNForCausalLM, recipe: Recipe, ranks: Ranks) -> float:
    """Mean loss on the validation shards, read in order."""
    assert recipe.data.validation is not None
    rows = max(1, recipe.train.validate_tokens // recipe.data.length)
    total, count = 0.0, 0
    model.eval()
    for i, batch in enumerate(_in_order(recipe, rows)):
        if i % ranks.readers == ranks.reader or ranks.world > 1:  # FSDP's gathers want all ranks in step
            with _precision(recipe, ranks.device):
                loss = _loss(model, batch, ranks, 1.0)
            if i % ranks.readers == ranks.reader:
                total += float(loss)
                count += int((batch.targets != -100).sum()) // ranks.context_size
    model.train()
    return ranks.sum(total) / max(1.0, ranks.sum(count))


def _in_order(recipe: Recipe, rows: int) -> Iterator[Batch]:
    shards = TokenShards(str(recipe.data.validation))
    return Batches.in_order(shards, length=recipe.data.length, packing=recipe.data.packing, limit=rows)


def _flops_per_token(model: nn.Module, config: Any) -> float:
    """Forward: matrices with their input, mixers by their own count. Sharded or not, shapes are whole."""
    matrices = sum(p.numel() for p in model.model.layers.parameters() if p.ndim == 2)
    mixers: list[Any] = [layer.mixer for layer in model.model.layers]
    return 2.0 * (matrices + config.vocab_size * config.hidden_size) + sum(
        m.flops_per_token() for m in mixers
    )


def _matmul_peak(recipe: Recipe, device: torch.device) -> float:
    """Flop/s of a large matrix product here, in the recipe's precision: what MFU is a share of."""
    n = 1024 if device.type == "cpu" else 8192
    dtype = torch.bfloat16 if recipe.train.dtype == "bfloat16" else torch.float32
    a = torch.ones(n, n, dtype=dtype, device=device)
    seconds = math.inf
    for _ in range(4):
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        (a @ a)[0, 0].item()
        seconds = min(seconds, time.perf_counter() - start)
    return 2 * n**3 / seconds


def _memory(device: torch.device) -> float:
    """The process's peak, in GiB."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated() / 2**30
    import resource
    import sys

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**30 if sys.platform == "darwin" else 2**20)


def _export(model: nn.Module, config: Any, shards: TokenShards, folder: Path, ranks: Ranks) -> None:
    """The trained model and its tokenizer, as Hugging Face folders hold them."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = get_model_state_dict(model, options=options) if ranks.world > 1 else model.state_dict()
    if not ranks.first:
        return
    with torch.device("meta"):
        whole = KDNForCausalLM(config)
    whole.save_pretrained(folder, state_dict=weights)
    shards.copy_tokenizer(folder)
