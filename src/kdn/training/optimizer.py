"""AdamW as the recipe says: decay on matrices only, one learning rate for all."""

import torch
from torch import nn

from kdn.training.recipe import Recipe

__all__ = ["make_optimizer", "set_learning_rate"]


def make_optimizer(model: nn.Module, recipe: Recipe) -> torch.optim.AdamW:
    """Fused AdamW; weight decay for parameters with two or more axes that are not convolutions."""
    o = recipe.optimizer
    matrices, others = [], []
    for name, parameter in model.named_parameters():
        decayed = parameter.ndim == 2 or (parameter.ndim > 2 and "conv" not in name)
        (matrices if decayed else others).append(parameter)
    groups = [{"params": matrices, "weight_decay": o.weight_decay}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=o.peak, betas=(o.beta1, o.beta2), eps=1e-8, fused=True)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate
