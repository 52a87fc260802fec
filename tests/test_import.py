"""Importing kdn costs hardly more than importing torch, and pulls in nothing heavy.

`import kdn` alone loads its parts when they are first used, so the same is asked of `kdn.ops`.
"""

import subprocess
import sys

import pytest

LIMIT = 1.2  # of the time that `import torch` takes
ROUNDS = (3, 12)  # at least, at most

# What is imported where it is used and nowhere else. torch itself imports some of these where they
# are installed, so each test asks what kdn adds to a plain `import torch`.
HEAVY = {
    "datasets",
    "fla",
    "lm_eval",
    "matplotlib",
    "pandas",
    "safetensors",
    "tokenizers",
    "transformers",
    "triton",
}


def fresh_interpreter(program: str) -> str:
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert run.returncode == 0, f"python -c {program!r} failed:\n{run.stderr}"
    return run.stdout


def import_seconds(module: str) -> float:
    return float(
        fresh_interpreter(
            f"import time; start = time.perf_counter()\nimport {module}\nprint(time.perf_counter() - start)"
        )
    )


def imported_packages(module: str) -> set[str]:
    names = fresh_interpreter(f"import sys, {module}; print(*sys.modules)").split()
    return {name.partition(".")[0] for name in names}


@pytest.mark.parametrize("module", ["kdn", "kdn.ops"])
def test_import_takes_little_longer_than_torch(module: str) -> None:
    """Minima of interleaved runs: other load on the machine only ever adds time, and to both."""
    import_seconds(module)  # warms the disk cache and writes the .pyc files
    torch, ours = [], []
    at_least, at_most = ROUNDS
    for done in range(1, at_most + 1):
        torch.append(import_seconds("torch"))
        ours.append(import_seconds(module))
        if done >= at_least and min(ours) <= LIMIT * min(torch):
            return
    ratio = min(ours) / min(torch)
    pytest.fail(
        f"import {module} took {min(ours):.2f} s, import torch {min(torch):.2f} s: {ratio:.2f} "
        f"times as long, limit {LIMIT} (best of {at_most} each). Where the time goes: "
        f"python -X importtime -c 'import {module}'"
    )


@pytest.mark.parametrize("module", ["kdn", "kdn.ops"])
def test_import_adds_no_heavy_package(module: str) -> None:
    added = imported_packages(module) - imported_packages("torch")
    heavy = added & HEAVY
    assert "kdn" in added
    assert not heavy
