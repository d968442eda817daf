"""Runs all tests in parts, several at a time: much of a test is waiting, for a fault or a worker.

    python tools/run_tests.py [--lanes N] [COMMAND ...]

A part is some test files in a pytest of their own, or one of the commands. Long parts come first,
so that all lanes end at about the same time. Prints a line for each part that has ended, and the
whole output of those that failed at the end. The output of every part stays in build/tests/.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOGS = ROOT / "build" / "tests"
MOST_FILES = 9
"""Of one part, which costs some seconds more than its tests: it starts Python, torch, workers."""
LONG = ("chaos",)
"""Run for a fixed time, which the length of the code does not show."""


@dataclass(frozen=True)
class Part:
    name: str
    command: list[str]
    weight: float


def main() -> int:
    parser = argparse.ArgumentParser()
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--lanes", type=int, default=min(max(cores, 2), 4))
    parser.add_argument("command", nargs="*")
    given = parser.parse_args()
    LOGS.mkdir(parents=True, exist_ok=True)
    commands = [Part(text, shlex.split(text), float("inf")) for text in given.command]
    parts = sorted([*commands, *test_parts()], key=lambda part: -part.weight)
    return Lanes(parts).run(given.lanes)


def test_parts() -> Iterator[Part]:
    folders: dict[Path, list[Path]] = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        folders.setdefault(path.relative_to(ROOT / "tests").parent, []).append(path)
    for folder, files in folders.items():
        count = -(-len(files) // MOST_FILES)
        for number in range(count):
            chosen = files[number::count]
            name = str(Path("tests") / folder) + (
                f" ({number + 1} of {count})" if count > 1 else ""
            )
            lines = sum(len(path.read_text().splitlines()) for path in chosen)
            weight = float("inf") if folder.name in LONG else float(lines)
            names = [str(path.relative_to(ROOT)) for path in chosen]
            yield Part(name, [sys.executable, "-m", "pytest", *names], weight)


class Lanes:
    def __init__(self, parts: list[Part]) -> None:
        self._waiting = iter(parts)
        self._count, self._done = len(parts), 0
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[bytes]] = set()
        self._failed: list[Path] = []

    def run(self, lanes: int) -> int:
        threads = [threading.Thread(target=self._lane, daemon=True) for _ in range(lanes)]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                thread.join()
        except BaseException:
            for process in self._running:
                process.terminate()
            raise
        for log in self._failed:
            print(f"\n---- {log.relative_to(ROOT)}", flush=True)
            sys.stdout.buffer.write(log.read_bytes())
            sys.stdout.flush()
        print(f"{self._count - len(self._failed)} of {self._count} parts passed")
        return 1 if self._failed else 0

    def _lane(self) -> None:
        while True:
            with self._lock:
                part = next(self._waiting, None)
            if part is None:
                return
            self._one(part)

    def _one(self, part: Part) -> None:
        log = LOGS / (part.name.replace("/", "-").replace(" ", "-") + ".log")
        began = time.monotonic()
        with log.open("wb") as output:
            process = subprocess.Popen(
                part.command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=output, stderr=output
            )
            self._running.add(process)
            status = process.wait()
        took = time.monotonic() - began
        last = log.read_text(errors="replace").strip().rpartition("\n")[2]
        with self._lock:
            self._running.discard(process)
            self._done += 1
            # pytest's 5: all of its tests were left out.
            if status not in (0, 5):
                self._failed.append(log)
            word = "failed" if log in self._failed else "ok"
            print(f"[{self._done}/{self._count}] {word:6} {took:5.0f} s  {part.name}: {last[:80]}",
                  flush=True)  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
