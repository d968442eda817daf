"""A revoked worker stays no longer than its certificate, even if its renewals fail."""

from __future__ import annotations

import contextlib
import os
import resource
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from sealring.attest.broker import this_worker
from sealring.errors import NoLongerAdmitted
from tests.attest.broker.local import Place, running
from tests.workers import Workers

PATIENCE = timedelta(seconds=60)
REVOKED = 1


def thread_ends() -> None:
    """Makes the thread that renews end without an error message."""

    def end(*arguments: object) -> None:
        raise SystemExit

    worker: Any = this_worker()
    worker.renew = end


def exception() -> None:
    """Makes each renewal raise an error that no code expects."""

    def fail(*arguments: object) -> None:
        raise KeyError("no code expects this")

    worker: Any = this_worker()
    worker.renew = fail


def no_descriptor() -> None:
    """Uses up all file descriptors, so the process can open no file or socket (EMFILE)."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (32, hard))
    with contextlib.suppress(OSError):
        while True:
            held.append(os.dup(0))


FAULTS = {
    # No renewing thread is left to end the groups, so the data path itself must end them.
    "collectives": (thread_ends, thread_ends, thread_ends),
    "messages": (thread_ends, no_descriptor, exception),
}
held: list[int] = []


def trains(rank: int, world: int, flag: str, how: str) -> tuple[str, int | None]:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    dist.init_process_group("sealring", timeout=PATIENCE)
    dist.barrier()
    Path(flag + str(rank)).touch()
    FAULTS[how][rank]()
    until = time.monotonic() + 30
    tensor = torch.ones(10)
    try:
        while time.monotonic() < until:
            if how == "collectives":
                dist.all_reduce(tensor)
            elif rank == 0:
                dist.send(tensor, 1)
                dist.send(tensor, 2)
            else:
                dist.recv(tensor, 0)
            time.sleep(0.01)
    except NoLongerAdmitted as error:
        return str(error), error.peer
    finally:
        for each in held:
            os.close(each)
        held.clear()
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        dist.destroy_process_group()
    return "it went on", None


@pytest.mark.parametrize("how", ["collectives", "messages"])
@pytest.mark.threat("B21")
def test_groups_end_with_the_certificate_whatever_happens_to_renewal(
    how: str, workers: Workers, tmp_path: Path
) -> None:
    place = Place(tmp_path, minutes=0.1)
    flag = str(tmp_path / "trains")
    with running(place) as broker:

        def revoke() -> None:
            until = time.monotonic() + 60
            while not all(Path(flag + str(rank)).exists() for rank in range(3)):
                assert time.monotonic() < until
                time.sleep(0.05)
            broker.revoke(REVOKED)

        revoking = threading.Thread(target=revoke)
        revoking.start()
        environment = place.environment(broker.port)
        results = workers.run(trains, flag, how, world=3, group=False, env=environment, errors=True)
        revoking.join()
    for outcome in results:
        assert isinstance(outcome, tuple), outcome
        said, about = outcome
        ended = "has ended, and the broker did not renew it" in said
        assert ended or (how == "messages" and "was not renewed" in said), said
        assert about in (None, 0, 1, 2)
