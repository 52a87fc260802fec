"""Measures: every contender of one length takes its turn in every round, and medians are compared.

    python -m kdn.bench.ops SETTINGS_AS_JSON RESULT_FILE

is one process of `kdn bench ops`, which sets malloc for it. After every shape the result is written, so
that a process killed for memory leaves what it had.
"""

import importlib
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from kdn.bench import Settings
from kdn.bench.machine import instruction_set
from kdn.bench.peers import Contender, Shape, Tensors, contenders, decoders, inputs, our_backends

__all__ = ["measure"]

# Multiply-adds per state element and token. Forward: decay and read at the key, write, read at the query.
FMA = {"forward": 3, "backward": 8, "forward+backward": 11}
LONGEST_RUN = 10.0  # seconds; who is expected to need more at a length is left out of it
ROUNDS = (3, 21)  # at least, at most
STEPS = 8  # of decoding in one turn: one alone is short beside the clock's own cost


class Sample(NamedTuple):
    seconds: float
    faults: int  # minor page faults: pages that the kernel had to hand out, and cleared


class Progress:
    """One line on the terminal that rewrites itself; silent elsewhere."""

    def __init__(self) -> None:
        self.live = sys.stderr.isatty()

    def show(self, text: str) -> None:
        if self.live:
            print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


def page_faults() -> int:
    try:
        import resource
    except ImportError:  # Windows
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def clocked(work: Callable[[], Any]) -> tuple[Any, Sample]:
    faults, start = page_faults(), time.perf_counter()
    result = work()
    seconds = time.perf_counter() - start
    return result, Sample(seconds, page_faults() - faults)


def infer(contender: Contender, tensors: Tensors) -> dict[str, Sample]:
    with torch.no_grad():
        _, sample = clocked(lambda: contender.run(tensors))
    return {"forward": sample}


def train(contender: Contender, tensors: Tensors) -> dict[str, Sample]:
    leaves = {name: x.detach().requires_grad_() for name, x in tensors.items()}
    outs, forward = clocked(lambda: contender.run(leaves))
    seeds = tuple(torch.ones_like(out) for out in outs)  # not a part of anyone's work
    _, backward = clocked(lambda: torch.autograd.backward(outs, seeds))
    both = Sample(forward.seconds + backward.seconds, forward.faults + backward.faults)
    return {"backward": backward, "forward+backward": both}


def decode(contender: Contender, tensors: Tensors) -> dict[str, Sample]:
    def steps() -> None:
        for _ in range(STEPS):
            contender.run(tensors)

    with torch.no_grad():
        _, sample = clocked(steps)
    return {"decode": Sample(sample.seconds / STEPS, sample.faults // STEPS)}


def best(work: Callable[[], object], repeats: int = 5) -> float:
    """The shortest of some runs: for peaks, which other load only hides."""
    work()
    return min(clocked(work)[1].seconds for _ in range(repeats))


def fma_peak(settings: Settings, threads: int) -> dict[str, Any]:
    """Flop/s of one thread, and how it was found."""
    try:
        cpu = importlib.import_module("kdn.ops.backends.cpu")
        if cpu.unavailable(torch.device("cpu")) is None:
            return {"flops_per_thread": float(cpu.fma_peak()), "by": "kdn.ops.backends.cpu.fma_peak"}
    except (ImportError, AttributeError):
        pass
    n = settings.matmul
    a, b, c = torch.randn(n, n), torch.randn(n, n), torch.empty(n, n)
    seconds = best(lambda: torch.mm(a, b, out=c))
    return {"flops_per_thread": 2 * n**3 / seconds / threads, "by": f"float32 matmul, {n} × {n}"}


def copy_bandwidth(settings: Settings) -> dict[str, float]:
    """Bytes read plus bytes written per second of a long copy."""
    source = torch.ones(settings.copied // 4)
    target = torch.empty_like(source)
    seconds = best(lambda: target.copy_(source))
    return {"bytes_per_second": 2 * source.nbytes / seconds, "copied": source.nbytes}


class Bench:
    """One run: what was measured so far, and what has been left out."""

    def __init__(self, settings: Settings) -> None:
        if settings.threads:
            torch.set_num_threads(settings.threads)
        self.settings, self.threads, self.progress = settings, torch.get_num_threads(), Progress()
        if not our_backends():
            raise RuntimeError("no backend of ours serves the CPU: see kdn info")
        self.progress.show("measuring FMA peak and copy bandwidth")
        self.peak, self.copy = fma_peak(settings, self.threads), copy_bandwidth(settings)
        self.rows: list[dict[str, Any]] = []
        self.notices: list[str] = []
        self.last: dict[tuple[str, str, str], tuple[int, float]] = {}  # op, who, pass: length, seconds
        self.gone: set[tuple[str, str, str]] = set()

    def result(self) -> dict[str, Any]:
        return {
            "allocator": self.settings.allocator,
            "threads": self.threads,
            "instruction_set": instruction_set(our_backends()[0]),
            "peak": self.peak,
            "copy": self.copy,
            "rows": self.rows,
            "notices": self.notices,
        }

    def notice(self, text: str) -> None:
        if text not in self.notices:
            self.notices.append(text)

    def length(self, everyone: list[Contender], shape: Shape, turn: Callable[..., dict[str, Sample]]) -> None:
        """All rounds of one shape, and its rows."""
        x = inputs(shape)
        first = our_backends()[0]
        ready = [
            (c, c.prepare(x)) for c in everyone if c.name == first or self._still_in(c, shape, turn.__name__)
        ]
        samples: dict[str, list[list[Sample]]] = {}
        done, rounds = 0, 1  # of them the first, which warms up, tells how many there is time for
        while done <= rounds:
            start = time.perf_counter()
            for position, (contender, tensors) in enumerate(ready):
                words = f"{turn.__name__}, B={shape.batch} T={shape.time}, round {done} of {rounds}"
                self.progress.show(
                    f"{self.settings.allocator} malloc: {words}: {contender.op}, {contender.name}"
                )
                for part, sample in turn(contender, tensors).items():
                    lists = samples.setdefault(part, [[] for _ in ready])
                    if done:
                        lists[position].append(sample)
            if done == 0:
                wanted = int(self.settings.seconds / (time.perf_counter() - start))
                rounds = min(max(wanted, ROUNDS[0]), ROUNDS[1])
            done += 1
        for part, lists in samples.items():
            self._add_rows([c for c, _ in ready], shape, part, lists)
        for position, (c, _) in enumerate(ready):
            slowest = max(statistics.median(s.seconds for s in lists[position]) for lists in samples.values())
            self.last[c.op, c.name, turn.__name__] = shape.time, slowest

    def _still_in(self, contender: Contender, shape: Shape, turn: str) -> bool:
        key = contender.op, contender.name, turn
        if key in self.gone:
            return False
        if turn == "decode" or key not in self.last:
            return True
        length, seconds = self.last[key]
        expected = seconds * (shape.time / length) ** contender.order
        if expected <= LONGEST_RUN:
            return True
        self.gone.add(key)
        part = {"infer": "forward", "train": "forward+backward"}[turn]
        self.notice(
            f"{contender.op}, {contender.name}: no {part} from T={shape.time} on, one run of about "
            f"{expected:.0f} s to be expected"
        )
        return False

    def _add_rows(self, ready: list[Contender], shape: Shape, part: str, lists: list[list[Sample]]) -> None:
        medians = [statistics.median(s.seconds for s in samples) for samples in lists]
        base: dict[str, float] = {}  # per operation, the first of our backends
        for contender, seconds in zip(ready, medians, strict=True):
            if contender.ours:
                base.setdefault(contender.op, seconds)
        for contender, seconds, samples in zip(ready, medians, lists, strict=True):
            floor = self._floor(contender, shape, part)
            batch, length, heads, width = shape
            self.rows.append(
                {
                    "op": contender.op,
                    "pass": part,
                    "shape": {"B": batch, "T": length, "H": heads, "K": width, "V": width},
                    "who": contender.name,
                    "ours": contender.ours,
                    "ms": seconds * 1e3,
                    "ms_min": min(s.seconds for s in samples) * 1e3,
                    "ms_max": max(s.seconds for s in samples) * 1e3,
                    "rounds": len(samples),
                    "ratio": seconds / base[contender.op],
                    "floor_ms": None if floor is None else floor * 1e3,
                    "percent_of_floor": None if floor is None else 100 * floor / seconds,
                    "faults": statistics.median(s.faults for s in samples),
                }
            )

    def _floor(self, contender: Contender, shape: Shape, part: str) -> float | None:
        """Seconds that nothing of this kind can be faster than: see docs/benchmarks.md."""
        if not contender.memory:
            return None
        elements = shape.batch * shape.heads * shape.width**2
        if part == "decode":  # the state is read and written once
            return 2 * 4 * elements / self.copy["bytes_per_second"]
        flops = 2 * FMA[part] * elements * shape.time
        return flops / (self.peak["flops_per_thread"] * self.threads)


def measure(settings: Settings, save: Callable[[dict[str, Any]], object] = lambda _: None) -> dict[str, Any]:
    """The rows, peaks and notices of one process; `save` is called with them after every shape."""
    bench = Bench(settings)
    bench.progress.show("importing peers")
    sequences, missing = contenders()
    steps, missing_steps = decoders()
    for text in missing + missing_steps:
        bench.notice(text)
    for length in settings.lengths:
        shape = Shape(1, length, settings.heads, settings.width)
        for turn in (infer, train):
            bench.length(sequences, shape, turn)
            save(bench.result())
    for batch in settings.batches:
        bench.length(steps, Shape(batch, 1, settings.heads, settings.width), decode)
    save(bench.result())
    bench.progress.show("")
    return bench.result()


def _main() -> None:
    settings, file = Settings(**json.loads(sys.argv[1])), Path(sys.argv[2])
    measure(settings, lambda result: file.write_text(json.dumps(result), encoding="utf-8"))


if __name__ == "__main__":
    _main()
