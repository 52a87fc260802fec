"""AdamW as the recipe says: decay on matrices only, one learning rate for all."""

import torch
from torch import nn

from kdn.training.recipe import Recipe

__all__ = ["make_optimizer", "set_learning_rate"]


def make_optimizer(model: nn.Module, recipe: Recipe) -> torch.optim.AdamW:
    """Fused AdamW; weight decay for matrices, that is projections, embedding and head.

    Norms, biases, convolutions, and per-head numbers such as rates of decay and priors have a scale of their own, which
    decay would pull to 0.
    """
    o = recipe.optimizer
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim == 2], "weight_decay": o.weight_decay},
        {"params": [p for p in parameters if p.ndim != 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=o.peak, betas=(o.beta1, o.beta2), eps=1e-8, fused=True)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate
