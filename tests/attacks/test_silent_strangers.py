"""Strangers connect by the thousands, prove nothing, and come again when they are thrown out."""

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
    """All of them, and all workers, have one source address."""
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
    """The test's timeout ends a wait."""
    met = False
    while not met:
        time.sleep(0.01)
        with contextlib.suppress(OSError):  # there may be no descriptor to look with
            met = condition()


@pytest.mark.threat("S8")
def test_strangers_that_use_up_the_descriptors_give_them_back(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The script has opened so many files that the listener's bound is more than what is left."""
    monkeypatch.setattr(arrivals, "limits", lambda *_: (MOST_SILENT, MOST_GREETING))
    # Enough for the silent connections that always have room, and for the group; not for all.
    most = descriptors_in_use() + 150
    with world(2, timeout=60.0) as mesh:
        mesh.start(0)  # with room for far more strangers than there will be descriptors
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
