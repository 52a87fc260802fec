"""The precision of states and arithmetic, whatever the precision of the inputs."""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")


def state_dtype(*arguments: object) -> torch.dtype:
    """float64 if any argument is, else float32."""
    wide = any(isinstance(x, Tensor) and x.dtype == torch.float64 for x in arguments)
    return torch.float64 if wide else torch.float32


def without_autocast(function: Callable[P, R]) -> Callable[P, R]:
    """Run `function` with autocast off: it would round the products inside an operator to bfloat16."""

    @functools.wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        device = next(x.device.type for x in args if isinstance(x, Tensor))
        with torch.autocast(device_type=device, enabled=False):
            return function(*args, **kwargs)

    return wrapped
