"""A nonce is used again under another policy, and refused requests for data keys are logged."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from sealring.attest.broker import audit, ledger
from sealring.attest.broker.tls import Client, client_context, connect
from sealring.errors import BrokerRefusal
from tests.attest.broker.local import Place, Running, running
from tests.attest.broker.test_hostile_clients import Worker, talk
from tests.codes import coded


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


@contextmanager
def policy_of(place: Place, seconds: int) -> Iterator[Running]:
    place.write_policy(f"[freshness]\nnonce_seconds = {seconds}\n")
    with running(place) as broker:
        yield broker


def attest(broker: Running, worker: Worker, body: bytes) -> None:
    async def act() -> None:
        context = client_context([broker.place.keys.authority])
        worker.client = Client(await connect("127.0.0.1", broker.port, context), "here")
        try:
            await worker.attest(body)
        finally:
            worker.client.close()

    asyncio.run(act())


@pytest.mark.threat("B1")
def test_a_used_nonce_stays_used_under_another_nonce_seconds(place: Place) -> None:
    kept: list[tuple[Worker, bytes]] = []

    async def join(worker: Worker) -> None:
        await worker.auth()
        body = worker.body()
        await worker.attest(body)
        kept.append((worker, body))

    with policy_of(place, 120) as broker:
        talk(broker, join)
    worker, body = kept[0]
    with (
        policy_of(place, 3600) as broker,
        pytest.raises(BrokerRefusal, check=coded("broker.reused_nonce")),
    ):
        attest(broker, worker, body)
    # The broker does not forget the nonce when the shorter time has passed, either.
    place.clock = lambda: time.time() + 600
    with policy_of(place, 120) as broker:
        broker.decide(lambda _, view: ledger.sweep(view, place.clock()))
    with (
        policy_of(place, 3600) as broker,
        pytest.raises(BrokerRefusal, check=coded("broker.reused_nonce")),
    ):
        attest(broker, worker, body)


@pytest.mark.threat("B14")
def test_refused_requests_for_data_keys_are_in_the_log(place: Place) -> None:
    place.write_policy('[[resources]]\npath = "data/key/granted"\n')
    with running(place) as broker:

        async def act(worker: Worker) -> None:
            await worker.auth()
            await worker.attest()
            with pytest.raises(BrokerRefusal, check=coded("broker.resource_not_granted")):
                await worker.fetch("data/key/secret")
            with pytest.raises(BrokerRefusal, check=coded("broker.no_such_resource")):
                await worker.fetch("data/key/granted")
            await worker.fetch()
            with pytest.raises(BrokerRefusal, check=coded("broker.reused_token")):
                await worker.fetch()
            # The token's holder must not fill the log with refusals, either.
            for number in range(30):
                with pytest.raises(BrokerRefusal, check=coded("broker.resource_not_granted")):
                    await worker.fetch(f"data/key/secret{number}")

        talk(broker, act)
        public = place.keys.audit_key.verifier
        entries = broker.store.submit(lambda view: audit.check(view, public)).result().entries
    told = [(entry["event"], entry.get("what"), entry.get("error")) for entry in entries]
    assert told[1:5] == [
        ("refused", "data/key/secret", "broker.resource_not_granted"),
        ("refused", "data/key/granted", "broker.no_such_resource"),
        ("gave", "sealring/certificate/worker", None),
        ("refused", "sealring/certificate/worker", "broker.reused_token"),
    ]
    assert len(told) < 12
