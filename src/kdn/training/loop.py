"""The loop.

    train(recipe)                 trains, checkpoints, resumes, and leaves a model that `from_pretrained` loads
    replay(recipe, checkpoint)    the one step after a checkpoint again, such as one whose loss was not a number

What happens in a step stands in `_step`; all else is set-up. A run is a function of its recipe and data: the same
steps on the same machine give the same bits, however often it was interrupted.
"""

import json
import math
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from kdn.models.config import KDNConfig
from kdn.models.modeling import KDNForCausalLM
from kdn.training import TrainingStopped
from kdn.training.checkpoint import Checkpoints, opened
from kdn.training.data import DataError
from kdn.training.data.batches import Batch, Batches
from kdn.training.data.shards import TokenShards
from kdn.training.measure import Clock, MemoryWatch
from kdn.training.metrics import Metrics, check_writers
from kdn.training.optimizer import make_optimizer, set_learning_rate
from kdn.training.parallel import Ranks, joined, shard
from kdn.training.recipe import Recipe, RecipeError, made_of

__all__ = ["Result", "TrainingStopped", "evaluate", "replay", "train"]

ABOUT = "training.json"  # in the exported model's folder


class Result(NamedTuple):
    steps: int
    loss: float  # of the last step
    validation_loss: float | None
    tokens_per_second: float  # over the steps of this process
    folder: Path  # the model, as `from_pretrained` loads it


class _Run(NamedTuple):
    """What a run is made of, before its states are those of a checkpoint."""

    recipe: Recipe
    ranks: Ranks
    shards: TokenShards
    made_of: dict[str, Any]  # what may not change between a checkpoint and those who resume it
    model: KDNForCausalLM
    optimizer: torch.optim.Optimizer
    checkpoints: Checkpoints


def train(recipe: Recipe, *, stop_after: int | None = None) -> Result:
    """Run the recipe from its newest checkpoint, or from the start; `stop_after` ends at that step, as if killed.

    Raises, each with one sentence for the user: RecipeError, DataError, and TrainingStopped for what happens later.
    """
    check_writers(recipe)
    config = recipe.model_config()
    shards = _shards(recipe, config)
    same = made_of(recipe, config, shards.checksum)
    with joined(recipe) as ranks:
        if (done := _finished(recipe, same)) is not None:
            if ranks.first:
                Metrics.announce(f"finished already: {done.steps} steps, the model is in {done.folder}")
            return done
        checkpoints = Checkpoints(_checkpoint_folder(recipe), recipe.checkpoint.keep, ranks)
        found = checkpoints.newest()
        about: dict[str, Any] = {"step": 0, "position": 0, "loss": None, "validation loss": None}
        if found is not None:
            about = found.about
            _check_same(about["made of"], same, found.folder)
        model = _make_model(recipe, config, ranks)
        run = _Run(recipe, ranks, shards, same, model, make_optimizer(model, recipe), checkpoints)
        if found is not None:
            checkpoints.load(found, model, run.optimizer)
        metrics = Metrics(recipe, first=ranks.first, resumed_at=about["step"])
        for note in checkpoints.notes:
            metrics.say(note)
        if found is not None:
            metrics.say(f"resumed at step {about['step']} of {recipe.steps}")
        try:
            return _train(run, metrics, about, stop_after)
        except KeyboardInterrupt:
            metrics.say(
                f"interrupted: the same command goes on from the newest checkpoint in {checkpoints.folder}"
            )
            raise
        finally:
            metrics.close()


def _train(run: _Run, metrics: Metrics, about: dict[str, Any], stop_after: int | None) -> Result:
    recipe, ranks, model, optimizer = run.recipe, run.ranks, run.model, run.optimizer
    step, loss, validation = int(about["step"]), about["loss"], about["validation loss"]
    batches = _batches(recipe, ranks, run.shards, int(about["position"]))
    end = recipe.steps if stop_after is None else min(stop_after, recipe.steps)
    clock = Clock(model, recipe, ranks, step)

    def state(step: int, position: int) -> dict[str, Any]:
        told = {"step": step, "position": position, "loss": loss, "validation loss": validation}
        return told | {"made of": run.made_of, "recipe": recipe.as_dict()}

    while step < end:
        position, before = batches.position, loss
        micro = _micro_batches(recipe, ranks, batches)
        rate = recipe.learning_rate(step)
        set_learning_rate(optimizer, rate)
        loss, norm = _step(model, optimizer, micro, recipe, ranks)
        step += 1
        if not (math.isfinite(loss) and math.isfinite(norm)):
            said, loss = loss, before
            where = run.checkpoints.save(model, optimizer, state(step - 1, position), name=f"nan-{step:08d}")
            run.checkpoints.finish()
            raise TrainingStopped(
                f"loss {said}, gradient norm {norm} at step {step}, sequences {position} to "
                f"{position + recipe.sequences - 1} of the data's order; the state before that step is in {where}, "
                f"and kdn train … --replay {where} computes the step again"
            )
        if step % recipe.log.every == 0 or step == recipe.steps:
            numbers = {"loss": loss, "learning rate": rate, "gradient norm": norm}
            metrics.log(step, numbers | clock.numbers(step) | _observed(model, micro[0], recipe, ranks))
        every = recipe.train.validate_every
        if recipe.data.validation and (step == recipe.steps or (every and step % every == 0)):
            validation = evaluate(model, recipe, ranks)
            metrics.log(step, {"validation loss": validation})
        every = recipe.checkpoint.every
        if (every and step % every == 0) or step == recipe.steps:
            run.checkpoints.save(model, optimizer, state(step, batches.position))
    run.checkpoints.finish()
    folder = _model_folder(recipe)
    if step >= recipe.steps:
        _export(run, folder, state(step, batches.position))
    return Result(step, math.nan if loss is None else loss, validation, clock.tokens_per_second(step), folder)


# --- before the first step ---


def _checkpoint_folder(recipe: Recipe) -> Path:
    return Path(recipe.checkpoint.folder) / "checkpoints"


def _model_folder(recipe: Recipe) -> Path:
    return Path(recipe.checkpoint.folder) / "model"


def _shards(recipe: Recipe, config: KDNConfig) -> TokenShards:
    """The training data; what is wrong with it, or with the validation data, comes up here."""
    train = TokenShards(recipe.data.train)
    checked = [train]
    if recipe.data.validation is not None:
        checked.append(TokenShards(recipe.data.validation))
        Batches.in_order(checked[1], length=recipe.data.length)
    for shards in checked:
        if shards.vocab_size > config.vocab_size:
            raise DataError(
                f"{shards.folder} has token ids up to {shards.vocab_size - 1}, the model only {config.vocab_size}: "
                f"set model.vocab_size={shards.vocab_size}, or prepare the data with a smaller tokenizer"
            )
    return train


def _finished(recipe: Recipe, same: dict[str, Any]) -> Result | None:
    """What an earlier process came to, if it came to the recipe's end."""
    folder = _model_folder(recipe)
    try:
        about = json.loads((folder / ABOUT).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if about["step"] < recipe.steps:
        return None
    _check_same(about["made of"], same, folder)
    return Result(about["step"], about["loss"], about["validation loss"], 0.0, folder)


def _check_same(theirs: dict[str, Any], ours: dict[str, Any], where: Path) -> None:
    """RecipeError that names the keys in which a checkpoint is of another run."""
    changed = [
        f"{key} is {theirs[key]!r} there and {value!r} here"
        for key, value in ours.items()
        if theirs.get(key, value) != value
    ]
    if changed:
        raise RecipeError(
            f"{where} was made by another recipe: {'; '.join(changed)}. Change it back to resume, or train in another "
            "checkpoint.folder"
        )


def _make_model(recipe: Recipe, config: KDNConfig, ranks: Ranks) -> KDNForCausalLM:
    torch.manual_seed(recipe.train.seed)
    model = KDNForCausalLM(config).to(ranks.device)
    if recipe.train.checkpoint_activations:
        # transformers 5 renamed it.
        enable: Any = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
        enable({"use_reentrant": False})
    if ranks.context is not None:
        from kdn.training.context import context_parallel

        try:
            context_parallel(model, ranks.context)
        except ValueError as error:
            raise RecipeError(f"parallel.context: {error}") from None
    layers: Any = model.model.layers
    if recipe.train.compile:
        for layer in layers:  # blocks are alike, so one compilation serves all
            layer.forward = torch.compile(layer.forward)
    shard(model, ranks, recipe)
    return model.train()


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


# --- a step ---


def _micro_batches(recipe: Recipe, ranks: Ranks, batches: Batches) -> list[Batch]:
    """This rank's share of a step."""
    return [next(batches) for _ in range(recipe.sequences // ranks.readers // recipe.train.micro_batch)]


def _step(
    model: KDNForCausalLM,
    optimizer: torch.optim.Optimizer,
    micro: list[Batch],
    recipe: Recipe,
    ranks: Ranks,
) -> tuple[float, float]:
    """One optimizer step: mean loss, and gradient norm before clipping.

    Nothing is changed if one of them is not finite.
    """
    mine = sum(int((batch.targets != -100).sum()) for batch in micro)
    count = ranks.sum(mine) / ranks.context_size  # targets of the whole batch
    total = torch.zeros((), device=ranks.device, dtype=torch.float64)
    for i, batch in enumerate(micro):
        if ranks.world > 1:  # gradients travel once per step
            model.set_requires_gradient_sync(i + 1 == len(micro))
        # FSDP averages gradients over ranks; each rank's share is therefore scaled up by their number.
        loss = _loss(model, batch, recipe, ranks, count / ranks.world)
        loss.backward()
        total += loss.detach() / ranks.world
    mean = ranks.sum(float(total))
    norm_of: Any = nn.utils.clip_grad_norm_(model.parameters(), recipe.optimizer.clip)
    norm = float(norm_of.full_tensor() if hasattr(norm_of, "full_tensor") else norm_of)
    if math.isfinite(mean) and math.isfinite(norm):
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return mean, norm


def _loss(model: KDNForCausalLM, batch: Batch, recipe: Recipe, ranks: Ranks, count: float) -> Tensor:
    """Summed loss of this rank's piece of the sequences, divided by `count`."""
    width = batch.input_ids.shape[1] // ranks.context_size
    piece = slice(ranks.context_rank * width, (ranks.context_rank + 1) * width)
    low = recipe.train.dtype == "bfloat16"
    with torch.autocast(ranks.device.type, torch.bfloat16) if low else nullcontext():
        found = model(
            input_ids=batch.input_ids[:, piece].to(ranks.device),
            targets=batch.targets[:, piece].to(ranks.device),
            cu_seqlens=None if batch.cu_seqlens is None else batch.cu_seqlens.to(ranks.device),
            num_items_in_batch=count,
            use_cache=False,
        )
    loss: Tensor = found.loss
    return loss


@torch.no_grad()
def _observed(model: KDNForCausalLM, batch: Batch, recipe: Recipe, ranks: Ranks) -> dict[str, float]:
    """How strongly memories write and how large they end, on a rank's first sequence; the mean over ranks."""
    length, cu_seqlens = recipe.data.length, batch.cu_seqlens
    if cu_seqlens is not None:
        cu_seqlens = torch.cat([cu_seqlens[cu_seqlens < length], cu_seqlens.new_tensor([length])])
    first = Batch(batch.input_ids[:1, :length], batch.targets[:1, :length], cu_seqlens, batch.position)
    watch = MemoryWatch()
    with watch.open(model), _not_compiled(model):
        _loss(model, first, recipe, ranks, 1.0)
    return {name: ranks.sum(x) / ranks.world for name, x in watch.numbers().items()}


@contextmanager
def _not_compiled(model: KDNForCausalLM) -> Iterator[None]:
    """What a compiled layer does inside cannot be watched."""
    layers: Any = model.model.layers
    compiled = [(layer, vars(layer).pop("forward", None)) for layer in layers]
    yield
    for layer, forward in compiled:
        if forward is not None:
            layer.forward = forward


@torch.no_grad()
def evaluate(model: KDNForCausalLM, recipe: Recipe, ranks: Ranks) -> float:
    """Mean loss on the validation shards, read in order, at most `train.validate_tokens` of them."""
    assert recipe.data.validation is not None
    # All ranks get equally many batches, as FSDP's gathers want them in step; what is added has no targets.
    batches = Batches.in_order(
        TokenShards(recipe.data.validation),
        length=recipe.data.length,
        packing=recipe.data.packing,
        limit=max(1, recipe.train.validate_tokens // recipe.data.length),
        micro_batch=recipe.train.micro_batch,
        rank=ranks.reader,
        world=ranks.readers,
    )
    total, count = 0.0, 0
    model.eval()
    for batch in batches:
        total += float(_loss(model, batch, recipe, ranks, 1.0))
        count += int((batch.targets != -100).sum())
    model.train()
    return ranks.sum(total) / max(1.0, ranks.sum(count) / ranks.context_size)


def replay(recipe: Recipe, checkpoint: str | Path) -> tuple[float, float]:
    """Loss and gradient norm of the step after a checkpoint, such as the one that a loss of NaN leaves behind.

    Nothing is written.
    """
    found = opened(Path(checkpoint))
    config = recipe.model_config()
    shards = _shards(recipe, config)
    _check_same(found.about["made of"], made_of(recipe, config, shards.checksum), found.folder)
    with joined(recipe) as ranks:
        model = _make_model(recipe, config, ranks)
        optimizer = make_optimizer(model, recipe)
        Checkpoints(found.folder.parent, recipe.checkpoint.keep, ranks).load(found, model, optimizer)
        micro = _micro_batches(recipe, ranks, _batches(recipe, ranks, shards, found.about["position"]))
        return _step(model, optimizer, micro, recipe, ranks)


# --- after the last step ---


def _export(run: _Run, folder: Path, about: dict[str, Any]) -> None:
    """The trained model and its tokenizer, as Hugging Face folders hold them. The folder appears whole."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
    from transformers.utils import logging

    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = get_model_state_dict(run.model, options=options)
    if not run.ranks.first:
        return
    with torch.device("meta"):
        whole = KDNForCausalLM(run.model.config)
    if (
        run.model.config.tie_word_embeddings
    ):  # gathered from ranks they are two copies, which would be saved twice
        weights |= {name: weights[source] for name, source in whole._tied_weights_keys.items()}
    part = folder.with_name(f".{folder.name}.writing")
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        shutil.rmtree(part, ignore_errors=True)
        whole.save_pretrained(part, state_dict=weights)
        run.shards.copy_tokenizer(part)
        (part / ABOUT).write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
        shutil.rmtree(folder, ignore_errors=True)
        part.rename(folder)
    except DataError:
        raise
    except Exception as error:  # a full disk is an error of safetensors' own
        raise TrainingStopped(
            f"the model cannot be written to {folder}: {error}; the last checkpoint is whole, "
            "the same command tries again"
        ) from error
    finally:
        if shown:
            logging.enable_progress_bar()
