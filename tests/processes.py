"""Processes that run `kdn` and can be killed, without the seconds that importing takes: forked from one that has.

    with Server() as server:
        run = server.start(["train", "recipe.toml"], ranks=2)     one process per rank, torchrun's environment
        status = run.wait()                                       exit statuses; run.said is what they printed

Here, `python processes.py` is the server: it imports, then forks for every line of JSON that it is sent. It computes
nothing itself, so there are no threads that a fork would lose.
"""

import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any


class Run:
    """Ranks that run."""

    def __init__(self, server: "Server", pids: list[int], output: Path) -> None:
        self.server, self.pids, self.output = server, pids, output

    def wait(self, seconds: float = 60) -> list[int]:
        """Exit statuses by rank, −9 for what was killed; TimeoutError, after killing all, where one does not end."""
        end = time.monotonic() + seconds
        while None in (found := self.server.ask({"statuses": self.pids})):
            if time.monotonic() > end:
                self.kill()
                raise TimeoutError(f"statuses after {seconds} s: {found}\n{self.said}")
            time.sleep(0.005)
        return found

    def running(self) -> bool:
        return None in self.server.ask({"statuses": self.pids})

    def kill(self, number: int = signal.SIGKILL) -> None:
        for pid, status in zip(self.pids, self.server.ask({"statuses": self.pids}), strict=True):
            if status is None:
                os.kill(pid, number)

    @property
    def said(self) -> str:
        """What all ranks printed."""
        return self.output.read_text(encoding="utf-8")


class Server:
    def __init__(self, folder: Path) -> None:
        self.folder, self.count = folder, 0
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *_: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(10)

    def ask(self, question: dict[str, Any]) -> Any:
        assert self.process.stdin is not None and self.process.stdout is not None
        print(json.dumps(question), file=self.process.stdin, flush=True)
        return json.loads(self.process.stdout.readline())

    def start(self, arguments: Sequence[str], *, ranks: int = 1, file_limit: int | None = None) -> Run:
        """Run `kdn` with these arguments. file_limit: bytes beyond which no file can be written."""
        self.count += 1
        output = self.folder / f"said-{self.count}.txt"
        output.touch()
        environments: list[dict[str, str]] = [{}]
        if ranks > 1:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = free.getsockname()[1]
            shared = {"WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            environments = [{k: str(v) for k, v in {**shared, "RANK": r}.items()} for r in range(ranks)]
        pids = [
            self.ask({"run": list(map(str, arguments)), "env": e, "output": str(output), "limit": file_limit})
            for e in environments
        ]
        return Run(self, pids, output)

    def run(self, arguments: Sequence[str], **options: Any) -> tuple[list[int], str]:
        """Exit statuses and what was printed."""
        run = self.start(arguments, **options)
        return run.wait(), run.said


# --- the server ---


def _child(job: dict[str, Any]) -> int:
    from kdn.cli import main

    output = os.open(job["output"], os.O_WRONLY | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.environ.update(job["env"])
    if job["limit"]:
        resource.setrlimit(resource.RLIMIT_FSIZE, (job["limit"], job["limit"]))
    try:
        status = main(job["run"])
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else 1
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
    except BaseException:
        import traceback

        traceback.print_exc()
        status = 70
    sys.stdout.flush()
    sys.stderr.flush()
    return status


def _serve() -> None:
    import torch
    import torch.distributed.checkpoint
    import torch.distributed.fsdp

    import kdn.training.context
    import kdn.training.loop  # noqa: F401

    torch.set_num_threads(1)
    statuses: dict[int, int] = {}
    for line in sys.stdin:
        job = json.loads(line)
        if "run" in job:
            pid = os.fork()
            if pid == 0:
                os._exit(_child(job))
            print(pid, flush=True)
            continue
        for pid in job["statuses"]:
            if pid not in statuses:
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    statuses[pid] = os.waitstatus_to_exitcode(status)
        print(json.dumps([statuses.get(pid) for pid in job["statuses"]]), flush=True)


if __name__ == "__main__":
    _serve()
