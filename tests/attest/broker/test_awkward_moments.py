"""Certificates that are renewed or revoked while a group forms, and a broker that is stopped."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from sealring.attest.broker.client import BrokerClient
from sealring.attest.broker.enrolment import BrokerEnrolment, enrolled
from sealring.attest.evidence.admission import PolicyAdmission, key_digest
from sealring.errors import NoLongerAdmitted, SealringError
from sealring.lab.bench.workers import forking_context
from tests.attest.broker.local import Place, running
from tests.workers import Workers


def wait_for(*flags: str) -> None:
    end = time.monotonic() + 60
    while not all(Path(flag).exists() for flag in flags):
        assert time.monotonic() < end
        time.sleep(0.02)


def comes_late(rank: int, world: int, late: int, seconds: float) -> float:
    if rank == late:
        time.sleep(seconds)
    dist.init_process_group("sealring", timeout=timedelta(seconds=40))
    total = torch.ones(1)
    dist.all_reduce(total)
    dist.destroy_process_group()
    return total.item()


@pytest.mark.threat("B20")
def test_a_worker_that_waits_for_longer_than_its_certificate_lives(
    workers: Workers, tmp_path: Path
) -> None:
    place = Place(tmp_path, minutes=0.1)
    with running(place) as broker:
        environment = place.environment(broker.port)
        for late in (0, 2):
            totals = workers.run(comes_late, late, 9.0, world=3, group=False, env=environment)
            assert totals == [3.0] * 3


def serve(directory: str, pipe: Any) -> None:
    place = Place(Path(directory))
    with running(place) as broker:
        pipe.send(place.environment(broker.port))
        pipe.recv()


@contextlib.contextmanager
def in_a_process(directory: Path) -> Iterator[tuple[int, dict[str, str]]]:
    """A broker that can be stopped. Yields its process id and the environment of its workers."""
    context = forking_context()
    here, there = context.Pipe()
    process = context.Process(target=serve, args=(str(directory), there))
    process.start()
    try:
        yield process.pid, here.recv()
    finally:
        os.kill(process.pid, signal.SIGCONT)
        here.send(None)
        process.join()


def makes_a_group_without_an_answer(rank: int, world: int, flag: str) -> float:
    dist.init_process_group("sealring", timeout=timedelta(seconds=60))
    Path(flag + str(rank)).touch()
    wait_for(flag + "stopped")
    group = dist.new_group(timeout=timedelta(seconds=6))
    total = torch.ones(1)
    dist.all_reduce(total, group=group)
    dist.destroy_process_group()
    return total.item()


@pytest.mark.threat("B20")
def test_a_group_forms_while_the_broker_is_stopped(workers: Workers, tmp_path: Path) -> None:
    """The group's timeout is shorter than the time that a worker would wait for the broker."""
    flag = str(tmp_path / "flag")
    with in_a_process(tmp_path) as (pid, environment):

        def stop() -> None:
            wait_for(flag + "0", flag + "1")
            os.kill(pid, signal.SIGSTOP)
            Path(flag + "stopped").touch()

        stopping = threading.Thread(target=stop)
        stopping.start()
        totals = workers.run(
            makes_a_group_without_an_answer, flag, world=2, group=False, env=environment
        )
        stopping.join()
    assert totals == [2.0] * 2


def is_revoked_while_it_forms(rank: int, world: int, flag: str) -> str:
    watch: Any = BrokerEnrolment.watch

    def after_the_revocation(own: BrokerEnrolment, group: Any, keys: dict[int, str]) -> None:
        Path(flag).touch()
        end = time.monotonic() + 30
        with contextlib.suppress(SealringError):
            while own.renewed_credentials():
                assert time.monotonic() < end
                time.sleep(0.01)
        watch(own, group, keys)

    BrokerEnrolment.watch = after_the_revocation  # type: ignore
    try:
        dist.init_process_group("sealring", timeout=timedelta(seconds=60))
        with pytest.raises(NoLongerAdmitted) as ended:
            dist.all_reduce(torch.ones(1))
        dist.destroy_process_group()
    finally:
        BrokerEnrolment.watch = watch  # type: ignore[method-assign]
    return str(ended.value)


@pytest.mark.threat("B19")
def test_a_worker_that_is_revoked_while_its_group_forms_has_no_group(
    workers: Workers, tmp_path: Path
) -> None:
    place, flag = Place(tmp_path, minutes=0.3), str(tmp_path / "flag")
    with running(place) as broker:

        def revoke() -> None:
            wait_for(flag)
            broker.revoke(0)

        revoking = threading.Thread(target=revoke)
        revoking.start()
        environment = place.environment(broker.port)
        (said,) = workers.run(
            is_revoked_while_it_forms, flag, world=1, group=False, env=environment
        )
        revoking.join()
    assert "this worker was not renewed: broker.worker_revoked" in said


@pytest.mark.threat("B19")
def test_a_renewal_that_overtakes_the_question_who_is_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """An answer from before a revocation does not replace the newer one of the renewal."""
    place = Place(tmp_path)
    with running(place) as broker:
        revoked = key_digest(broker.join(1).certificate)
        own = enrolled(0, 4, place.environment(broker.port), time.monotonic() + 60)
        ask = BrokerClient.keys_out
        answers: list[frozenset[str]] = []

        async def overtaken(self: BrokerClient, job: str, seconds: float) -> frozenset[str]:
            answers.append(await ask(self, job, seconds))
            if len(answers) == 1:
                await asyncio.to_thread(broker.revoke, 1)
                await asyncio.to_thread(own.renew)
            return answers[-1]

        monkeypatch.setattr(BrokerClient, "keys_out", overtaken)
        admission = own.credentials(time.monotonic() + 60).admission
        own.close()
    assert revoked not in answers[0]
    assert isinstance(admission, PolicyAdmission)
    assert revoked in admission.keys_out
