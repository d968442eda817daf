"""A world of worker processes on this machine, for measurements and the demo.

Each worker gets the environment that torchrun would give it, and an identity: a job secret that
exists only in these processes' memory.
"""

from __future__ import annotations

import math
import multiprocessing
import multiprocessing.connection
import os
import queue
import secrets
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, Final

from sealring.errors import PeerLost, PeerUnreachable, WorkerFailed

Report = Callable[[Any], None]
"""A worker calls it with whatever it wants its parent to have."""


_IDENTITY: Final = (
    "SEALRING_SECRET_FILE", "SEALRING_CERTIFICATE", "SEALRING_KEY", "SEALRING_AUTHORITY"
)  # fmt: skip
"""The user's own identity is not for these workers, and two would be refused."""
_CAUSE_SECONDS: Final = 5.0
"""When a worker says that it lost another: how long that one may take to say why it ended."""


def run_workers(
    count: int,
    target: Callable[..., None],
    *arguments: Any,
    environment: Mapping[str, str] | None = None,
) -> Iterator[tuple[int, Any]]:
    """Starts `count` processes that call target(rank, report, *arguments); yields (rank, report).

    Ends when all have ended. If one fails, the rest are ended too and WorkerFailed is raised, about
    a worker that failed by itself rather than one that lost another.
    """
    with meeting_place() as place:
        yield from _run(count, target, arguments, {**place, **(environment or {})})


def forking_context() -> Any:
    """A context of multiprocessing in which one process imports torch and sealring, and workers are
    forks of it: the import takes seconds, and is paid once for all of them."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed", "sealring.core.group.create", __name__])
    return context


def _run(
    count: int,
    target: Callable[..., None],
    arguments: tuple[Any, ...],
    environment: Mapping[str, str],
) -> Iterator[tuple[int, Any]]:
    context = forking_context()
    reports = context.Queue()
    shared = {
        "WORLD_SIZE": str(count),
        "SEALRING_SECRET": secrets.token_hex(32),
        "SEALRING_JOB": "local",
        **environment,
    }
    inherited = {name: value for name, value in os.environ.items() if name not in _IDENTITY}
    processes = [
        context.Process(
            target=_worker,
            args=(
                rank,
                {**inherited, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                reports,
                target,
                arguments,
            ),
            name=f"sealring-worker-{rank}",
        )
        for rank in range(count)
    ]
    try:
        for process in processes:
            process.start()
        yield from _reports_of(processes, reports)
    finally:
        for process in processes:
            if process.is_alive():
                process.terminate()
        for process in processes:
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()


def _reports_of(processes: list[Any], reports: Any) -> Iterator[tuple[int, Any]]:
    running = set(range(len(processes)))
    consequence: WorkerFailed | None = None
    until = math.inf
    while running and time.monotonic() < until:
        # Looked at before the queue: what one of these reported is in it by now.
        ended = {rank: each.exitcode for rank, each in enumerate(processes) if not each.is_alive()}
        try:
            kind, rank, value = reports.get(timeout=0.5)
        except queue.Empty:
            for rank in running & ended.keys():
                if status := ended[rank]:
                    raise WorkerFailed(f"worker {rank} ended with exit status {status}") from None
            running -= ended.keys()
            continue
        if kind == "report":
            yield rank, value
            continue
        running.discard(rank)
        if kind == "failed":
            text, another_ended = value
            failed = WorkerFailed(f"worker {rank} failed:\n{text}")
            if not another_ended:
                raise failed
            consequence = consequence or failed
            until = min(until, time.monotonic() + _CAUSE_SECONDS)
    if consequence is not None:
        raise consequence


def _worker(
    rank: int,
    environment: Mapping[str, str],
    reports: Any,
    target: Callable[..., None],
    arguments: tuple[Any, ...],
) -> None:
    threading.Thread(target=_end_with_parent, name="parent", daemon=True).start()
    # All of it: what this process has is of the time when the first worker was started.
    os.environ.clear()
    os.environ.update(environment)
    import torch

    # One core's worth each: the workers themselves are the parallelism.
    torch.set_num_threads(1)
    try:
        target(rank, lambda value: reports.put(("report", rank, value)), *arguments)
    except BaseException as error:
        another_ended = isinstance(error, PeerLost | PeerUnreachable)
        reports.put(("failed", rank, (traceback.format_exc(), another_ended)))
        sys.exit(1)
    reports.put(("done", rank, None))
    with suppress(ValueError):
        reports.close()
    reports.join_thread()


def _end_with_parent() -> None:
    """A worker must not outlive the process that asked for it, however that one ends. The kernel's
    PR_SET_PDEATHSIG is about another one, from which the workers are forked."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    multiprocessing.connection.wait([parent.sentinel])
    os.kill(os.getpid(), signal.SIGKILL)


@contextmanager
def meeting_place() -> Iterator[dict[str, str]]:
    """A rendezvous store in this process, and the environment by which workers find it.

    Its port is chosen by the system when it is opened, so that it cannot be taken meanwhile.
    """
    from torch._C._distributed_c10d import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }
    del store
