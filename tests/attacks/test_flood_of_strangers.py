"""Strangers without valid evidence try to fill the broker's disk and memory."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from OpenSSL import SSL

from sealring.attest.broker import audit
from sealring.attest.broker.client import BrokerClient
from sealring.attest.broker.messages import ATTEST
from sealring.attest.broker.tls import client_context
from sealring.core.identity.names import WorkerName
from tests.attest.broker.local import JOB, Place, running
from tests.attest.broker.test_hostile_clients import Worker, refused, talk
from tests.codes import coded
from tests.ports import free_port

REQUESTS = 100
HALF_SENT = 150


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def rows(place: Place) -> list[str]:
    connection = sqlite3.connect(place.database)
    found = [key for (key,) in connection.execute("SELECT key FROM rows")]
    connection.close()
    return found


@pytest.mark.threat("B8")
def test_refused_strangers_do_not_grow_the_store(place: Place) -> None:
    with running(place) as broker:
        broker.join(0)
        before = rows(place)

        async def evidence_for_another_nonce(worker: Worker) -> None:
            for _ in range(REQUESTS):
                await worker.auth()
                body = worker.body(nonce=bytes(32))
                response = await worker.client.ask("POST", ATTEST, body, worker.cookie)
                assert b"evidence.not_bound" in response.body

        async def no_nonce(worker: Worker) -> None:
            worker.nonce = bytes(32)
            await worker.attest()

        talk(broker, evidence_for_another_nonce)
        assert refused(broker, no_nonce).code == "broker.unknown_nonce"
        after = rows(place)
        added = set(after) - set(before)
        assert len(added) <= 1, f"{len(added)} rows for {REQUESTS} refused strangers"
    # Refused strangers are counted, and only the last few of them are stored.
    store = place.open_store()
    from sealring.attest.broker import strangers

    seen = store.submit(strangers.refused).result()
    store.close()
    assert seen["counts"] == {"evidence.not_bound": REQUESTS, "broker.unknown_nonce": 1}
    assert len(seen["last"]) == strangers.LAST
    assert set(rows(place)) - set(before) <= {
        f"refused/{socket.gethostname()}", "state"
    }  # fmt: skip


def test_the_log_still_tells_of_those_that_passed_the_policy(place: Place) -> None:
    from sealring.errors import BrokerRefusal

    with running(place) as broker:
        broker.join(0)
        with pytest.raises(BrokerRefusal, check=coded("broker.rank_taken")):
            broker.join(0)
        public = place.keys.audit_key.verifier
        entries = broker.store.submit(lambda view: audit.check(view, public)).result().entries
    assert [entry["event"] for entry in entries] == ["joined", "gave", "refused"]


# ---- memory


def resident_mib(process: int) -> float:
    with open(f"/proc/{process}/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / (1 << 20)


def half_send(place: Place, port: int) -> tuple[socket.socket, SSL.Connection]:
    sock = socket.create_connection(("127.0.0.1", port))
    sock.settimeout(10)
    connection = SSL.Connection(client_context([place.keys.authority]), sock)
    connection.set_connect_state()
    while True:
        try:
            connection.do_handshake()
            break
        except SSL.WantReadError:
            time.sleep(0.01)
    body = 560 << 10
    head = f"POST {ATTEST} HTTP/1.1\r\nHost: here\r\nContent-Length: {body}\r\n\r\n"
    data = head.encode() + b"x" * (body - 1)
    try:
        for start in range(0, len(data), 16 << 10):
            connection.send(data[start : start + (16 << 10)])
    except (SSL.Error, OSError):
        pass  # the broker has closed the connection
    return sock, connection


@pytest.mark.threat("B9")
def test_half_sent_requests_take_bounded_memory(place: Place) -> None:
    port = free_port()
    command = [
        sys.executable, "-m", "sealring.cli", "broker", "--policy", str(place.policy),
        "--ca", str(place.ca), "--listen", f"127.0.0.1:{port}", "--page", "none",
        "--name", "127.0.0.1",
    ]  # fmt: skip
    broker = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    held = []
    try:
        until = time.monotonic() + 60
        while time.monotonic() < until:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.1)
        held.append(half_send(place, port))
        before = resident_mib(broker.pid)
        for _ in range(HALF_SENT):
            held.append(half_send(place, port))
        grown = resident_mib(broker.pid) - before
        print(json.dumps({"half_sent": HALF_SENT, "grown_mib": round(grown)}))
        # The limit allows 32 MiB of bodies, and what TLS and Python hold for each connection.
        assert grown < 72, f"{HALF_SENT} half-sent requests took {grown:.0f} MiB"
        # The broker still serves a worker meanwhile.
        client = BrokerClient([("127.0.0.1", port)], [place.keys.authority])
        key = Ed25519PrivateKey.generate()
        asyncio.run(client.join(WorkerName(JOB, 0), 1, key, place.attester, 30.0))
    finally:
        for sock, _ in held:
            sock.close()
        broker.terminate()
        broker.wait(30)
