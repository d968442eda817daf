"""Thousands of unauthenticated strangers connect, and connect again when they are closed."""

from __future__ import annotations

import contextlib
import os
import resource
import time
from collections.abc import Callable, Iterator

import pytest

from sealring.core.links import arrivals
from sealring.core.links.arrivals import MOST_GREETING, MOST_SILENT
from tests.attacks.strangers import strangers
from tests.core.links.test_mesh import assert_linked
from tests.core.links.worlds import world


@pytest.mark.threat("S7")
def test_a_group_forms_among_thousands_of_silent_and_slow_strangers() -> None:
    """All strangers and all workers have one source address."""
    with world(4, timeout=60.0) as mesh:
        mesh.start(0)
        with strangers(mesh.store.address(0)):
            for rank in (1, 2, 3):
                mesh.start(rank)
            mesh.join()
        assert_linked(mesh)


def descriptors_in_use() -> int:
    return len(os.listdir("/proc/self/fd"))


@contextlib.contextmanager
def at_most_descriptors(most: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def wait_until(condition: Callable[[], bool]) -> None:
    """Polls until the condition holds; only the test's own timeout limits this."""
    met = False
    while not met:
        time.sleep(0.01)
        with contextlib.suppress(OSError):  # no descriptor may be free for the check
            met = condition()


@pytest.mark.threat("S8")
def test_strangers_that_use_up_the_descriptors_give_them_back(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The script has opened many files, so fewer descriptors are left than the listener's limit."""
    monkeypatch.setattr(arrivals, "limits", lambda *_: (MOST_SILENT, MOST_GREETING))
    # Enough for the group and for the silent connections that always have room, but not for all.
    most = descriptors_in_use() + 150
    with world(2, timeout=60.0) as mesh:
        mesh.start(0)  # rank 0 would admit far more strangers than there are descriptors
        with (
            strangers(mesh.store.address(0), silent=400, slow=0, stalling=0),
            at_most_descriptors(most),
        ):
            # How soon the kernel hands over silent connections differs between machines.
            wait_until(lambda: "a connection cannot be taken: [Errno 24]" in caplog.text)
            wait_until(lambda: most - descriptors_in_use() >= 50)
            mesh.start(1)
            mesh.join()
        assert_linked(mesh)
