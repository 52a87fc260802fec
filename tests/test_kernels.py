"""Tests of the CPU kernels are skipped where there are none. This one says whether there should be."""

import importlib.metadata
import shutil

import pytest

from kdn.ops.backends.cpu.library import LIBRARY


def test_kernels_are_there_where_they_can_be_compiled() -> None:
    try:
        importlib.metadata.version("kalman-delta-networks")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("kdn runs from source, nothing was compiled")
    if not any(shutil.which(name) for name in ("c++", "g++", "clang++")):
        pytest.skip("no C++ compiler on this machine")
    assert not isinstance(LIBRARY, str), LIBRARY
