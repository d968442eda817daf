"""Runs all tests in parts, several at a time, because tests often wait for a fault or a worker.

    python tools/run_tests.py [COMMAND ...]

A part is a pytest process with some test files, or one of the commands. As many parts run as there
are cores, and up to twice as many while the cores are idle. Long parts come first, so that all end
at about the same time. Prints a line for each part that has ended, with its elapsed and CPU
seconds, and at the end the whole output of the parts that failed. The output of every part is kept
in build/tests/. The tests of each part write to a separate folder, because two pytests that share
one delete each other's files.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOGS = ROOT / "build" / "tests"
MOST_FILES = 16
"""The most test files in a part. Each part costs some seconds to start Python, torch and
workers."""
LOOK_S = 3.0
"""If half a core is idle for this long, more parts than cores are started."""
LONG = (
    "chaos",
    "conformance",
    "examples",
    "containers",
    "constant_time",
    "sealed_only",
    "fuzz_api",
)
"""Folders whose tests take longer than the length of their code suggests. They come first."""


@dataclass(frozen=True)
class Part:
    name: str
    command: list[str]
    weight: float
    pytest: bool = False


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("command", nargs="*")
    given = parser.parse_args()
    LOGS.mkdir(parents=True, exist_ok=True)
    commands = [Part(text, shlex.split(text), float("inf")) for text in given.command]
    parts = sorted([*commands, *test_parts()], key=lambda part: -part.weight)
    return Running(parts, len(os.sched_getaffinity(0))).run()


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
            yield Part(name, [sys.executable, "-m", "pytest", *names], weight, pytest=True)


class Running:
    def __init__(self, parts: list[Part], cores: int) -> None:
        self._parts, self._cores = parts, cores
        self._done = 0
        self._changed = threading.Condition()
        self._processes: set[subprocess.Popen[bytes]] = set()
        self._failed: list[Path] = []

    def run(self) -> int:
        began = time.monotonic()
        try:
            with self._changed:
                for part in self._parts:
                    self._wait_for_a_core()
                    self._start(part)
                while self._processes:
                    self._changed.wait()
        except BaseException:
            for process in self._processes:
                process.terminate()
            raise
        for log in self._failed:
            print(f"\n---- {log.relative_to(ROOT)}", flush=True)
            sys.stdout.buffer.write(log.read_bytes())
            sys.stdout.flush()
        count, took = len(self._parts), time.monotonic() - began
        print(f"{count - len(self._failed)} of {count} parts passed in {took:.0f} s")
        return 1 if self._failed else 0

    def _wait_for_a_core(self) -> None:
        while len(self._processes) >= self._cores:
            idle = _idle_s()
            if self._changed.wait(LOOK_S) or len(self._processes) >= 2 * self._cores:
                continue
            if _idle_s() - idle > LOOK_S / 2:
                return

    def _start(self, part: Part) -> None:
        log = LOGS / (part.name.replace("/", "-").replace(" ", "-") + ".log")
        files = Path(tempfile.mkdtemp(prefix="tests-"))
        option = [f"--basetemp={files}"] if part.pytest else []
        with log.open("wb") as output:
            process = subprocess.Popen(
                [*part.command, *option],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=_environment(),
            )
        self._processes.add(process)
        ended = (part, process, log, files, time.monotonic())
        threading.Thread(target=self._await_end, args=ended, daemon=True).start()

    def _await_end(
        self, part: Part, process: subprocess.Popen[bytes], log: Path, files: Path, began: float
    ) -> None:
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        shutil.rmtree(files, ignore_errors=True)
        took, cpu = time.monotonic() - began, used.ru_utime + used.ru_stime
        last = log.read_text(errors="replace").strip().rpartition("\n")[2]
        with self._changed:
            self._processes.discard(process)
            self._done += 1
            # pytest's exit status 5: no test was selected.
            passed = process.returncode in (0, 5)
            if not passed:
                self._failed.append(log)
            print(
                f"[{self._done}/{len(self._parts)}] {'ok' if passed else 'failed':6} "
                f"{took:4.0f} s, CPU {cpu:4.0f} s  {part.name}: {last[:80]}",
                flush=True,
            )
            self._changed.notify()


def _idle_s() -> float:
    """The seconds since boot that this process's cores were idle or waited for a disk."""
    ours = {f"cpu{number}" for number in os.sched_getaffinity(0)}
    lines = (line.split() for line in Path("/proc/stat").read_text().splitlines())
    ticks = sum(int(fields[4]) + int(fields[5]) for fields in lines if fields[0] in ours)
    return ticks / os.sysconf("SC_CLK_TCK")


def _environment() -> dict[str, str]:
    """The environment in which Python caches compiled files, since many processes import them."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


if __name__ == "__main__":
    sys.exit(main())
