"""A process that imports torch and its suite once, and forks a world of ranks for every case.

A fresh interpreter per rank takes seconds to import torch; a fork takes milliseconds, and starts
from the same state: the host makes no group, no thread and no tensor. It reads the names of the
cases from stdin and writes one JSON line per outcome to stdout.

    python -m tests.conformance.host BACKEND WORLD LIKE JOBS SECONDS
"""

from __future__ import annotations

import json
import os
import re
import secrets
import selectors
import shutil
import signal
import sys
import tempfile
import time
from collections import deque
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from tests.conformance.evidence import added
from tests.conformance.outcome import Evidence, Outcome
from tests.conformance.rank import run_rank
from tests.conformance.suite import Suite

GRACE_S = 5.0
"""How long the other ranks may go on after one has failed, to say what they saw."""
OUTPUT_BYTES = 8000


class World:
    """The ranks of one case, from their start to the outcome."""

    def __init__(self, suite: Suite, case: str, limit_s: float) -> None:
        self.case = case
        self._suite = suite
        self._folder = Path(tempfile.mkdtemp(prefix="sealring-conformance-"))
        for name in ("barrier", "test_dir", "init_dir"):
            (self._folder / name).mkdir()
        self._started = time.monotonic()
        self._limit_s = limit_s
        self.deadline = self._started + limit_s
        self._hung = False
        self._codes: dict[int, int | None] = {}
        """By rank; None of one that had to be ended."""
        self._running: dict[int, int] = {}
        self.watched: list[int] = []
        for rank in range(suite.world):
            pid = os.fork()
            if pid == 0:
                run_rank(suite, case, rank, self._folder)
            self._running[pid] = rank
            self.watched.append(os.pidfd_open(pid))

    @property
    def over(self) -> bool:
        return not self._running

    def look(self) -> None:
        """Takes the ranks that have ended; ends the rest when their time is up."""
        for pid in list(self._running):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                rank = self._running.pop(pid)
                self._codes[rank] = os.waitstatus_to_exitcode(status)
                self._end_session(pid)
                if self._codes[rank] not in (0, *_skip_messages()):
                    self.deadline = min(self.deadline, time.monotonic() + GRACE_S)
        if self._running and time.monotonic() >= self.deadline:
            self._end()

    def _end(self) -> None:
        self._hung = not any(self._codes.values())
        for pid in self._running:
            os.kill(pid, signal.SIGUSR1)
        time.sleep(0.5)
        self.kill()

    def kill(self) -> None:
        for pid, rank in self._running.items():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            self._end_session(pid)
            self._codes[rank] = None
        self._running.clear()

    @staticmethod
    def _end_session(pid: int) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)

    def outcome(self) -> Outcome:
        for descriptor in self.watched:
            os.close(descriptor)
        outcome = replace(
            self._judged(),
            seconds=round(time.monotonic() - self._started, 3),
            evidence=added([self._evidence(rank) for rank in self._codes]),
        )
        shutil.rmtree(self._folder, ignore_errors=True)
        return outcome

    def _judged(self) -> Outcome:
        passed = Outcome(self.case, self._suite.world, "passed")
        codes = {self._codes[rank] for rank in range(self._suite.world)}
        if codes == {0}:
            return passed
        # Skipped only where every rank says so, for one reason.
        if len(codes) == 1 and (code := codes.pop()) in (messages := _skip_messages()):
            reasons = {self._own_reason(rank) or messages[code] for rank in self._codes}
            if len(reasons) == 1:
                return replace(passed, verdict="skipped", reason=reasons.pop())
        ends = ", ".join(
            f"rank {rank} {_in_words(self._codes[rank])}" for rank in sorted(self._codes)
        )
        reason = f"no end after {self._limit_s:g} s; {ends}" if self._hung else ends
        if said := [error for rank in sorted(self._codes) if (error := self._error(rank))]:
            reason = f"{said[0]} ({reason})"
        output = {str(rank): self._output(rank) for rank in sorted(self._codes)}
        return replace(passed, verdict="failed", reason=reason, output=output)

    def _output(self, rank: int) -> str:
        with suppress(OSError):
            text = (self._folder / f"rank{rank}.log").read_bytes()[-OUTPUT_BYTES:]
            return text.decode(errors="replace").strip()
        return ""

    def _error(self, rank: int) -> str | None:
        """The last exception in what the rank printed, without the log's own words before it."""
        found = re.findall(
            r"^(?:\[rank\d+\].*?\] )?((?:\w+\.)*[A-Z]\w+: .*)", self._output(rank), re.M
        )
        return found[-1] if found else None

    def _own_reason(self, rank: int) -> str | None:
        found = re.search(r"skipping test \S+ for following reason: (.*)", self._output(rank))
        return found[1] if found else None

    def _evidence(self, rank: int) -> Evidence:
        with suppress(OSError, ValueError):
            return Evidence(**json.loads((self._folder / f"rank{rank}.json").read_text()))
        return Evidence()


def _in_words(code: int | None) -> str:
    if code is None:
        return "was still running and was ended"
    if code < 0:
        return f"died of {signal.Signals(-code).name}"
    return "passed" if code == 0 else f"failed (exit status {code})"


def _skip_messages() -> dict[int | None, str]:
    from torch.testing._internal.common_distributed import TEST_SKIPS

    return {skip.exit_code: skip.message for skip in TEST_SKIPS.values()}


def run_cases(suite: Suite, cases: list[str], jobs: int, limit_s: float) -> None:
    waiting, worlds = deque(cases), list[World]()
    selector = selectors.DefaultSelector()
    try:
        while waiting or worlds:
            while waiting and len(worlds) < jobs:
                case = waiting.popleft()
                if (reason := suite.skip_reason(case)) is not None:
                    _tell(Outcome(case, suite.world, "skipped", reason))
                    continue
                worlds.append(world := World(suite, case, limit_s))
                for descriptor in world.watched:
                    selector.register(descriptor, selectors.EVENT_READ, descriptor)
            if not worlds:
                break
            soonest = min(world.deadline for world in worlds)
            for key, _ in selector.select(max(0.0, soonest - time.monotonic())):
                selector.unregister(key.fileobj)
            for world in list(worlds):
                world.look()
                if world.over:
                    worlds.remove(world)
                    for descriptor in world.watched:
                        with suppress(KeyError):
                            selector.unregister(descriptor)
                    _tell(world.outcome())
    finally:
        for world in worlds:
            world.kill()


def _tell(outcome: Outcome) -> None:
    print(json.dumps(outcome.as_json()), flush=True)


def main() -> None:
    backend, world, like, jobs, limit_s = sys.argv[1:]
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = "1"
    os.environ.update(SEALRING_SECRET=secrets.token_hex(32), SEALRING_JOB="conformance")
    suite = Suite(backend, int(world), like)
    import sealring.core.group.create  # noqa: F401  (before the forks, so that none has to)

    names = suite.cases()
    print(json.dumps({"cases": names}), flush=True)
    wanted = json.loads(sys.stdin.readline())
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    run_cases(suite, wanted, int(jobs), float(limit_s))


if __name__ == "__main__":
    main()
