"""Strangers connect by the thousands, prove nothing, and come again when they are thrown out."""

from __future__ import annotations

import contextlib
import os
import resource
import time
from collections.abc import Iterator

from tests.attacks.strangers import strangers
from tests.links.test_mesh import assert_linked
from tests.links.worlds import world


def test_a_group_forms_among_thousands_of_silent_and_slow_strangers() -> None:
    """All of them, and all workers, have one source address."""
    with world(4, timeout=60.0) as mesh:
        mesh.start(0)
        with strangers(mesh.store.address(0)):
            for rank in (1, 2, 3):
                mesh.start(rank)
            mesh.join()
        assert_linked(mesh)


@contextlib.contextmanager
def few_descriptors(free: int) -> Iterator[None]:
    """As if the process had all but these in use."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(fd) for fd in os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + free, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def wait_until_free(descriptors: int) -> None:
    """Returns when this process may open so many more files; the test's timeout ends a wait."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = 0
    while free < descriptors:
        time.sleep(0.01)
        with contextlib.suppress(OSError):  # there is not even one to look with
            free = limit - len(os.listdir("/proc/self/fd"))


def test_strangers_that_use_up_the_descriptors_give_them_back() -> None:
    with world(2, timeout=60.0) as mesh:
        mesh.start(0)  # with room for far more strangers than there will be descriptors
        with strangers(mesh.store.address(0), silent=300, slow=0, stalling=0), few_descriptors(10):
            wait_until_free(50)
            mesh.start(1)
            mesh.join()
        assert_linked(mesh)
