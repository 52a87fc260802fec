"""Ranks: torchrun's environment, who reads which data, and FSDP2.

The model stays plain single-device code; what is shared among ranks is said here. A run is `joined` to its process
group from beginning to end:

    with joined(recipe) as ranks:
        shard(model, ranks, recipe)
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from kdn.training.recipe import Recipe, RecipeError

if TYPE_CHECKING:
    from kdn.models.modeling import KDNForCausalLM

__all__ = ["Ranks", "joined", "shard"]


class Ranks(NamedTuple):
    """This process among all. Ranks of one context group hold consecutive pieces of the same sequences."""

    rank: int
    world: int
    device: torch.device
    context: Any  # the process group that shares sequences, or None
    context_rank: int
    context_size: int

    @property
    def readers(self) -> int:
        """How many different shares of a batch there are."""
        return self.world // self.context_size

    @property
    def reader(self) -> int:
        return self.rank // self.context_size

    @property
    def first(self) -> bool:
        return self.rank == 0

    def sum(self, value: float) -> float:
        """Over all ranks."""
        if self.world == 1:
            return value
        total = torch.tensor(value, dtype=torch.float64, device=self.device)
        dist.all_reduce(total)
        return float(total)


@contextmanager
def joined(recipe: Recipe) -> Iterator[Ranks]:
    """Take part in the process group that torchrun's environment names, if there is one.

    After an error nobody waits for the others: they may be in the midst of a collective, and the end of this process
    is what makes torchrun end them.
    """
    already = dist.is_initialized()
    yield _set_up(recipe)
    if dist.is_initialized() and not already:
        dist.destroy_process_group()


def _set_up(recipe: Recipe) -> Ranks:
    world, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
    size = recipe.parallel.context
    if world % size:
        raise RecipeError(f"parallel.context must divide the number of ranks {world}, got {size}")
    readers = world // size
    if recipe.sequences % (readers * recipe.train.micro_batch):
        raise RecipeError(
            f"a batch of {recipe.sequences} sequences does not split into {readers} shares of micro-batches of "
            f"{recipe.train.micro_batch}: change train.batch_tokens, train.micro_batch or the number of ranks"
        )
    if world == 1:
        return Ranks(0, 1, device, None, 0, 1)
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=timedelta(minutes=30))
    group = None
    for start in range(0, world, size):  # every rank must take part in making every group
        members = dist.new_group(list(range(start, start + size)))
        if size > 1 and start <= rank < start + size:
            group = members
    return Ranks(rank, world, device, group, rank % size, size)


def shard(model: "KDNForCausalLM", ranks: Ranks, recipe: Recipe) -> None:
    """FSDP2 over all ranks: parameters, gradients and optimizer states are split among them, block by block.

    In bfloat16, autocast makes every matrix product read rounded weights. The feed-forward parts, which are most of a
    model and nothing but products, can as well travel rounded. Mixers and norms travel in float32: rates of decay,
    noises and priors are computed with as they are, so that one rank and many compute the same.
    """
    if ranks.world == 1:
        return
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh(ranks.device.type, (ranks.world,))
    whole = MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False)
    low = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    layers: Any = model.model.layers
    for layer in layers:
        if recipe.train.dtype == "bfloat16":
            fully_shard(layer.mlp, mesh=mesh, mp_policy=low)
        fully_shard(layer, mesh=mesh, mp_policy=whole)
    fully_shard(model, mesh=mesh, mp_policy=whole)
