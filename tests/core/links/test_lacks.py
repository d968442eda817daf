"""Workers that run out of a system resource while their group forms."""

from __future__ import annotations

import errno
import itertools
import os
import resource
import socket
import threading
from typing import Any

import numpy as np
import pytest

from sealring.core.engine.engine import CollectiveEngine
from sealring.core.links import explain_resource_limits, setting_up, threads
from sealring.core.schedule import Algorithm
from sealring.errors import ConfigurationError, PeerUnreachable
from sealring.lab.bench import forming
from sealring.lab.bench.forming import LightGroup
from tests.core.links.teams import SIZE, Team, team


def formed_with(free: int) -> list[Any]:
    """Returns what two workers get while this process may open only so many more files."""
    with team(2, formed=False) as one:
        one.all(lambda rank: None)  # starts the team's threads
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        there = len(os.listdir("/proc/self/fd")) - 1
        resource.setrlimit(resource.RLIMIT_NOFILE, (there + free, limits[1]))
        try:
            return [
                made[0] if isinstance(made, tuple) else type(made)
                for made in one.form(timeout_s=1.0)
            ]
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_whatever_descriptor_is_missing_the_error_has_a_name() -> None:
    """Allows ever more descriptors, until a group can form."""
    found = [formed_with(free) for free in range(0, 24, 2)]
    assert set(itertools.chain(*found)) == {
        "configuration",
        "handshake.peer_unreachable",
        LightGroup,
    }
    assert found[-1] == [LightGroup] * 2


def refused(one: Team, rank: int) -> str:
    with pytest.raises(ConfigurationError) as caught:
        one.workers[rank].form("default", range(one.size), timeout_s=1.0)
    return str(caught.value)


@pytest.mark.parametrize(
    ("raised", "comes_out"),
    [
        (OSError(errno.ENOMEM, "x"), ConfigurationError),
        (TimeoutError("the store does not answer"), TimeoutError),
        (RuntimeError("another one"), RuntimeError),
    ],
)
def test_only_a_lack_gets_another_name(raised: Exception, comes_out: type[Exception]) -> None:
    with pytest.raises(comes_out) as caught, explain_resource_limits():
        raise raised
    assert (caught.value is raised) is (comes_out is not ConfigurationError)


def test_no_thread_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with team(2, formed=False) as one:
        monkeypatch.setattr(threads, "idle", [])
        monkeypatch.setattr(threads, "_shared", threads.ListeningThread())
        monkeypatch.setattr(threading.Thread, "start", start)
        said = refused(one, 0)
        monkeypatch.undo()
    assert said == (
        "this worker cannot form a group (can't start new thread): raise this user's limit of "
        "processes (ulimit -u), or the container's"
    )


def test_a_worker_that_cannot_make_its_engine_is_lost_to_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain = CollectiveEngine

    def engine(rank: int, *args: Any, **kwargs: Any) -> Any:
        if rank == 3:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return plain(rank, *args, **kwargs)

    monkeypatch.setattr(forming, "CollectiveEngine", engine)
    with team(formed=False) as one:
        assert one.form()[3] == ("configuration", None)
        assert len(one.groups) == SIZE - 1

        def call(number: int) -> None:
            values = np.ones(5000, dtype=np.float32)
            one.groups[number].all_reduce(values, Algorithm.RING, timeout_s=30.0)

        assert set(one.all(call, SIZE - 1)) == {("group.peer_lost", 3)}


def test_a_worker_that_cannot_take_connections_says_so_when_its_time_is_up() -> None:
    """Otherwise its error would point the user to the other ranks and to the network."""

    def accept(listening: socket.socket) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with pytest.MonkeyPatch.context() as patch, team(2, formed=False) as one:
        patch.setattr(setting_up, "accept", accept)
        told: list[str] = []

        def form(rank: int) -> None:
            try:
                one.workers[rank].form("default", range(2), timeout_s=2.0)
            except PeerUnreachable as error:
                told.append(str(error))

        one.all(form)
    assert len(told) == 2
    why = "a connection could not be taken here (Too many open files): raise this process's limit"
    assert sum(why in each for each in told) == 1
