"""Every test of the operations runs on every backend of this machine."""

import pytest
import torch

from kdn.ops.registry import BACKENDS

HERE = [name for name, module in BACKENDS.items() if module.unavailable(torch.device("cpu")) is None]


@pytest.fixture(params=sorted(HERE))
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=sorted(name for name in HERE if name != "reference"))
def fast_backend(request: pytest.FixtureRequest) -> str:
    """A backend to hold against `reference`."""
    return str(request.param)
