"""`kdn bench ops`: the operations' speed on a CPU, beside what one would use instead.

    peers.py     who takes part: our backends and the peers, each a function of prepared tensors
    ops.py       the measuring, in a process of its own for each allocator mode
    report.py    the table, the JSON and the plot
    machine.py   what it was measured on

This file starts the measuring processes and hands their rows to the report; it needs no torch itself.
"""

import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

__all__ = ["Settings", "main"]

# With these, freed memory stays with the process: else clearing fresh pages is much of what is timed.
RAISED = {"MALLOC_MMAP_THRESHOLD_": str(2**33), "MALLOC_TRIM_THRESHOLD_": str(2**34)}


@dataclass(frozen=True)
class Settings:
    """What one measuring process does."""

    allocator: str = "default"
    lengths: tuple[int, ...] = (512, 1024, 2048, 4096, 8192, 16384, 32768)
    batches: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)  # of decoding
    heads: int = 16
    width: int = 128  # K = V
    threads: int | None = None  # None: torch's own
    seconds: float = 10.0  # aimed at for the rounds of one length
    matmul: int = 4096  # rows of the matrices that stand in for a measured FMA peak
    copied: int = 2**28  # bytes copied to measure bandwidth


QUICK: dict[str, Any] = {
    "lengths": (64, 128),
    "batches": (1, 4),
    "heads": 2,
    "seconds": 0.2,
    "matmul": 512,
    "copied": 2**24,
}


def main(
    *,
    quick: bool = False,
    out: str | Path = "kdn-bench",
    threads: int | None = None,
    lengths: Sequence[int] | None = None,
    allocator: str | None = None,
) -> int:
    """Measure, print the table, save `ops.json` and `ops.png` in folder `out`; 0 if all was measured."""
    from kdn.bench import report

    chosen = dict(QUICK) if quick else {}
    if lengths:
        chosen["lengths"] = tuple(sorted(set(lengths)))
    modes = _modes(allocator or ("default" if quick else "both"))
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)  # a folder that cannot be written fails before the work
    runs = [_measure(Settings(allocator=mode, threads=threads, **chosen)) for mode in modes]
    result = report.result(runs)
    print(report.text(result))
    for written in report.save(result, folder):
        print(written)
    return 0 if all(run["complete"] for run in runs) else 1


def _modes(asked: str) -> list[str]:
    if asked != "default" and platform.libc_ver()[0] != "glibc":
        print("notice: only glibc's malloc has thresholds to raise: measured as it is", file=sys.stderr)
        return ["default"]
    return ["default", "raised"] if asked == "both" else [asked]


def _measure(settings: Settings) -> dict[str, Any]:
    """One run of ops.py in a process whose allocator is set as the settings say."""
    # Every call names its backend: KDN_BACKEND has no say here.
    ours = {*RAISED, "KDN_BACKEND"}
    environment = {name: value for name, value in os.environ.items() if name not in ours}
    if settings.allocator == "raised":
        environment |= RAISED
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "run.json"
        command = [sys.executable, "-m", "kdn.bench.ops", json.dumps(asdict(settings)), str(file)]
        status = subprocess.run(command, env=environment, check=False).returncode
        if not file.exists():
            raise SystemExit(f"kdn bench ops: measuring ended with status {status} before the first length")
        run: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    run["complete"] = status == 0
    if status:  # killed for memory, say: what was measured until then is kept
        run["notices"].append(f"measuring ended early with status {status}")
    return run
