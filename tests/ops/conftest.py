"""Every test of the operations runs on every backend of this machine."""

from collections.abc import Iterator

import pytest
import torch

from kdn.ops.backends import cpu
from kdn.ops.backends.cpu.library import use_instruction_set
from kdn.ops.registry import BACKENDS

HERE = [name for name, module in BACKENDS.items() if module.unavailable(torch.device("cpu")) is None]


@pytest.fixture(params=sorted(HERE))
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=sorted(name for name in HERE if name != "reference"))
def fast_backend(request: pytest.FixtureRequest) -> str:
    """A backend to hold against `reference`."""
    return str(request.param)


@pytest.fixture(params=["baseline", "avx2", "avx512"])
def instructions(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each compiled variant that this machine can run, by force."""
    why = cpu.unavailable(torch.device("cpu"))
    if why is not None:
        pytest.skip(why)
    before = cpu.instruction_set()
    try:
        use_instruction_set(request.param)
    except ValueError:
        pytest.skip(f"this machine has no {request.param}")
    yield request.param
    use_instruction_set(before)
