"""Follows every message and key of set-up with a reader written only from docs/spec.md."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import pytest
from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives.serialization import Encoding

from sealring import _native
from sealring.core.handshake import SecureChannel, SessionTable, Terms, accept, dial
from sealring.core.handshake.terms import PipeName, Purpose
from sealring.core.identity import Credentials
from sealring.core.links import Mesh, build_mesh
from sealring.core.links.agreement import Transport
from sealring.core.links.rendezvous import encode_addresses
from sealring.errors import SealringError, named
from tests.codes import coded
from tests.core.engine.local_world import Middle
from tests.core.handshake import spec_setup as spec
from tests.core.handshake.meeting import in_background, soon, terms
from tests.core.links.worlds import ISSUER, LOOPBACK, DictStore
from tests.imports import packages_imported_by


class Wire:
    """Listens in front of a worker and keeps what passes on each connection, in both directions."""

    def __init__(self, behind: tuple[str, int]) -> None:
        self.passed: list[tuple[bytearray, bytearray]] = []
        self._behind = behind
        self._ends: list[socket.socket] = []
        self._middles: list[Middle] = []
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._server.getsockname()[1]
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._server.accept()
                far = socket.create_connection(self._behind)
                self._ends += [near, far]
                streams = bytearray(), bytearray()
                self.passed.append(streams)
                for source, sink, kept in ((near, far, streams[0]), (far, near, streams[1])):
                    self._middles.append(Middle(source, sink, _keeping(kept)))

    def close(self) -> None:
        self._server.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._server.close()
        for middle in self._middles:
            middle.join(10)
        for end in self._ends:
            end.close()


def _keeping(kept: bytearray) -> Callable[[bytes], bytes]:
    def passed(data: bytes) -> bytes:
        kept.extend(data)
        return data

    return passed


class LeadingStore(DictStore):
    """A store that gives dialers a wire's address; a worker still finds its own address."""

    def __init__(self) -> None:
        super().__init__()
        self.wires: dict[int, Wire] = {}
        self._lock = threading.Lock()

    def view_of(self, rank: int) -> _View:
        return _View(self, rank)

    def led(self, rank: int) -> bytes:
        with self._lock:
            if rank not in self.wires:
                self.wires[rank] = Wire(self.address(rank))
        return json.dumps([["127.0.0.1", self.wires[rank].port]]).encode()


class _View:
    def __init__(self, store: LeadingStore, rank: int) -> None:
        self._store, self._rank = store, rank
        self.set, self.check, self.multi_set = store.set, store.check, store.multi_set

    def get(self, key: str) -> bytes:
        rank = int(key.rsplit("/", 1)[1])
        if "/address/" not in key or rank == self._rank:
            return self._store.get(key)
        return self._store.led(rank)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self.get(key) for key in keys]


def formed(
    store: LeadingStore,
    credentials: list[Credentials],
    tables: list[SessionTable],
    *,
    transport: Transport,
    led: bool,
    **settings: int,
) -> list[Mesh]:
    size = len(tables)
    members = tuple(reversed(range(size)))  # the group's order of members is not the order of ranks

    def form(rank: int) -> Mesh:
        return build_mesh(
            store.view_of(rank) if led else store,
            credentials[rank],
            terms(rank, world=size, members=members, settings={"record_bytes": 4096, **settings}),
            timeout=30.0,
            environ=LOOPBACK,
            transport=transport,
            sessions=tables[rank],
        )

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(form, range(size)))


def close(meshes: list[Mesh]) -> None:
    for mesh in meshes:
        for link in mesh.links:
            link.socket.close()
        if mesh.exchange is not None:
            mesh.exchange.stop()


def known(tables: list[SessionTable]) -> dict[bytes, spec.Session]:
    """Returns each session as the opener has it before it opens a connection."""
    found = {}
    for rank, table in enumerate(tables):
        for session in table.by_id.values():
            if session.peer_rank < rank:  # the higher rank dials
                found[session.id] = spec.Session(
                    bytes(session.opening.secret),
                    session.opening.step,
                    session.own_certificate.public_bytes(Encoding.DER),
                    session.peer_certificate.public_bytes(Encoding.DER),
                )
    return found


class Recorded:
    """A group of `size` that formed under sessions, with everything that passed."""

    def __init__(self, size: int, transport: Transport, **settings: int) -> None:
        self.tables = [SessionTable() for _ in range(size)]
        credentials = [ISSUER.credentials(rank, world=size) for rank in range(size)]
        close(
            formed(LeadingStore(), credentials, self.tables, transport="tcp", led=False, **settings)
        )
        sessions = known(self.tables)
        store = LeadingStore()
        self.meshes = formed(
            store, credentials, self.tables, transport=transport, led=True, **settings
        )
        close(self.meshes)
        for wire in store.wires.values():
            wire.close()
        self.streams = [each for wire in store.wires.values() for each in wire.passed]
        self.members = list(reversed(range(size)))
        self.connections: dict[tuple[int, int], spec.Connection] = {}
        """The connections by the ranks of dialer and acceptor."""
        for forth, back in self.streams:
            connection = spec.opened(bytes(forth), bytes(back), sessions.__getitem__)
            hello = connection.of("hello")[0].words
            self.connections[hello["sender"], hello["receiver"]] = connection


@pytest.fixture(scope="module")
def three() -> Recorded:
    return Recorded(3, "auto")


@pytest.fixture(scope="module")
def nine() -> Recorded:
    """A group whose first links are a tree."""
    return Recorded(9, "tcp")


def test_a_round_with_empty_entries_where_a_broker_gives_certificates() -> None:
    one = Recorded(9, "tcp", peer_evidence=0)
    for (child, _), connection in one.connections.items():
        ups = [spec.bundle_of(raw) for raw in connection.rounds(by_dialer=True)]
        downs = [spec.bundle_of(raw) for raw in connection.rounds(by_dialer=False)]
        assert [kind for kind, _, _ in ups] == [spec.UP] * 4
        assert [kind for kind, _, _ in downs] == [*[spec.DOWN] * 3, spec.AGREED]
        below = range(child, min(9, child + (child & -child)))
        assert ups[0][2] == dict.fromkeys(below, b"")
        assert downs[0][2] == dict.fromkeys(range(9), b"")
        assert {spec.Statement.parse(raw).rank for raw in downs[1][2].values()} == set(range(9))


@pytest.mark.parametrize(
    ("changes", "error", "misdirected"),
    [
        ({"epoch": "other"}, "handshake.wrong_group", True),
        ({"settings": {"record_bytes": 1024}}, "handshake.settings_mismatch", False),
    ],
)
def test_a_refusal(changes: dict[str, Any], error: str, misdirected: bool) -> None:
    tables = [SessionTable(), SessionTable()]
    credentials = [ISSUER.credentials(rank) for rank in range(2)]

    def meet(
        port: int, server: socket.socket, own: Terms, heard: AbstractContextManager[Any]
    ) -> SecureChannel | BaseException:
        near = socket.create_connection(("127.0.0.1", port))
        far, _ = server.accept()

        def answer() -> SecureChannel:
            return accept(far, credentials[0], terms(0), soon(), sessions=tables[0])

        with in_background(answer) as answered, heard:
            dial(near, credentials[1], own, 0, soon(), tables[1]).close(until=0)
        return answered[0]

    with socket.create_server(("127.0.0.1", 0)) as server:
        met = meet(server.getsockname()[1], server, terms(1), contextlib.nullcontext())
        assert isinstance(met, SecureChannel)
        met.close(until=0)
        sessions = known(tables)
        wire = Wire(server.getsockname())
        refused = meet(
            wire.port, server, terms(1, **changes), pytest.raises(SealringError, check=coded(error))
        )
        assert named(refused) == error
        wire.close()
    ((forth, back),) = wire.passed
    connection = spec.opened(bytes(forth), bytes(back), sessions.__getitem__)
    hello, *again = [each for each in connection.said if each.by_dialer]
    (refusal,) = [each for each in connection.said if not each.by_dialer]
    assert hello.words["type"] == "hello"
    for each in (refusal, *again):  # the dialer may send the refusal back
        assert each.words["error"] == error
        assert ("misdirected" in each.words) == misdirected


def test_every_message_of_a_link(three: Recorded) -> None:
    assert set(three.connections) == {(1, 0), (2, 0), (2, 1)}
    for connection in three.connections.values():
        said = [
            (each.by_dialer, each.words["type"] if each.raw[0] >= 0x20 else each.raw[0])
            for each in connection.said
        ]
        setting_up = [
            (True, "hello"), (True, "accept"), (True, "transport"), (True, "linked"),
        ]  # fmt: skip
        answered = [
            (False, "hello"), (False, "link"), (False, "transport"), (False, "linked"),
        ]  # fmt: skip
        assert said[:4] == setting_up
        assert [each for each in said if not each[0]][:4] == answered
        assert {each.words["transport"] for each in connection.of("transport")} == {"shm"}
        offers = [each.words["shm"] for kind in ("accept", "link") for each in connection.of(kind)]
        assert None not in offers
    linked = three.connections[2, 1].of("linked")
    hellos = {
        each.words["sender"]: each.words["instance"]
        for connection in three.connections.values()
        for each in connection.of("hello")
    }
    assert [each.words["instances"] for each in linked] == [
        {str(rank): hellos[rank] for rank in sorted({0, 1, 2} - {own})} for own in (2, 1)
    ]


def test_without_an_offer_the_acceptor_says_tcp(nine: Recorded) -> None:
    for connection in nine.connections.values():
        assert [each.words["shm"] for each in connection.of("accept")] == [None]
        assert not connection.of("link")
        transports = connection.of("transport")
        assert [(each.by_dialer, each.words["transport"]) for each in transports] == [
            (False, "tcp")
        ]
        assert not connection.of("linked")


@pytest.mark.parametrize("size", [3, 9])
def test_keys(size: int, request: pytest.FixtureRequest) -> None:
    one: Recorded = request.getfixturevalue("three" if size == 3 else "nine")
    # The parent of rank i is i with its lowest set bit cleared.
    tree = {(rank, rank & (rank - 1)) for rank in range(1, size)}
    assert set(one.connections) == ({(1, 0), (2, 0), (2, 1)} if size == 3 else tree)
    for (dialer, acceptor), connection in one.connections.items():
        keys = spec.link_keys(connection, one.members)
        for rank, peer, mine in ((dialer, acceptor, keys), (acceptor, dialer, keys[::-1])):
            (link,) = [each for each in one.meshes[rank].links if each.peer == peer]
            assert (bytes(link.send_key), bytes(link.receive_key)) == mine
        session = one.tables[dialer].with_rank(acceptor)
        assert session is not None
        assert bytes(session.opening.secret) == connection.next_secret
        assert session.opening.step == 1


@pytest.mark.parametrize("size", [3, 9])
def test_the_agreement(size: int, request: pytest.FixtureRequest) -> None:
    one: Recorded = request.getfixturevalue("three" if size == 3 else "nine")
    hello = next(iter(one.connections.values())).of("hello")[0].words
    everyone = list(range(size))
    for (child, parent), connection in one.connections.items():
        if parent != child & (child - 1):
            assert not [each for each in connection.said if each.raw[0] < 0x20]
            continue
        ups = [spec.bundle_of(raw) for raw in connection.rounds(by_dialer=True)]
        downs = [spec.bundle_of(raw) for raw in connection.rounds(by_dialer=False)]
        assert [kind for kind, _, _ in ups] == [spec.UP] * 3
        assert [kind for kind, _, _ in downs] == [spec.DOWN, spec.DOWN, spec.AGREED]
        below = list(range(child, min(size, child + (child & -child))))
        for (_, _, up), (_, _, down) in zip(ups, downs, strict=True):
            assert list(up) == below
            assert list(down) == everyone
            assert up.items() <= down.items()
        (_, _, stated), (_, _, signed), (_, transcript, shown) = downs
        statements = {rank: spec.Statement.parse(raw) for rank, raw in stated.items()}
        assert spec.transcript_of(hello, one.members, statements) == transcript
        for rank, statement in statements.items():
            assert statement.rank == rank
            assert statement.addresses
            spec.check_signature(statement, signed[rank], transcript)
            spec.check_confirmation(statement, shown[rank])
        keys = spec.group_keys(transcript, one.members, statements)
        (link,) = [each for each in one.meshes[child].links if each.peer == parent]
        assert link.peer_group_key == _native.Secret(keys[parent])
        assert one.meshes[child].agreed.transcript == transcript
    for (dialer, acceptor), connection in one.connections.items():
        # To a child in the tree, the last round's message replaces "ready".
        said = connection.of("ready")
        in_tree = acceptor == dialer & (dialer - 1)
        assert [each.by_dialer for each in said] == ([True] if in_tree else [True, False])
        assert {each.words["transcript"] for each in said} == {transcript.hex()}


@pytest.mark.parametrize(("purpose", "lane"), [("messages", 0), ("collectives", 2)])
def test_pipes_that_are_opened_after_forming(purpose: Purpose, lane: int) -> None:
    tables = [SessionTable() for _ in range(3)]
    credentials = [ISSUER.credentials(rank, world=3) for rank in range(3)]
    meshes = formed(LeadingStore(), credentials, tables, transport="auto", led=False)
    acceptor, dialer = meshes[0].exchange, meshes[2].exchange
    assert acceptor is not None
    assert dialer is not None
    members = dialer.agreed.members
    assert isinstance(members, dict)
    sessions, wire = known(tables), Wire(members[0].addresses[0])
    led = encode_addresses([("127.0.0.1", wire.port)]).encode()
    members[0] = members[0]._replace(stated_addresses=led)
    lanes = range(1, lane + 1) if lane else [0]
    with in_background(
        lambda: acceptor.open_agreed([PipeName(2, purpose, each) for each in lanes], 20.0)
    ) as others:
        links = dialer.open_agreed([PipeName(0, purpose, each) for each in lanes], 20.0)
    assert isinstance(others[0], list)
    (*rest, own), (*more, theirs) = links, others[0]
    pair = [own, theirs]
    for each in (*rest, *more):
        each.discard()
    close(meshes)
    wire.close()
    streams = [(bytes(forth), bytes(back)) for forth, back in wire.passed]
    for number, (forth, back) in enumerate(streams):
        connection = spec.opened(forth, back, sessions.__getitem__)
        ident = forth[5:21]
        sessions[ident] = replace(
            sessions[ident], secret=connection.next_secret, step=sessions[ident].step + 1
        )
        for hello in connection.of("hello"):
            assert hello.words["purpose"] == purpose
            assert hello.words["lane"] == (number + 1 if lane else 0)
            assert hello.words["transcript"] == meshes[0].agreed.transcript.hex()
        assert connection.said[-1].words == {"type": "transport", "transport": "shm"}
    keys = spec.link_keys(connection, reversed(range(3)))
    for link, mine in zip(pair, (keys, keys[::-1]), strict=True):
        assert (link.purpose, link.lane) == (purpose, lane)
        assert (bytes(link.send_key), bytes(link.receive_key)) == mine
        link.discard()


def test_what_was_changed_is_refused(three: Recorded) -> None:
    sessions = known(three.tables)
    forth, back = (bytes(each) for each in three.streams[0])
    with pytest.raises(spec.NotTheSpecification, match="the step"):
        spec.opened(forth, back, sessions.__getitem__)  # the session has moved on by one step
    connection = three.connections[1, 0]
    (_, _, stated), (_, _, signed), _ = [
        spec.bundle_of(raw) for raw in connection.rounds(by_dialer=False)
    ]
    statement = spec.Statement.parse(stated[0])
    with pytest.raises(InvalidSignature):
        spec.check_signature(statement, signed[0], bytes(32))
    with pytest.raises(spec.NotTheSpecification, match="a commitment"):
        spec.check_confirmation(statement, bytes(32))
    with pytest.raises(InvalidTag):
        list(spec.frames(spec.HEADER + (20).to_bytes(2, "big") + bytes(20), bytes(32)))


def test_the_reader_knows_nothing_of_sealring() -> None:
    imported = packages_imported_by(spec)
    assert "cryptography" in imported
    assert not imported & {"sealring", "tests"}
