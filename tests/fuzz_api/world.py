"""The processes of a world; a crash or a hang is a finding, and a new world replaces it."""

from __future__ import annotations

import multiprocessing
import os
import secrets
import signal
import tempfile
import time
from contextlib import ExitStack, suppress
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, Final

from sealring.lab.bench.workers import meeting_place
from tests.fuzz_api.worker import Report, run

_DUMP_S: Final = 2.0


class WorldEnded(Exception):
    """A rank crashed or hangs; the arguments are the kind and the description."""


class World:
    def __init__(self, size: int, seed: int, patience_s: float) -> None:
        self.patience_s = patience_s
        self._stack = ExitStack()
        env = {
            # The live view's socket stays with the process and would look like a leak.
            "SEALRING_LIVE": "0",
            **self._stack.enter_context(meeting_place()),
            "SEALRING_SECRET": secrets.token_hex(32),
            "SEALRING_JOB": "fuzz",
        }
        folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory()))
        self._logs = [folder / f"rank{rank}.log" for rank in range(size)]
        context = multiprocessing.get_context("spawn")
        self._pipes, self.processes = [], []
        for rank in range(size):
            here, there = context.Pipe()
            process = context.Process(
                target=_logged, args=(str(self._logs[rank]), rank, size, seed, env, there)
            )
            process.start()
            there.close()
            self._pipes.append(here)
            self.processes.append(process)
        self._answers()

    def run(self, number: int) -> list[Report]:
        for pipe in self._pipes:
            with suppress(OSError):
                pipe.send(number)
        return self._answers()

    def _answers(self) -> list[Any]:
        answers: dict[int, Any] = {}
        deadline = time.monotonic() + self.patience_s
        while len(answers) < len(self._pipes):
            waiting = [rank for rank in range(len(self._pipes)) if rank not in answers]
            left = deadline - time.monotonic()
            ready = wait([self._pipes[rank] for rank in waiting], max(0.0, left))
            if not ready:
                raise WorldEnded("hang", self._where(waiting))
            for rank in waiting:
                if self._pipes[rank] in ready:
                    try:
                        answers[rank] = self._pipes[rank].recv()
                    except (EOFError, OSError):
                        raise WorldEnded("crash", self._how_it_ended(rank)) from None
        return [answers[rank] for rank in range(len(self._pipes))]

    def _where(self, ranks: list[int]) -> str:
        for rank in ranks:
            pid = self.processes[rank].pid
            assert pid is not None
            os.kill(pid, signal.SIGUSR1)
        time.sleep(_DUMP_S)
        return "\n".join(f"rank {rank} answers nothing\n{self._log(rank)}" for rank in ranks)

    def _how_it_ended(self, rank: int) -> str:
        self.processes[rank].join(10)
        return f"rank {rank} ended with {self.processes[rank].exitcode}\n{self._log(rank)}"

    def _log(self, rank: int) -> str:
        return self._logs[rank].read_text(errors="replace")[-6000:]

    def close(self) -> None:
        for pipe in self._pipes:
            with suppress(OSError):
                pipe.send(None)
        for process in self.processes:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()
        self._stack.close()


def _logged(path: str, *arguments: Any) -> None:
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    run(*arguments)
