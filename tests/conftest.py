from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from multiprocessing import forkserver
from typing import Any

import pytest

from tests.workers import Workers

# A shell's background jobs ignore SIGINT and SIGQUIT, and nohup SIGHUP, as do their children.
signal.signal(signal.SIGINT, signal.default_int_handler)
for _ignored in (signal.SIGQUIT, signal.SIGHUP):
    signal.signal(_ignored, signal.SIG_DFL)

# numpy warns of a cast whose result depends on the CPU. pytest makes errors of warnings in its own
# process; this does it in those that tests start. Their other warnings are not ours to judge.
os.environ["PYTHONWARNINGS"] = ",".join(
    f"error:{what} encountered in cast:RuntimeWarning" for what in ("invalid value", "overflow")
)


@pytest.fixture(scope="session")
def workers() -> Iterator[Workers]:
    """Four worker processes for the whole session."""
    started = Workers(4)
    yield started
    started.close()


def pytest_unconfigure() -> None:
    """Awaits the process that the workers are forked from: its CPU seconds count as this one's."""
    server: Any = forkserver._forkserver
    server._stop()
