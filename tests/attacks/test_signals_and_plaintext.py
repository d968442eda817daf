"""A process that is ended by a signal while it writes plaintext leaves none of it behind."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from sealring.vault.files import unfinished

CODE = """
import os, shutil, signal, sys
from pathlib import Path
from sealring.vault.files import unfinished

first, later, when = int(sys.argv[2]), [int(one) for one in sys.argv[3].split()], sys.argv[4]
real = shutil.rmtree

def rmtree(path, **others):
    for one in later:
        os.kill(os.getpid(), one)
    real(path, **others)
    print("removed", flush=True)

shutil.rmtree = rmtree
with unfinished(Path(sys.argv[1])) as output:
    output.write_text("plaintext")
    if when == "while it is written":
        os.kill(os.getpid(), first)
    elif when == "after an error":
        raise ValueError("not an end of the process")
print("went on", flush=True)
"""
ENDING = [
    signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2,
    signal.SIGALRM, signal.SIGVTALRM, signal.SIGPROF, signal.SIGXCPU, signal.SIGIO,
]  # fmt: skip
STATUS = {signal.SIGINT: -signal.SIGINT}


def run(out: Path, first: int, later: Sequence[int], when: str) -> Any:
    command = [sys.executable, "-c", CODE, str(out), str(int(first))]
    command += [" ".join(str(int(one)) for one in later), when]
    return subprocess.run(command, capture_output=True, timeout=60, check=False)


@pytest.mark.parametrize("first", ENDING, ids=[one.name for one in ENDING])
@pytest.mark.threat("V43")
def test_every_signal_that_ends_a_process(first: signal.Signals, tmp_path: Path) -> None:
    done = run(tmp_path / "out", first, ENDING, "while it is written")
    assert list(tmp_path.iterdir()) == []
    assert done.stdout == b"removed\n"
    assert done.returncode == STATUS.get(first, 128 + first)


@pytest.mark.parametrize("when", ["when it is finished", "after an error"])
@pytest.mark.threat("V43")
def test_signals_while_it_is_removed(when: str, tmp_path: Path) -> None:
    """Signals that come during the removal end the process after it."""
    done = run(tmp_path / "out", 0, [signal.SIGTERM, signal.SIGINT, signal.SIGHUP], when)
    assert list(tmp_path.iterdir()) == []
    assert done.stdout == b"removed\n"
    assert done.returncode == 128 + signal.SIGTERM


def test_handlers_are_as_before(tmp_path: Path) -> None:
    before = {one: signal.getsignal(one) for one in ENDING}
    with unfinished(tmp_path / "out"):
        assert signal.getsignal(signal.SIGTERM) != before[signal.SIGTERM]
    with pytest.raises(KeyboardInterrupt), unfinished(tmp_path / "out"):  # noqa: PT012
        os.kill(os.getpid(), signal.SIGINT)
        shutil.rmtree(tmp_path)  # not reached
    assert {one: signal.getsignal(one) for one in ENDING} == before
