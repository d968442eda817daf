"""Brokers that share one etcd have one memory, which survives the loss of a member."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from sealring.attest.broker import audit
from sealring.attest.broker.etcd import EtcdStore
from sealring.errors import BrokerRefusal, BrokerUnavailable, ConfigurationError
from tests.attest.broker.etcd_cluster import Cluster, cluster, needs_etcd
from tests.attest.broker.local import Place, running
from tests.codes import coded
from tests.ports import free_port


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster(tmp_path_factory.mktemp("etcd")) as started:
        yield started


@needs_etcd
@pytest.mark.threat("B5")
def test_two_replicas_give_each_rank_once_and_one_log_tells_it(etcd: Cluster, place: Place) -> None:
    stores = [EtcdStore(etcd.url, place.keys.name, place.keys.store_key) for _ in range(2)]
    with running(place, store=stores[0]) as one, running(place, store=stores[1]) as other:
        # For every rank two workers ask at the same time, one at each replica.
        def ask(number: int) -> str:
            try:
                (one, other)[number % 2].join(number // 2, world=8)
            except BrokerRefusal as refusal:
                return refusal.code
            return "joined"

        with ThreadPoolExecutor(8) as threads:
            outcomes = list(threads.map(ask, range(16)))
        assert sorted(outcomes) == ["broker.rank_taken"] * 8 + ["joined"] * 8

        key = Ed25519PrivateKey.generate()
        one.decide(lambda ledger, view: ledger.release(view, time.time(), _name(3)))
        one.join(3, key=key)
        one.revoke(3)
        with pytest.raises(BrokerRefusal, check=coded("broker.worker_revoked")):
            other.join(3, key=key)
        public = place.keys.audit_key.verifier
        found = stores[1].submit(lambda view: audit.check(view, public)).result()
        entries = found.entries
        assert found.checkpoint is not None
        assert found.checkpoint.size == len(entries)
        assert sum(entry["event"] == "joined" for entry in entries) == 9


@needs_etcd
@pytest.mark.threat("B7")
def test_joins_go_on_when_the_leader_is_killed(etcd: Cluster, place: Place) -> None:
    with running(place, store=EtcdStore(etcd.url, place.keys.name, place.keys.store_key)) as broker:
        key = Ed25519PrivateKey.generate()
        broker.join(0, key=key)
        etcd.kill(etcd.leader())
        start = time.monotonic()
        broker.join(1)
        taken = time.monotonic() - start
        # Earlier decisions are still known.
        with pytest.raises(BrokerRefusal, check=coded("broker.rank_taken")):
            broker.join(0)
        broker.join(0, key=key)
    # The promise is 5 s. The limit is higher, because the machine may be busy.
    assert taken < 30
    print(f"\njoined {taken:.2f} s after the leader was killed")


def test_a_store_that_is_not_there_is_said_to_be(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sealring.attest.broker.etcd._COMMIT_SECONDS", 0.3)
    store = EtcdStore(f"etcd://127.0.0.1:{free_port()}", "name", bytes(32))
    with pytest.raises(
        BrokerUnavailable,
        match="no member of etcd answers",
        check=coded("broker.store_unavailable"),
    ):
        store.submit(lambda view: view.get("x")).result()
    store.close()


@pytest.mark.parametrize(
    "url",
    ["etcd://", "http://127.0.0.1:1", "etcd://127.0.0.1:1?ca=x", "etcd://127.0.0.1:1?password=x"],
)
def test_a_url_that_is_none(url: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError):
        EtcdStore(url, "name", bytes(32))


def _name(rank: int):  # type: ignore[no-untyped-def]
    from sealring.core.identity.names import WorkerName
    from tests.attest.broker.local import JOB

    return WorkerName(JOB, rank)
