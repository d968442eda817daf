"""A forked child of a worker holds a copy of the worker's memory and of its connections.

With the copied keys and nonces the child could speak in the worker's name and seal under nonces
that the worker uses too. Every data loader with worker processes forks.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import signal
import socket
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist

import sealring
from sealring.core.links.link import prepare_socket
from sealring.errors import PeerLost
from tests.attacks.children import CLONE, bare_fork, in_child
from tests.workers import Workers


def total(value: float) -> float:
    tensor = torch.full((5000,), value)
    dist.all_reduce(tensor)
    assert bool((tensor == tensor[0]).all())
    return float(tensor[0])


def message() -> None:
    dist.send(torch.ones(3), dst=1)


def calls(store: Any) -> dict[str, Callable[[], object]]:
    group = dist.group.WORLD
    assert group is not None
    return {
        "all_reduce": lambda: total(7),
        "broadcast": lambda: dist.broadcast(torch.ones(3), src=0),
        "asynchronous": lambda: dist.all_reduce(torch.ones(3), async_op=True),
        "barrier": dist.barrier,
        "monitored": lambda: dist.monitored_barrier(group),
        "send": message,
        "receive": lambda: dist.recv(torch.ones(3), src=1),
        "account": lambda: group.account(),  # type: ignore[attr-defined]
        "store set": lambda: store.set("name", "value"),
        "store get": lambda: store.get("name"),
    }


def child_speaks(rank: int, world: int) -> tuple[str, list[float]]:
    """Rank 1 is in the collective that rank 0's child calls; it must not take the child's data."""
    before = total(rank + 1)
    said = in_child(lambda: total(7)) if rank == 0 else ""
    return said, [before, total(rank + 1), total(rank + 1)]


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.threat("K18")
def test_a_forked_child_calls_a_collective(workers: Workers, transport: str) -> None:
    (zero, one) = workers.run(child_speaks, env={"SEALRING_TRANSPORT": transport})
    assert one == ("", [3.0, 3.0, 3.0])
    assert zero == ("ForkedProcess", [3.0, 3.0, 3.0])


def child_calls(rank: int, world: int) -> tuple[dict[str, str], float]:
    store = sealring.sealed_store()
    store.set("name", "value")
    said = {}
    if rank == 0:
        said = {name: in_child(call) for name, call in calls(store).items()}
        store.set("after", "the child")
    assert store.get("after") == b"the child"
    return said, total(rank + 1)


@pytest.mark.threat("K18")
def test_a_forked_child_calls_anything_else(workers: Workers) -> None:
    (said, zero), (_, one) = workers.run(child_calls)
    assert set(said.values()) == {"ForkedProcess"}, said
    assert (zero, one) == (3.0, 3.0)


def child_waits(rank: int, world: int) -> tuple[str, float]:
    """The child inherits an operation that only a thread of its parent could finish."""
    tensor = torch.ones(4)
    said = ""
    if rank == 0:
        work = dist.all_reduce(tensor, async_op=True)
        assert work is not None
        said = in_child(work.wait)
        dist.barrier(async_op=True)
        work.wait()
    else:
        time.sleep(0.5)
        dist.all_reduce(tensor)
        dist.barrier(async_op=True)
    return said, float(tensor[0]) + total(1)


@pytest.mark.threat("K18")
def test_a_forked_child_waits_for_its_parents_work(workers: Workers) -> None:
    assert workers.run(child_waits) == [("ForkedProcess", 4.0), ("", 4.0)]


def bare_child_calls(rank: int, world: int) -> tuple[list[str], float]:
    store = sealring.sealed_store()
    said = []
    if rank == 0:
        picked = calls(store)
        said = [
            in_child(picked[name], bare_fork)
            for name in ("all_reduce", "send", "account", "store set")
        ]
    return said, total(rank)


@pytest.mark.skipif(CLONE is None, reason="the number of the system call is not known here")
@pytest.mark.threat("K18")
def test_a_child_that_no_fork_handler_knows_of(workers: Workers) -> None:
    assert workers.run(bare_child_calls) == [(["ForkedProcess"] * 4, 1.0), ([], 1.0)]


def leaving(way: str) -> object:
    if way == "sys.exit":
        # This runs the handlers of torch and Python, as at a script's own end.
        atexit._run_exitfuncs()
    elif way == "destroy":
        dist.destroy_process_group()
    elif way == "abort":
        group = dist.group.WORLD
        assert group is not None
        group.abort()
    elif way == "collected":
        group = dist.group.WORLD
        dist.distributed_c10d._world.pg_map.clear()
        dist.distributed_c10d._world.pg_names.clear()
        dist.group.WORLD = None
        del group
        gc.collect()
    elif way == "grandchild":
        return in_child(lambda: in_child(lambda: total(9)))
    return "left"


_WAYS: Final = ("os._exit", "sys.exit", "destroy", "abort", "collected")


def children_leave(rank: int, world: int) -> tuple[list[str], float]:
    said = []
    dist.send(torch.ones(2), dst=1) if rank == 0 else dist.recv(torch.ones(2), src=0)
    if rank == 0:
        said = [in_child(lambda way=way: leaving(way)) for way in _WAYS]
        said.append(in_child(lambda: leaving("grandchild")))
    dist.recv(torch.ones(2), src=1) if rank == 0 else dist.send(torch.ones(2), dst=0)
    return said, total(rank + 1)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.threat("K20")
def test_a_child_that_ends_leaves_its_parents_group_alone(workers: Workers, transport: str) -> None:
    environment = {"SEALRING_TRANSPORT": transport}
    expected = ["left"] * len(_WAYS) + ["ForkedProcess"]
    assert workers.run(children_leave, env=environment) == [(expected, 3.0), ([], 3.0)]


def own_group() -> float:
    dist.destroy_process_group()
    store = dist.HashStore()
    dist.init_process_group("sealring", store=store, rank=0, world_size=1)
    answer = total(42)
    dist.destroy_process_group()
    return answer


def child_makes_a_group(rank: int, world: int) -> tuple[str, float]:
    said = in_child(own_group) if rank == 0 else ""
    return said, total(rank + 1)


def test_a_forked_child_makes_a_group_of_its_own(workers: Workers) -> None:
    assert workers.run(child_makes_a_group) == [("42.0", 3.0), ("", 3.0)]


def loses_its_peer(rank: int, sign: str) -> list[str]:
    """Kills rank 0 before its child has ended; rank 1 reports the error it got."""
    total(rank + 1)
    if rank == 1:
        try:
            total(2)
        except PeerLost as error:
            answer = [f"PeerLost about {error.peer}", str(os.path.exists(sign))]
        else:
            answer = ["no error"]
        Path(f"{sign}.end").touch()
        return answer
    os.kill(os.getpid(), signal.SIGKILL)
    return []


def fork_and_stay(sign: str) -> None:
    """Forks a child that stays until the peer has lost the parent, or for ten seconds."""
    if os.fork() == 0:
        with contextlib.suppress(BaseException):
            for _ in range(100):
                time.sleep(0.1)
                if os.path.exists(f"{sign}.end"):
                    break
            Path(sign).touch()
        os._exit(0)


def dies_before_its_child(rank: int, world: int, sign: str) -> list[str]:
    total(rank + 1)
    if rank == 0:
        fork_and_stay(sign)
    return loses_its_peer(rank, sign)


def forks_while_links_are_made(rank: int, world: int, sign: str) -> list[str]:
    forked = False

    def forks(sock: socket.socket) -> None:
        nonlocal forked
        prepare_socket(sock)
        if rank == 0 and not forked:
            forked = True
            fork_and_stay(sign)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sealring.core.links.mesh.prepare_socket", forks)
        dist.init_process_group("sealring")
    return loses_its_peer(rank, sign)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.threat("K20")
def test_a_child_does_not_keep_its_dead_parents_links_open(
    workers: Workers, transport: str, tmp_path: Path
) -> None:
    results = workers.run(
        dies_before_its_child,
        str(tmp_path / "the child has ended"),
        errors=True,
        env={"SEALRING_TRANSPORT": transport},
    )
    assert results[1] == ["PeerLost about 0", "False"]


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.threat("K20")
def test_a_child_forked_while_links_are_made_does_not_keep_them_open(
    workers: Workers, transport: str, tmp_path: Path
) -> None:
    results = workers.run(
        forks_while_links_are_made,
        str(tmp_path / "the child has ended"),
        errors=True,
        group=False,
        env={"SEALRING_TRANSPORT": transport},
    )
    assert results[1] == ["PeerLost about 0", "False"]


class Squares(torch.utils.data.Dataset[float]):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, at: int) -> float:
        return float(at * at)


def train_with_loader(rank: int, world: int) -> float:
    from torch.utils.data import DataLoader

    loader = DataLoader(Squares(), batch_size=4, num_workers=2, multiprocessing_context="fork")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return sum(total(float(batch.sum())) for _ in range(2) for batch in loader)


@pytest.mark.threat("K20")
def test_data_loaders_fork_while_training_goes_on(workers: Workers) -> None:
    expected = 2 * 2 * sum(at * at for at in range(24))
    assert workers.run(train_with_loader) == [expected, expected]


def fork_in_a_handler(rank: int, world: int) -> tuple[str, float]:
    """A signal arrives while the call waits for the peer; its handler forks, and both return."""
    if rank == 1:
        time.sleep(1.0)
        return "", total(2)
    reading, writing = os.pipe()
    children: list[int] = []

    def handle(*_: object) -> None:
        children.append(os.fork())

    before = signal.signal(signal.SIGALRM, handle)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    answer = "nothing"
    value = 0.0
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            value = total(1)
        answer = "went on"
    except BaseException as error:
        answer = type(error).__name__
    if children and children[0] == 0:
        os.write(writing, answer.encode())
        os._exit(0)
    signal.signal(signal.SIGALRM, before)
    os.close(writing)
    with os.fdopen(reading) as said:
        heard = said.read()
    with contextlib.suppress(ChildProcessError):
        os.waitpid(children[0], 0)
    return heard, value


@pytest.mark.threat("K18")
def test_a_signals_handler_forks_in_the_middle_of_a_collective(workers: Workers) -> None:
    assert workers.run(fork_in_a_handler) == [("ForkedProcess", 3.0), ("", 3.0)]
