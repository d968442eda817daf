"""A sealed-only script that starts children in ways that lose SEALRING_ONLY.

Each child asks for Gloo. The script prints the group that each child got, by the way in which the
child was started.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

CHILD = Path(__file__).with_name("child.py")
PYTHON = sys.executable
WITHOUT = {name: value for name, value in os.environ.items() if name != "SEALRING_ONLY"}


def popen(*command: object, **options: Any) -> Callable[[Path], Any]:
    return lambda answer: subprocess.run([*map(str, command), answer], check=True, **options)


def shell(command: str, **options: Any) -> Callable[[Path], Any]:
    return lambda answer: subprocess.run(f"{command} {answer}", shell=True, check=True, **options)


def system(command: str) -> Callable[[Path], Any]:
    return lambda answer: os.system(f"{command} {answer}")


def spawned_by_posix(answer: Path) -> None:
    os.waitpid(os.posix_spawn(PYTHON, [PYTHON, str(CHILD), str(answer)], WITHOUT), 0)


def spawned_with_default_signals(answer: Path) -> None:
    command = [PYTHON, str(CHILD), str(answer)]
    os.waitpid(os.posix_spawn(PYTHON, command, WITHOUT, setsigdef=range(1, 65)), 0)


def spawned_by_os(answer: Path) -> None:
    os.spawnve(os.P_WAIT, PYTHON, [PYTHON, str(CHILD), str(answer)], WITHOUT)


def executed(answer: Path) -> None:
    if (child := os.fork()) == 0:
        os.execve(PYTHON, [PYTHON, str(CHILD), str(answer)], WITHOUT)
    os.waitpid(child, 0)


def of_multiprocessing(method: str) -> Callable[[Path], None]:
    def started(answer: Path) -> None:
        from tests.core.sealed_only.child import main

        before = os.environ.copy()
        os.environ.clear()  # accelerate empties the environment for a while, too
        os.environ["PYTHONPATH"] = before["PYTHONPATH"]
        try:
            context: Any = multiprocessing.get_context(method)
            process = context.Process(target=main, args=(answer,))
            process.start()
            process.join()
        finally:
            os.environ.update(before)

    return started


def daemon(answer: Path) -> None:
    """Starts a daemon whose parent is gone before the daemon imports torch."""
    inner = f"sleep 1; exec env -u SEALRING_ONLY {PYTHON} {CHILD} {answer}"
    subprocess.run(["setsid", "sh", "-c", f"({inner}) &"], env=WITHOUT, check=True)


WAYS: dict[str, Callable[[Path], Any]] = {
    "a shell": shell(f"{PYTHON} {CHILD}", env=WITHOUT),
    "a shell's assignment": system(f"SEALRING_ONLY= {PYTHON} {CHILD}"),
    "a shell's 0": system(f"SEALRING_ONLY=0 {PYTHON} {CHILD}"),
    "env -u": popen("env", "-u", "SEALRING_ONLY", PYTHON, CHILD),
    "env -i": popen("env", "-i", PYTHON, CHILD),
    "torchrun": popen(Path(PYTHON).with_name("torchrun"), "--standalone", CHILD, env=WITHOUT),
    "posix_spawn": spawned_by_posix,
    "default signals": spawned_with_default_signals,
    "os.spawnve": spawned_by_os,
    "os.execve": executed,
    "spawn": of_multiprocessing("spawn"),
    "forkserver": of_multiprocessing("forkserver"),
    "a daemon": daemon,
}


def main(names: list[str]) -> None:
    if "a server that had loaded torch" in names:
        multiprocessing.set_forkserver_preload(["torch"])
        forkserver.ensure_running()
        WAYS["a server that had loaded torch"] = of_multiprocessing("forkserver")
    import sealring

    sealring.require_sealed()
    got = {}
    with tempfile.TemporaryDirectory() as folder:
        for number, name in enumerate(names):
            answer = Path(folder, str(number))
            WAYS[name](answer)
            while not answer.exists():  # the daemon's answer comes later
                time.sleep(0.1)
            got[name] = answer.read_text()
    print("GOT", json.dumps(got), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
