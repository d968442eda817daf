"""An attacker who can write to the broker's store tries to get its own key certified."""

from __future__ import annotations

import asyncio
import base64
import json
import shutil
import sqlite3
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from sealring import errors
from sealring.core.identity.names import WorkerName
from tests.attest.broker.etcd_cluster import Cluster, cluster, needs_etcd
from tests.attest.broker.local import JOB, Place, Running, running
from tests.attest.broker.test_hostile_clients import Worker, talk

HOLDER = f"rank/{JOB}/00000"
Rows = dict[str, bytes]


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def public(key: Ed25519PrivateKey) -> bytes:
    return key.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)


def with_key(row: bytes, key: Ed25519PrivateKey) -> bytes:
    changed = json.loads(row)
    changed["facts"]["public_key"] = public(key).hex()
    return json.dumps(changed, sort_keys=True, separators=(",", ":")).encode()


def read(place: Place) -> Rows:
    with sqlite3.connect(place.database) as connection:
        found = dict(connection.execute("SELECT key, value FROM rows").fetchall())
    connection.close()
    return found


def write(place: Place, changes: dict[str, bytes | None]) -> None:
    connection = sqlite3.connect(place.database)
    for key, value in changes.items():
        connection.execute("DELETE FROM rows WHERE key = ?", (key,))
        if value is not None:
            connection.execute("INSERT INTO rows VALUES (?, ?)", (key, value))
    connection.commit()
    connection.close()


def certified_key(broker: Running, change: Callable[[], None]) -> bytes:
    """Changes the store before the broker signs; returns the key that was certified."""

    async def act(worker: Worker) -> tuple[bytes, bytes]:
        await worker.auth()
        await worker.attest()
        await asyncio.to_thread(change)
        pem = json.loads(await worker.fetch())["certificate"]
        certificate = x509.load_pem_x509_certificate(pem.encode())
        found = certificate.public_key()
        return found.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo), public(
            worker.key
        )

    certified, own = talk(broker, act)
    assert certified == own, "the certificate is for another key than the one that was attested"
    return certified


@pytest.mark.threat("B10")
def test_a_key_written_into_a_row_is_not_certified(place: Place) -> None:
    thief = Ed25519PrivateKey.generate()
    with running(place) as broker:
        certified_key(broker, lambda: write(place, {HOLDER: with_key(read(place)[HOLDER], thief)}))


def assert_tampered(place: Place) -> None:
    store = place.open_store()
    try:
        with pytest.raises(errors.TamperedStore):
            store.submit(lambda view: view.get(HOLDER)).result()
    finally:
        store.close()


def row_put_back(rows: Rows, earlier: Rows) -> dict[str, bytes | None]:
    return {HOLDER: earlier[HOLDER]}


def revocation_taken_back(rows: Rows, earlier: Rows) -> dict[str, bytes | None]:
    return {key: None for key in rows if key.startswith(("out/", "barred/"))}


def row_of_another_rank(rows: Rows, earlier: Rows) -> dict[str, bytes | None]:
    return {HOLDER: rows[f"rank/{JOB}/00001"]}


def row_added(rows: Rows, earlier: Rows) -> dict[str, bytes | None]:
    return {f"rank/{JOB}/00009": rows[HOLDER]}


def nonce_forgotten(rows: Rows, earlier: Rows) -> dict[str, bytes | None]:
    return {key: None for key in rows if key.startswith("nonce/")}


def state_of_an_earlier_time(rows: Rows, earlier: Rows) -> dict[str, bytes | None]:
    return {"state": earlier["state"]}


def nothing_left_but_the_log(rows: Rows, earlier: Rows) -> dict[str, bytes | None]:
    return {key: None for key in rows if not key.startswith("audit/0")}


@pytest.mark.parametrize(
    "attack",
    [
        row_put_back, revocation_taken_back, row_of_another_rank, row_added, nonce_forgotten,
        state_of_an_earlier_time, nothing_left_but_the_log,
    ],
)  # fmt: skip
@pytest.mark.threat("B10")
def test_rows_changed_while_no_broker_runs(
    attack: Callable[[Rows, Rows], dict[str, bytes | None]], place: Place
) -> None:
    with running(place) as broker:
        broker.join(0)
        broker.join(1)
        earlier = read(place)
        broker.revoke(0)
        broker.decide(lambda ledger, view: ledger.release(view, time.time(), WorkerName(JOB, 0)))
        broker.join(0)
        broker.revoke(0)
        rows = read(place)
    write(place, attack(rows, earlier))
    assert_tampered(place)


@pytest.mark.parametrize("older", ["copy", "empty"])
@pytest.mark.threat("B11")
def test_an_older_copy_of_the_whole_store_is_noticed(older: str, place: Place) -> None:
    kept = place.directory / "older.sqlite"
    with running(place) as broker:
        broker.join(0)
    if older == "copy":
        shutil.copyfile(place.database, kept)
    with running(place) as broker:
        broker.revoke(0)
    for file in place.ca.glob("broker.sqlite*"):
        file.unlink()
    if older == "copy":
        shutil.move(kept, place.database)
    assert_tampered(place)


# ---- etcd


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster(tmp_path_factory.mktemp("etcd"), members=1) as started:
        yield started


def call(etcd: Cluster, verb: str, request: dict[str, Any]) -> Any:
    address = etcd.url.removeprefix("etcd://").split(",")[0]
    body = json.dumps(request).encode()
    with urllib.request.urlopen(f"http://{address}/v3/kv/{verb}", body, timeout=10) as answer:
        return json.load(answer)


@needs_etcd
@pytest.mark.threat("B10")
def test_a_key_written_into_etcd_is_not_certified(etcd: Cluster, place: Place) -> None:
    from sealring.attest.broker.etcd import EtcdStore

    thief = Ed25519PrivateKey.generate()
    name = base64.b64encode(f"sealring/{place.keys.name}/{HOLDER}".encode()).decode()

    def change() -> None:
        row = base64.b64decode(call(etcd, "range", {"key": name})["kvs"][0]["value"])
        forged = base64.b64encode(with_key(row, thief)).decode()
        call(etcd, "put", {"key": name, "value": forged})

    def opened() -> EtcdStore:
        return EtcdStore(etcd.url, place.keys.name, place.keys.store_key)

    with running(place, store=opened()) as broker:
        certified_key(broker, change)
    change()
    store = opened()
    with pytest.raises(errors.TamperedStore):
        store.submit(lambda view: view.get(HOLDER)).result()
    store.close()
