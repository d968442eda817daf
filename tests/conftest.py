from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest

from tests.workers import Workers

# Background jobs of a shell ignore SIGINT and SIGQUIT, nohup ignores SIGHUP; children inherit this.
signal.signal(signal.SIGINT, signal.default_int_handler)
for _ignored in (signal.SIGQUIT, signal.SIGHUP):
    signal.signal(_ignored, signal.SIG_DFL)

# numpy warns of a cast whose result depends on the CPU. pytest turns warnings into errors only in
# its own process; this does it in processes that tests start, for these warnings alone.
os.environ["PYTHONWARNINGS"] = ",".join(
    f"error:{what} encountered in cast:RuntimeWarning" for what in ("invalid value", "overflow")
)


@pytest.fixture(scope="session")
def workers() -> Iterator[Workers]:
    """Four worker processes for the whole session."""
    started = Workers(4)
    yield started
    started.close()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m,nr_inodes=500,mode=0700", "tmpfs", str(folder)]
    try:
        subprocess.run(mount, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as problem:
        pytest.skip(f"a file system cannot be mounted here: {problem}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def pytest_unconfigure() -> None:
    """Waits for the process from which workers are forked, whose CPU time counts as this one's."""
    server: Any = forkserver._forkserver
    server._stop()
