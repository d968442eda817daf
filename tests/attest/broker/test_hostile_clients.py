"""Clients that replay, forge, flood or take their time do not harm a broker."""

from __future__ import annotations

import asyncio
import base64
import json
import socket
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from sealring.attest.broker.envelopes import new_key, open_envelope, public_jwk
from sealring.attest.broker.messages import (
    ATTEST,
    AUTH,
    PROTOCOL,
    RESOURCE,
    error_of,
    parse_attestation,
    write_attestation,
)
from sealring.attest.broker.tls import Client, client_context, connect
from sealring.core.identity.names import WorkerName
from sealring.errors import (
    AttestationError,
    BrokerRefusal,
    MalformedRequest,
    SealringError,
)
from sealring.formats.bounded_connections import LEAST_SECONDS
from sealring.formats.http import Response, ServerLimits
from sealring.formats.log.broker_entries import CERTIFICATE
from tests.attest.broker.local import JOB, Place, Running, running
from tests.attest.broker.variants import variants
from tests.codes import coded

HELLO = json.dumps({"version": PROTOCOL, "tee": "sample", "extra-params": {}}).encode()


class Worker:
    """One conversation, step by step. The test controls everything that is sent."""

    def __init__(self, client: Client, place: Place, rank: int = 0) -> None:
        self.client, self.place, self.rank = client, place, rank
        self.key = Ed25519PrivateKey.generate()
        self.envelope = new_key()
        self.nonce = b""
        self.cookie: dict[str, str] = {}
        self.token = ""

    async def auth(self) -> None:
        response = good(await self.client.ask("POST", AUTH, HELLO))
        self.nonce = base64.b64decode(json.loads(response.body)["nonce"])
        self.cookie = {"cookie": response.headers["set-cookie"].partition(";")[0]}

    def body(self, nonce: bytes | None = None, key: Ed25519PrivateKey | None = None) -> bytes:
        public = self.key.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
        evidence = self.place.attester.attest(nonce or self.nonce, public, {}).encode()
        name = WorkerName(JOB, self.rank)
        jwk = public_jwk(self.envelope)
        return write_attestation(self.nonce, jwk, name, 4, key or self.key, evidence)

    async def attest(self, body: bytes | None = None) -> None:
        response = good(await self.client.ask("POST", ATTEST, body or self.body(), self.cookie))
        self.token = json.loads(response.body)["token"]

    async def fetch(self, path: str = CERTIFICATE) -> bytes:
        bearer = {"authorization": f"Bearer {self.token}"}
        response = good(await self.client.ask("GET", RESOURCE + path, headers=bearer))
        return open_envelope(json.loads(response.body), self.envelope)


def good(response: Response) -> Response:
    if response.status != 200:
        raise error_of(response, "here")
    return response


def talk(broker: Running, act: Callable[[Worker], Awaitable[Any]]) -> Any:
    async def run() -> Any:
        context = client_context([broker.place.keys.authority])
        client = Client(await connect("127.0.0.1", broker.port, context), "here")
        try:
            return await act(Worker(client, broker.place))
        finally:
            client.close()

    return asyncio.run(run())


def refused(broker: Running, act: Callable[[Worker], Awaitable[Any]]) -> SealringError:
    with pytest.raises(SealringError) as caught:
        talk(broker, act)
    return caught.value


@pytest.mark.threat("B1")
def test_a_nonce_is_good_once_even_for_its_own_worker(broker: Running) -> None:
    async def act(worker: Worker) -> None:
        await worker.auth()
        body = worker.body()
        await worker.attest(body)
        await worker.attest(body)

    assert refused(broker, act).code == "broker.reused_nonce"


@pytest.mark.threat("B1")
def test_a_nonce_is_used_up_by_evidence_that_failed(broker: Running) -> None:
    async def act(worker: Worker) -> None:
        await worker.auth()
        with pytest.raises(AttestationError, check=coded("evidence.not_bound")):
            await worker.attest(worker.body(nonce=bytes(32)))
        await worker.attest()

    assert refused(broker, act).code == "broker.reused_nonce"


@pytest.mark.threat("B1")
def test_a_nonce_of_another_session_or_of_none(broker: Running) -> None:
    async def another_session(worker: Worker) -> None:
        await worker.auth()
        nonce = worker.nonce
        await worker.auth()
        worker.nonce = nonce
        await worker.attest()

    async def without_name(worker: Worker) -> None:
        await worker.auth()
        worker.nonce = bytes(32)
        await worker.attest()

    async def no_session(worker: Worker) -> None:
        await worker.auth()
        worker.cookie = {}
        await worker.attest()

    for act in (another_session, without_name, no_session):
        assert refused(broker, act).code == "broker.unknown_nonce"


@pytest.mark.threat("B1")
def test_an_old_nonce_and_an_old_token(place: Place) -> None:
    place.write_policy("[freshness]\nnonce_seconds = 10\n")
    now = [1_800_000_000.0]
    store = place.open_store()
    place.clock = place.boottime = lambda: now[0]
    broker = place.broker(store)

    async def act() -> None:
        session, nonce, _ = await broker.challenge(HELLO)
        worker = Worker(None, place)  # type: ignore[arg-type]
        worker.nonce = nonce
        body = worker.body()
        now[0] += 11
        with pytest.raises(BrokerRefusal, check=coded("broker.expired_nonce")):
            await broker.attest(session, body)
        session, worker.nonce, _ = await broker.challenge(HELLO)
        token = await broker.attest(session, worker.body())
        now[0] += 301
        with pytest.raises(BrokerRefusal, check=coded("broker.expired_token")):
            await broker.resource(token, CERTIFICATE)

    asyncio.run(act())
    broker.close()
    store.close()


@pytest.mark.threat("B3")
def test_a_token_fetches_a_thing_once(broker: Running) -> None:
    async def act(worker: Worker) -> None:
        await worker.auth()
        await worker.attest()
        await worker.fetch()
        await worker.fetch()

    assert refused(broker, act).code == "broker.reused_token"


@pytest.mark.threat("B3")
def test_a_token_of_ones_own_making(broker: Running) -> None:
    async def act(worker: Worker) -> None:
        await worker.auth()
        await worker.attest()
        head, claims, signature = worker.token.split(".")
        forged = json.loads(base64.urlsafe_b64decode(claims + "=="))
        forged["sealring"]["name"] = WorkerName(JOB, 3).uri
        text = base64.urlsafe_b64encode(json.dumps(forged).encode()).decode().rstrip("=")
        for token in (f"{head}.{text}.{signature}", f"eyJhbGciOiJub25lIn0.{text}."):
            worker.token = token
            with pytest.raises(BrokerRefusal, check=coded("broker.unknown_token")):
                await worker.fetch()

    talk(broker, act)


@pytest.mark.threat("B3")
def test_a_stolen_token_fetches_nothing_that_opens(broker: Running) -> None:
    async def act(worker: Worker) -> None:
        await worker.auth()
        await worker.attest()
        worker.envelope = new_key()
        await worker.fetch()

    assert refused(broker, act).code == "broker.malformed_answer"


@pytest.mark.threat("B4")
def test_evidence_for_another_key_and_a_key_that_is_not_ones_own(broker: Running) -> None:
    async def relayed(worker: Worker) -> None:
        """An honest worker's evidence, sent by a stranger with another key."""
        await worker.auth()
        honest = json.loads(worker.body())
        worker.key = Ed25519PrivateKey.generate()
        mine = json.loads(worker.body())
        mine["tee-evidence"] = honest["tee-evidence"]
        await worker.attest(json.dumps(mine).encode())

    async def another_key(worker: Worker) -> None:
        await worker.auth()
        await worker.attest(worker.body(key=Ed25519PrivateKey.generate()))

    async def another_rank(worker: Worker) -> None:
        await worker.auth()
        body = json.loads(worker.body())
        body["runtime-data"]["worker"]["name"] = WorkerName(JOB, 3).uri
        await worker.attest(json.dumps(body).encode())

    assert refused(broker, relayed).code == "evidence.not_bound"
    assert refused(broker, another_key).code == "evidence.not_bound"
    assert type(refused(broker, another_rank)) is MalformedRequest


@pytest.mark.threat("B3")
def test_a_token_is_worth_nothing_once_its_rank_is_anothers(place: Place) -> None:
    place.write_policy(top="rejoins = 1")
    with running(place) as broker:

        async def act(worker: Worker) -> None:
            await worker.auth()
            await worker.attest()
            await asyncio.to_thread(broker.join, 0)
            await worker.fetch()

        assert refused(broker, act).code == "broker.rank_taken"


@pytest.mark.threat("B14")
def test_what_is_not_granted_is_not_there_or_outside(place: Place) -> None:
    (place.data_keys / "a" / "b").mkdir(parents=True)
    (place.data_keys / "a" / "b" / "secret").write_bytes(b"secret")
    (place.data_keys / "a" / "b" / "secret").chmod(0o600)
    with running(place) as broker:

        async def act(worker: Worker) -> None:
            await worker.auth()
            await worker.attest()
            with pytest.raises(BrokerRefusal, check=coded("broker.resource_not_granted")):
                await worker.fetch("a/b/secret")
            for path in ("../ca/authority.key", "a/../../ca", "a/b/..", "%2e%2e/ca/authority.key"):
                with pytest.raises(BrokerRefusal, check=coded("broker.no_such_resource")):
                    await worker.fetch(path)

        talk(broker, act)


@pytest.mark.threat("B4")
def test_every_field_of_a_request_changed_in_turn(broker: Running) -> None:
    async def collect(worker: Worker) -> bytes:
        await worker.auth()
        return worker.body()

    body = json.loads(talk(broker, collect))
    parse_attestation(json.dumps(body).encode())

    def of_leaf(value: Any) -> tuple[Any, ...]:
        if isinstance(value, str):
            return (value + "A", value[1:], None, 7)
        return (None, "x", -1, True, 1 << 70)

    for name in ("runtime-data", "signature"):
        for changed in variants(body[name], of_leaf):
            with pytest.raises(MalformedRequest):
                parse_attestation(json.dumps({**body, name: changed}).encode())
    for data in (b"", b"[]", b"{", b"\xff", b'{"a": 1, "a": 1}', b"[" * 100_000):
        with pytest.raises(MalformedRequest):
            parse_attestation(data)


@pytest.mark.threat("B9")
def test_requests_that_are_too_large(broker: Running) -> None:
    async def act(worker: Worker) -> None:
        good(await worker.client.ask("POST", ATTEST, b"x" * (ServerLimits().body_bytes + 1)))

    assert refused(broker, act).code == "broker.request_too_large"


def test_requests_that_are_nothing(broker: Running) -> None:
    async def wrong_method(worker: Worker) -> None:
        good(await worker.client.ask("GET", AUTH))

    async def wrong_version(worker: Worker) -> None:
        old = json.dumps({"version": "0.1.0", "tee": "sample", "extra-params": {}}).encode()
        good(await worker.client.ask("POST", AUTH, old))

    async def nowhere(worker: Worker) -> None:
        good(await worker.client.ask("GET", "/kbs/v0/admin"))

    assert type(refused(broker, wrong_method)) is MalformedRequest
    assert type(refused(broker, wrong_version)) is MalformedRequest
    assert refused(broker, nowhere).code == "broker.no_such_resource"


def test_the_page_is_not_where_workers_ask(broker: Running) -> None:
    async def act(worker: Worker) -> None:
        good(await worker.client.ask("GET", "/"))

    assert refused(broker, act).code == "broker.no_such_resource"


@pytest.mark.threat("B9")
def test_more_requests_than_the_rate_allows(place: Place) -> None:
    with running(place, ServerLimits(requests_per_second=0.001, burst=3)) as broker:

        async def act(worker: Worker) -> None:
            for _ in range(3):
                await worker.auth()
            await worker.auth()

        assert refused(broker, act).code == "broker.too_many_requests"


@pytest.mark.threat("B9")
def test_slow_clients_are_cut_off_and_others_are_served(place: Place) -> None:
    limits = ServerLimits(request_seconds=0.5, idle_seconds=0.5)
    with running(place, limits) as broker:
        address = ("127.0.0.1", broker.port)
        # Some send nothing, some a byte of TLS. None is answered, and all are cut off.
        slow = [socket.create_connection(address) for _ in range(20)]
        for sock in slow[:10]:
            sock.send(b"\x16")

        async def half_a_request(worker: Worker) -> None:
            await worker.client.stream.write(b"POST /kbs/v0/auth HTTP/1.1\r\n")
            good(await worker.client.receive())

        assert refused(broker, half_a_request).code == "broker.request_too_slow"
        for sock in slow:
            sock.settimeout(30)
            with suppress(ConnectionResetError):
                assert sock.recv(1) == b""
            sock.close()
    with running(place) as broker:
        broker.join(0)


@pytest.mark.threat("B9")
def test_connections_beyond_the_limit_end_the_oldest_that_is_idle(place: Place) -> None:
    with running(place, ServerLimits(connections_per_address=5)) as broker:
        address = ("127.0.0.1", broker.port)
        idle = [socket.create_connection(address) for _ in range(5)]
        time.sleep(2 * LEAST_SECONDS)
        broker.join(0)
        idle[0].settimeout(30)
        with suppress(ConnectionResetError):
            assert idle[0].recv(1) == b""
        for sock in idle:
            sock.close()


def test_two_requests_in_one_breath_are_both_answered(broker: Running) -> None:
    async def act(worker: Worker) -> None:
        head = f"POST {AUTH} HTTP/1.1\r\nHost: here\r\nContent-Length: {len(HELLO)}\r\n\r\n"
        await worker.client.stream.write(2 * (head.encode() + HELLO))
        received = b""
        while received.count(b"HTTP/1.1 200") < 2:
            more = await worker.client.stream.read()
            assert more
            received += more

    talk(broker, act)


@pytest.mark.threat("B9")
def test_noise_instead_of_tls_and_of_http(broker: Running) -> None:
    for noise in (b"GET / HTTP/1.1\r\n\r\n", bytes(1000), b"\x16\x03\x01\xff\xff" + bytes(500)):
        with socket.create_connection(("127.0.0.1", broker.port)) as sock:
            sock.settimeout(30)
            sock.sendall(noise)
            sock.shutdown(socket.SHUT_WR)
            with suppress(ConnectionResetError):
                while sock.recv(4096):
                    pass

    async def act(worker: Worker) -> None:
        await worker.client.stream.write(b"\x00\x01\x02 not http at all\r\n\r\n")
        good(await worker.client.receive())

    assert type(refused(broker, act)) is MalformedRequest
    broker.join(0)
