"""A script's signal handler runs while its thread waits in a collective or a message.

Python runs the handler on that thread, inside the wait. Calls of the group in the handler must
therefore not wait for the thread.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from sealring.core.settings import usable_cores, with_settings
from sealring.errors import GroupClosed, GroupError, Unsupported
from tests.workers import Workers

LARGE = (5 << 20) // 4
"""Elements of a tensor that is large enough for several lanes."""


class Terminated(Exception):
    """The handler raises this at its end."""


def do(what: str) -> None:
    tensor = torch.ones(LARGE if what == "laned" else 100)
    if what == "recv":
        dist.recv(tensor, 1)
    else:
        dist.all_reduce(tensor)


ACTIONS: dict[str, Callable[[Any], object]] = {
    "destroys": lambda _: dist.destroy_process_group(),
    "aborts": lambda group: group.abort(),
    "calls": lambda _: dist.all_reduce(torch.ones(3)),
    "sends": lambda _: dist.send(torch.ones(3), 1),
}


def in_turn(*calls: Callable[[], object]) -> None:
    """Runs the calls in turn: the first may still succeed before the news of the closed group."""
    for call in calls:
        call()


def handled(rank: int, world: int, what: str, action: str) -> str:
    group: Any = dist.group.WORLD
    store = distributed_c10d._get_default_store()
    for _ in range(2):  # the second call is prepared, and makes lanes if there are any
        dist.all_reduce(torch.ones(LARGE if what == "laned" else 100))
    if rank == 1:
        if action == "sends":
            dist.recv(torch.ones(3), 0)
        store.wait(["handled"])
        with pytest.raises(GroupError) as told:
            in_turn(lambda: do("small"), dist.barrier)
        return "was told" if told.value.peer in (0, None) else str(told.value)

    def handler(*_: object) -> None:
        ACTIONS[action](group)
        raise Terminated

    signal.signal(signal.SIGTERM, handler)
    try:
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM)).start()
        refused = action == "calls" and what != "recv"
        with pytest.raises(Unsupported if refused else Terminated):
            do(what)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    store.set("handled", "")
    with pytest.raises((GroupError, GroupClosed)):
        group.allreduce([torch.ones(100)]).wait()
    return "ended"


@pytest.mark.parametrize(
    ("what", "action"),
    [
        ("small", "destroys"),
        ("small", "aborts"),
        ("small", "calls"),
        ("small", "sends"),
        ("laned", "destroys"),
        ("laned", "calls"),
        ("recv", "destroys"),
        ("recv", "sends"),
    ],
)
def test_a_handler_that_uses_the_group_does_not_wait_for_its_own_thread(
    workers: Workers, what: str, action: str
) -> None:
    lanes = with_settings({}, threads=2) if what == "laned" and usable_cores() > 1 else {}
    # The group is used for this test only, because the handler ends it.
    env = {"SEALRING_TRANSPORT": "tcp", "CASE": f"{what} {action}", **lanes}
    assert workers.run(handled, what, action, world=2, env=env) == ["ended", "was told"]
