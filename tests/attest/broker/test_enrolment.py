"""A worker's enrolment at a broker: its certificate is renewed, or its groups end."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from sealring.attest.broker.enrolment import BrokerEnrolment, enrolled, read_settings
from sealring.attest.evidence.admission import PolicyAdmission, key_digest
from sealring.core.handshake.tls import loaded
from sealring.core.identity.names import WorkerName
from sealring.errors import (
    BrokerError,
    BrokerRefusal,
    BrokerUnavailable,
    ConfigurationError,
)
from tests.attest.broker.local import JOB, Place, running
from tests.codes import coded
from tests.ports import free_port


class Group:
    """A group that keeps the reason why it was ended."""

    def __init__(self) -> None:
        self.ended = threading.Event()
        self.why: tuple[int, str] | None = None

    def expel(self, member: int, why: str) -> None:
        self.why = (member, why)
        self.ended.set()


def soon(seconds: float = 60.0) -> float:
    return time.monotonic() + seconds


def enrol(place: Place, port: int, rank: int) -> BrokerEnrolment:
    return enrolled(rank, 4, place.environment(port), soon())


def test_without_a_broker_the_groups_end_with_the_certificate(tmp_path: Path) -> None:
    place, group = Place(tmp_path, minutes=0.05), Group()
    with running(place) as broker:
        held = enrol(place, broker.port, 0)
        held.watch(group, {})
        until = held.certificate.not_valid_after_utc.timestamp()
    assert group.ended.wait(60)
    assert time.time() >= until - 1
    assert group.why is not None
    assert group.why[0] == -1
    assert "broker.unreachable" in group.why[1]
    with pytest.raises(BrokerUnavailable, check=coded("broker.unreachable")):
        held.credentials(soon(1))


@pytest.mark.threat("J16")
def test_strangers_who_begin_many_handshakes_have_a_worker_load_its_key_once(
    tmp_path: Path,
) -> None:
    """Credentials are read anew for each handshake, because the certificate may be renewed."""
    place = Place(tmp_path)
    with running(place) as broker:
        held = enrol(place, broker.port, 0)
        one, other = held.renewed_credentials(), held.renewed_credentials()
        assert loaded(one.key) is loaded(other.key)


def test_the_rank_that_learns_of_a_revocation_ends_the_group(tmp_path: Path) -> None:
    place, group = Place(tmp_path, minutes=0.05), Group()
    with running(place) as broker:
        one, other = enrol(place, broker.port, 0), enrol(place, broker.port, 1)
        one.watch(group, {3: key_digest(other.certificate)})
        assert not group.ended.is_set()
        broker.revoke(1)
        assert group.ended.wait(60)
        assert group.why == (3, "was taken out of the job by the broker, or not renewed")
        # A new group asks first who is out, without waiting for a renewal.
        admission = one.credentials(soon()).admission
        assert isinstance(admission, PolicyAdmission)
        assert key_digest(other.certificate) in admission.keys_out
        with pytest.raises(BrokerRefusal, check=coded("broker.worker_revoked")):
            other.credentials(soon())
        one.close()


def test_a_process_has_one_enrolment_and_only_its_own_keys(place: Place) -> None:
    with running(place) as broker:
        held = enrol(place, broker.port, 0)
        assert enrol(place, broker.port, 0) is held
        with pytest.raises(
            BrokerRefusal, match="gave none", check=coded("broker.no_such_resource")
        ):
            held.data_key("data/key/train")

        async def in_a_loop() -> int:
            return held.credentials(soon()).rank

        assert asyncio.run(in_a_loop()) == 0
        held.close()


def test_a_broker_that_is_not_there_is_named_soon_and_given_up(
    place: Place, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("sealring.attest.broker.enrolment._JOIN_SECONDS", 6.0)
    port = free_port()
    start = time.monotonic()
    with pytest.raises(
        BrokerUnavailable,
        match=f"127.0.0.1:{port} cannot be reached",
        check=coded("broker.unreachable"),
    ):
        enrolled(0, 1, place.environment(port), soon(600))
    assert time.monotonic() - start < 60
    assert "rank 0 tries again to join, for " in caplog.text
    assert f"the broker at 127.0.0.1:{port} cannot be reached" in caplog.text


def test_a_worker_that_ends_gives_its_rank_back(place: Place) -> None:
    script = (
        "import os, time, sys\n"
        "from sealring.attest.broker import enrolled\n"
        "enrolled(0, 1, os.environ, time.monotonic() + 60)\n"
        "if sys.argv[1:]: raise KeyError(sys.argv[1])\n"
    )
    with running(place) as broker:
        environment = {**os.environ, **place.environment(broker.port)}
        environment.pop("SEALRING_SECRET")

        def run(*arguments: str) -> int:
            command = [sys.executable, "-c", script, *arguments]
            return subprocess.run(
                command, env=environment, timeout=100, check=False, stderr=subprocess.DEVNULL
            ).returncode

        assert [run(), run()] == [0, 0]
        # A worker that failed keeps its rank, for its operator to look at.
        assert run("failed") == 1
        with pytest.raises(BrokerRefusal, check=coded("broker.rank_taken")):
            broker.join(0)
        # No other worker can give it back.
        stranger = Ed25519PrivateKey.generate()
        asyncio.run(broker.client().leave(WorkerName(JOB, 0), stranger, 30.0))
        with pytest.raises(BrokerRefusal, check=coded("broker.rank_taken")):
            broker.join(0)
        assert broker.client_keys_out() == frozenset()


def test_a_clock_that_is_wrong_is_said_to_be(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    class Tomorrow(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> datetime:  # type: ignore[override]
            return datetime.now(tz) + timedelta(days=1)

    monkeypatch.setattr("sealring.attest.broker.keys.datetime", Tomorrow)
    with (
        running(place) as broker,
        pytest.raises(BrokerError, match="set the clock", check=coded("broker.untrusted_broker")),
    ):
        broker.join(0)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"SEALRING_JOB": ""}, "SEALRING_JOB must be set"),
        ({"SEALRING_POLICY": "", "SEALRING_AUTHORITY": ""}, "SEALRING_AUTHORITY and SEALRING_POL"),
        ({"SEALRING_SECRET": "x"}, "a worker has one identity"),
        ({"SEALRING_BROKER": "http://127.0.0.1:1"}, "a broker is https://"),
        ({"SEALRING_BROKER": "https://h:1/path"}, "a broker is https://"),
        ({"SEALRING_BROKER": "https://h:port"}, "a broker is https://"),
    ],
)
def test_settings_that_cannot_be(changes: dict[str, str], said: str, place: Place) -> None:
    with pytest.raises(ConfigurationError, match=said):
        read_settings({**place.environment(1), **changes})


@pytest.mark.parametrize("source", ["nothing", "simulated:", "simulated:/nowhere"])
def test_an_attester_that_is_none(source: str, place: Place) -> None:
    environment = {**place.environment(1), "SEALRING_ATTESTER": source}
    with pytest.raises(ConfigurationError):
        enrolled(0, 1, environment, soon())
