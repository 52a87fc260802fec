"""Ranks: torchrun's environment, who reads which data, and FSDP2.

The model stays plain single-device code; what is shared among ranks is said here.
"""

import os
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from kdn.training.recipe import Recipe, RecipeError

__all__ = ["Ranks", "set_up", "shard"]


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


def set_up(recipe: Recipe) -> Ranks:
    """Join the process group that torchrun's environment names, if there is one."""
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


def shard(model: nn.Module, ranks: Ranks, recipe: Recipe) -> None:
    """FSDP2 over all ranks: parameters, gradients and optimizer states are split among them, block by block."""
    if ranks.world == 1:
        return
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh(ranks.device.type, (ranks.world,))
    low = torch.bfloat16 if recipe.train.dtype == "bfloat16" else None
    policy = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)


def shut_down() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
