"""What a number was measured on: processor, system, versions, instruction set."""

import os
import platform
from importlib import metadata
from pathlib import Path

import kdn

__all__ = ["instruction_set", "machine", "versions"]

# Those whose version changes a number in the table.
_PACKAGES = ("torch", "transformers", "flash-linear-attention")


def versions() -> dict[str, str]:
    """kdn, Python, and those of torch and the peers that are installed."""
    found = {"kdn": kdn.__version__, "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def machine() -> dict[str, str | int]:
    """Processor, cores this process may use, system and C library."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return {
        "cpu": _processor(),
        "cores": usable,
        "architecture": platform.machine(),
        "system": platform.platform(),
    }


def instruction_set(backend: str) -> str | None:
    """What the backend's kernels are compiled for, where it has kernels and says so."""
    from kdn.ops.registry import BACKENDS

    told = getattr(BACKENDS[backend], "instruction_set", None)
    return None if told is None else told()


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())
