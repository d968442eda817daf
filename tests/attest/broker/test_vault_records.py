"""The broker's records of vaults: only admitted workers of the same job, and only forwards."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from sealring.attest.broker import audit, client, ledger
from sealring.attest.broker.client import Answered, ask_vault, tell_vault
from sealring.attest.broker.messages import READ_PROOF, RECORD_PROOF, parse_record, write_signed
from sealring.core.hooks import VaultEntry as Entry
from sealring.core.identity.names import WorkerName
from sealring.errors import (
    BrokerRefusal,
    MalformedRequest,
)
from tests.attest.broker.local import JOB, Place, Running, running
from tests.codes import coded

VAULT = "0a" * 16


def digest(number: int) -> str:
    return f"{number:064x}"


def entry(number: int, version: int, content: int | None = None) -> Entry:
    return Entry(f"{number:032x}", version, digest(version if content is None else content))


class Worker:
    def __init__(self, broker: Running, rank: int = 0, job: str = JOB, joins: bool = True) -> None:
        self._broker, self._name = broker, WorkerName(job, rank)
        self.key = Ed25519PrivateKey.generate()
        if joins:
            broker.join(rank, key=self.key, job=job)

    def read(self, vault: str = VAULT) -> Answered:
        return self._ask(ask_vault(self._name, self.key, vault))

    def record(self, one: Entry | None, key: int = 1, generation: int = 1) -> Answered:
        return self._ask(tell_vault(self._name, self.key, VAULT, key, generation, one))

    def _ask(self, conversation: Any) -> Any:
        return asyncio.run(self._broker.client().ask(conversation, 30.0))


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


@pytest.mark.threat("V14")
def test_records_go_forward_alone(place: Place) -> None:
    with running(place) as broker:
        worker, other = Worker(broker, 0), Worker(broker, 1)
        assert worker.read() == Answered(0, 0, [])
        assert worker.record(None, 1, 2) == Answered(1, 2, [])
        assert worker.record(entry(1, 5), 1, 2).entries == [entry(1, 5)]
        assert other.record(entry(1, 4), 1, 1).entries == [entry(1, 5)]
        assert other.record(entry(2, 1), 2, 0) == Answered(2, 0, [entry(2, 1)])
        assert worker.record(None, 1, 900) == Answered(2, 0, [])
        with pytest.raises(BrokerRefusal, check=coded("broker.recorded_otherwise")):
            other.record(entry(1, 5, content=6))
        assert worker.read() == other.read() == Answered(2, 0, [entry(1, 5), entry(2, 1)])
        log = broker.decide(lambda ledger, view: audit.check(view, ledger.audit_key.verifier))
        recorded = [one for one in log.entries if one["event"] == "recorded"]
        assert [(one.get("object"), one.get("version"), one["rank"]) for one in recorded] == [
            (None, None, 0),
            (entry(1, 5).object, 5, 0),
            (entry(2, 1).object, 1, 1),
        ]
        assert recorded[1]["manifest"] == digest(5)
        expected = worker.read()
    with running(place) as broker:
        # The test still has the holder's key, which still holds its rank.
        again = Worker(broker, 0, joins=False)
        again.key = worker.key
        assert again.read() == expected


@pytest.mark.threat("V13")
def test_another_job_has_records_of_its_own(place: Place) -> None:
    with running(place) as broker:
        ours, theirs = Worker(broker, 0), Worker(broker, 0, "another")
        ours.record(entry(1, 1))
        theirs.record(entry(1, 900))
        assert ours.read().entries == [entry(1, 1)]
        assert theirs.read().entries == [entry(1, 900)]


@pytest.mark.threat("V13")
def test_a_worker_that_is_not_admitted_reads_and_records_nothing(place: Place) -> None:
    with running(place) as broker:
        admitted, stranger = Worker(broker, 0), Worker(broker, 0, joins=False)
        admitted.record(entry(1, 1))
        for ask in (stranger.read, lambda: stranger.record(entry(1, 2))):
            with pytest.raises(BrokerRefusal, check=coded("broker.rank_taken")):
                ask()
        broker.decide(lambda ledger, view: ledger.revoke(view, 0.0, WorkerName(JOB, 0)))
        for ask in (admitted.read, lambda: admitted.record(entry(1, 3))):
            with pytest.raises(BrokerRefusal, check=coded("broker.worker_revoked")):
                ask()


@pytest.mark.threat("V13")
def test_a_worker_whose_certificate_has_ended(tmp_path: Path) -> None:
    ahead = [0.0]
    place = Place(tmp_path)
    place.clock = place.boottime = lambda: time.time() + ahead[0]
    with running(place) as broker:
        worker = Worker(broker, 0)
        worker.record(entry(1, 1))
        ahead[0] = 86400.0 * 2
        with pytest.raises(BrokerRefusal, check=coded("broker.expired_token")):
            worker.record(entry(1, 2))


def test_many_objects_come_in_pages(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (ledger, client):
        monkeypatch.setattr(module, "PAGE", 2)
    monkeypatch.setattr(ledger, "MOST_OBJECTS", 5)
    with running(place) as broker:
        worker = Worker(broker, 0)
        made = [entry(number, 1) for number in range(5)]
        for one in made:
            worker.record(one)
        assert worker.read().entries == made
        with pytest.raises(BrokerRefusal, check=coded("broker.too_many_records")):
            worker.record(entry(9, 1))
        worker.record(entry(4, 2))
        assert worker.read().entries == [*made[:4], entry(4, 2)]


@pytest.mark.parametrize(
    "change",
    [
        {"vault": "../x"},
        {"vault": VAULT.upper()},
        {"key": -1},
        {"key": True},
        {"generation": 1 << 63},
        {"entry": {}},
        {"entry": {"object": "x", "version": 1, "manifest": digest(1)}},
        {"entry": {"object": VAULT, "version": 1.0, "manifest": digest(1)}},
        {"entry": {"object": VAULT, "version": 1, "manifest": None}},
        {"more": 1},
    ],
)
def test_requests_that_are_none(change: dict[str, Any]) -> None:
    key = Ed25519PrivateKey.generate()
    ask = {"vault": VAULT, "key": 1, "generation": 1, "entry": None, **change}
    body = write_signed(WorkerName(JOB, 0), key, RECORD_PROOF, ask)
    with pytest.raises(MalformedRequest):
        parse_record(body)


@pytest.mark.threat("V13")
def test_a_request_that_was_changed_or_signed_for_something_else() -> None:
    key = Ed25519PrivateKey.generate()
    ask = {"vault": VAULT, "key": 1, "generation": 1, "entry": None}
    name = WorkerName(JOB, 0)
    good = json.loads(write_signed(name, key, RECORD_PROOF, ask))
    assert parse_record(json.dumps(good).encode()).generation == 1
    good["ask"]["generation"] = 2
    reading = write_signed(name, key, READ_PROOF, ask)
    for body in (json.dumps(good).encode(), reading):
        with pytest.raises(MalformedRequest, match="not signed by the worker's key"):
            parse_record(body)
