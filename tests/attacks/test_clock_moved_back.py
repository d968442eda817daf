"""Several brokers share one real etcd; the clock of one is behind, set back or ahead."""

from __future__ import annotations

import asyncio
import copy
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from sealring.attest.broker import audit, ledger
from sealring.attest.broker.client import BrokerClient
from sealring.attest.broker.clock import boottime
from sealring.attest.broker.etcd import EtcdStore
from sealring.attest.broker.tls import Client, client_context, connect
from sealring.core.identity.names import WorkerName
from sealring.errors import (
    BrokerRefusal,
    BrokerUnavailable,
    UntrustedChain,
)
from tests.attest.broker.etcd_cluster import Cluster, cluster, needs_etcd
from tests.attest.broker.local import JOB, PATIENCE, Place, Running, running
from tests.attest.broker.test_hostile_clients import Worker, talk
from tests.codes import coded

pytestmark = needs_etcd
HOUR = 3600.0


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster(tmp_path_factory.mktemp("etcd"), members=1) as started:
        yield started


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


class Wall:
    """A machine's clock, which the test can set, and its CLOCK_BOOTTIME, which only advances."""

    def __init__(self) -> None:
        self.shift = 0.0
        self.passed = 0.0

    def __call__(self) -> float:
        return time.time() + self.passed + self.shift

    def boottime(self) -> float:
        return boottime() + self.passed


@contextmanager
def replica(place: Place, etcd: Cluster, wall: Wall | None = None) -> Iterator[Running]:
    other = copy.copy(place)
    wall = wall or Wall()
    other.clock, other.boottime = wall, wall.boottime
    store = EtcdStore(etcd.url, place.keys.name, place.keys.store_key)
    with running(other, store=store) as broker:
        yield broker


def again(broker: Running, worker: Worker, body: bytes | None = None) -> None:
    """Sends the worker's evidence (or, without `body`, its token) again on a new connection."""

    async def act() -> None:
        context = client_context([broker.place.keys.authority])
        worker.client = Client(await connect("127.0.0.1", broker.port, context), "here")
        try:
            await (worker.fetch() if body is None else worker.attest(body))
        finally:
            worker.client.close()

    asyncio.run(act())


def met(broker: Running, *, joins: bool = True) -> tuple[Worker, bytes]:
    """Returns a worker that has a nonce, and its evidence; by default it has joined too."""
    kept: list[tuple[Worker, bytes]] = []

    async def act(worker: Worker) -> None:
        await worker.auth()
        kept.append((worker, worker.body()))
        if joins:
            await worker.attest(kept[0][1])
            await worker.fetch()

    talk(broker, act)
    return kept[0]


def sweep_at(broker: Running, now: float) -> None:
    """Runs a broker's clean-up as if the time were `now`."""
    while broker.decide(lambda _, view: ledger.sweep(view, now)):
        pass


@pytest.mark.threat("B2")
def test_a_used_nonce_that_a_replica_has_forgotten_is_not_new_to_one_whose_clock_is_behind(
    etcd: Cluster, place: Place
) -> None:
    with replica(place, etcd) as behind, replica(place, etcd) as ahead:
        worker, body = met(behind)
        with pytest.raises(BrokerRefusal, check=coded("broker.reused_nonce")):
            again(behind, worker, body)
        sweep_at(ahead, time.time() + 2 * HOUR)
        with pytest.raises(BrokerRefusal, match="clock", check=coded("broker.expired_nonce")):
            again(behind, worker, body)
        # Nonces that were made later are accepted.
        time.sleep(1.1)
        behind.join(1)


@pytest.mark.threat("B2")
def test_a_used_token_that_a_replica_has_forgotten_is_not_new_to_one_whose_clock_is_behind(
    etcd: Cluster, place: Place
) -> None:
    with replica(place, etcd) as behind, replica(place, etcd) as ahead:
        worker, _ = met(behind)
        sweep_at(ahead, time.time() + HOUR)
        with pytest.raises(BrokerRefusal, match="clock", check=coded("broker.expired_token")):
            again(behind, worker)


@pytest.mark.threat("B2")
def test_an_expired_nonce_and_token_stay_so_when_a_live_brokers_clock_is_moved_back(
    etcd: Cluster, place: Place
) -> None:
    wall = Wall()
    with replica(place, etcd, wall) as broker:
        unused, body = met(broker, joins=False)
        joined, _ = met(broker)
        wall.passed = HOUR
        with pytest.raises(BrokerRefusal, check=coded("broker.expired_nonce")):
            again(broker, unused, body)
        wall.shift = -HOUR
        with pytest.raises(BrokerRefusal, check=coded("broker.expired_nonce")):
            again(broker, unused, body)
        with pytest.raises(BrokerRefusal, check=coded("broker.expired_token")):
            again(broker, joined)
        # The broker continues with its own count of time.
        broker.join(2)


@pytest.mark.threat("B2")
def test_an_expired_nonce_stays_so_when_a_broker_starts_again_with_its_clock_moved_back(
    etcd: Cluster, place: Place
) -> None:
    wall = Wall()
    with replica(place, etcd, wall) as broker:
        unused, body = met(broker, joins=False)
        wall.passed = HOUR
        broker.join(1)
    wall.shift = -HOUR
    with replica(place, etcd, wall) as broker:
        with pytest.raises(BrokerRefusal, check=coded("broker.expired_nonce")):
            again(broker, unused, body)
        broker.join(2)


@pytest.mark.threat("B2")
def test_hardware_whose_chain_has_ended_stays_out_when_a_live_brokers_clock_is_moved_back(
    etcd: Cluster, place: Place
) -> None:
    wall = Wall()
    with replica(place, etcd, wall) as broker:
        wall.passed = 400 * 24 * HOUR
        for shift in (0, -wall.passed):
            wall.shift = shift
            with pytest.raises(UntrustedChain, check=coded("evidence.chain_expired")):
                broker.join(1)


@pytest.mark.threat("B2")
def test_brokers_whose_clocks_differ_give_each_rank_once(etcd: Cluster, place: Place) -> None:
    wall = Wall()
    wall.shift = -HOUR
    with replica(place, etcd) as one, replica(place, etcd, wall) as other:

        def ask(number: int) -> str:
            try:
                (one, other)[number % 2].join(number // 2, world=8)
            except BrokerRefusal as refusal:
                return refusal.code
            return "joined"

        with ThreadPoolExecutor(4) as threads:
            outcomes = list(threads.map(ask, range(16)))
    assert sorted(outcomes) == ["broker.rank_taken"] * 8 + ["joined"] * 8


def test_a_nonce_of_one_broker_is_not_taken_by_another_whose_clock_is_behind(
    etcd: Cluster, place: Place
) -> None:
    wall = Wall()
    wall.shift = -HOUR
    with replica(place, etcd) as one, replica(place, etcd, wall) as other:
        worker, body = met(one, joins=False)
        with pytest.raises(BrokerRefusal, match="clocks", check=coded("broker.expired_nonce")):
            again(other, worker, body)
        again(one, worker, body)


@pytest.mark.threat("B2")
def test_a_live_broker_whose_clock_jumps_ahead_decides_nothing_and_the_others_go_on(
    etcd: Cluster, place: Place
) -> None:
    wall = Wall()
    with replica(place, etcd) as right, replica(place, etcd, wall) as jumped:
        for hours in (2, 4):
            wall.shift = hours * HOUR
            with pytest.raises(
                BrokerUnavailable,
                match="set the clock right",
                check=coded("broker.store_unavailable"),
            ):
                met(jumped)
            with pytest.raises(
                BrokerUnavailable,
                match="set the clock right",
                check=coded("broker.store_unavailable"),
            ):
                asyncio.run(jumped.broker.sweep())
        assert right.decide(lambda _, view: audit.newest_time(view)) < time.time() + HOUR
        # The other broker still knows its nonces, and a worker that knows both brokers joins.
        client = BrokerClient(
            [("127.0.0.1", jumped.port), ("127.0.0.1", right.port)], [place.keys.authority]
        )
        name, key = WorkerName(JOB, 1), Ed25519PrivateKey.generate()
        asyncio.run(client.join(name, 4, key, place.attester, PATIENCE))
        wall.shift = 30  # a small error, as while a clock is being corrected
        jumped.join(2)
