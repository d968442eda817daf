"""A live member lies on links that are made late: at either end, by TLS and by session.

The liar was admitted and holds a valid certificate, so it gets as far as any member. It sends
messages out of turn, twice, of another group or epoch, half, or never. The rank that it lies to
ends the connection with an error that names the liar. No other rank is accused, and the group goes
on unless it needs the liar. Rank 6 is the liar's neighbour in the tree, so the two have a session.
"""

from __future__ import annotations

import contextlib
import gc
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sealring import _native
from sealring.core.handshake.channel import receive_message, send_message, understood
from sealring.core.handshake.connection import Connection
from sealring.core.handshake.messages import encode_message, write_hello
from sealring.core.handshake.refusals import refusal_of
from sealring.core.handshake.resumption import SessionConnection
from sealring.core.handshake.terms import PipeName, Terms
from sealring.core.handshake.tls import TlsConnection
from sealring.core.links import connections
from sealring.errors import (
    GroupEnded,
    HandshakeError,
    PeerUnreachable,
    SealringError,
    TamperedRecord,
    Unsupported,
    WrongPeer,
)
from tests.core.handshake.meeting import soon
from tests.core.links.teams import SIZE, Team, team

LIAR, VICTIM, OTHER, BYSTANDER = 7, 6, 9, 4
TIMEOUT_S, SLACK_S = 3.0, 10.0
"""The timeout of the message that needs the liar's link, and the extra time for a busy machine."""


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


class Liar:
    """Speaks to the victim's listener in the name of a member, message by message."""

    def __init__(self, one: Team, by: str) -> None:
        self.one, self.by = one, by
        late = one.groups[LIAR].engine.exchange
        assert late is not None
        self.terms: Terms = late.terms_of(PipeName(VICTIM, "messages"))
        self.address = one.groups[LIAR].agreed.members[VICTIM].addresses[0]

    @contextlib.contextmanager
    def connected(self) -> Iterator[Connection]:
        """Opens a connection on which the handshake is done and nothing else is said."""
        worker = self.one.workers[LIAR]
        sock = socket.create_connection(self.address)
        session = worker.sessions.with_rank(VICTIM)
        connection: Connection
        if self.by == "session" and session is not None:
            connection = SessionConnection(
                sock, worker.sessions, session=session, who="the victim", deadline=soon(30.0)
            )
        else:
            connection = TlsConnection(
                sock, worker.credentials, dialer=True, who="the victim", deadline=soon(30.0)
            )
        try:
            connection.handshake()
            yield connection
        finally:
            connection.close(until=0.0)

    def hello(self, **changes: Any) -> bytes:
        return write_hello(replace(self.terms, **changes), VICTIM)


Lie = Callable[[Liar, Connection], None]


def say(connection: Connection, *messages: bytes) -> None:
    for message in messages:
        send_message(connection, message)


def answered(connection: Connection, *messages: bytes) -> None:
    """Sends the messages after the victim's hello has arrived."""
    receive_message(connection)
    say(connection, *messages)


def greeted(*messages: dict[str, Any]) -> Lie:
    def lie(liar: Liar, connection: Connection) -> None:
        say(connection, liar.hello())
        answered(connection, *map(encode_message, messages))

    return lie


def halved(message: bytes) -> bytes:
    return len(message).to_bytes(4, "big") + message[: len(message) // 2]


INNOCENT = TamperedRecord("a record was changed", peer=OTHER, reported_by=VICTIM)
ACCUSATION = WrongPeer("rank 9 lied", peer=OTHER, reported_by=LIAR, code="handshake.wrong_group")

LIES: dict[str, tuple[Lie, str]] = {
    "hello twice": (
        lambda liar, connection: say(connection, liar.hello(), liar.hello()),
        "handshake.malformed_setup",
    ),
    "accept before hello": (
        lambda _, connection: say(connection, encode_message({"type": "accept", "shm": None})),
        "handshake.malformed_setup",
    ),
    "a hello of another group": (
        lambda liar, connection: say(connection, liar.hello(group="other")),
        "handshake.wrong_group",
    ),
    "a hello of another epoch": (
        lambda liar, connection: say(connection, liar.hello(epoch="9")),
        "handshake.wrong_group",
    ),
    "a hello of another transcript": (
        lambda liar, connection: say(connection, liar.hello(transcript="0" * 64)),
        "handshake.wrong_group",
    ),
    "a hello of a group that forms": (
        lambda liar, connection: say(connection, liar.hello(transcript="", purpose="form")),
        "handshake.peer_unreachable",
    ),
    "a transcript for a group that forms": (
        lambda liar, connection: say(connection, liar.hello(purpose="form")),
        "handshake.malformed_setup",
    ),
    "no transcript for messages": (
        lambda liar, connection: say(connection, liar.hello(transcript="")),
        "handshake.malformed_setup",
    ),
    "a purpose that is none": (
        lambda liar, connection: say(connection, liar.hello(purpose="gossip")),
        "handshake.malformed_setup",
    ),
    "a pipe that is open": (
        lambda liar, connection: say(connection, liar.hello(purpose="collectives")),
        "handshake.peer_unreachable",
    ),
    "a lane that was not agreed on": (
        lambda liar, connection: say(connection, liar.hello(purpose="collectives", lane=1)),
        "handshake.peer_unreachable",
    ),
    "a lane of messages": (
        lambda liar, connection: say(connection, liar.hello(lane=1)),
        "handshake.malformed_setup",
    ),
    "a lane beyond the last": (
        lambda liar, connection: say(connection, liar.hello(purpose="collectives", lane=64)),
        "handshake.malformed_setup",
    ),
    "a hello in another's name": (
        lambda liar, connection: say(connection, liar.hello(rank=OTHER)),
        "handshake.wrong_rank",
    ),
    "half a hello": (
        lambda liar, connection: connection.send(halved(liar.hello())),
        "handshake.peer_unreachable",
    ),
    "a message without end": (
        lambda _, connection: connection.send((1 << 30).to_bytes(4, "big")),
        "handshake.malformed_setup",
    ),
    "rubbish": (
        lambda _, connection: say(connection, b"\x01\x02\x03"),
        "handshake.malformed_setup",
    ),
    "silence": (lambda *_: None, "handshake.peer_unreachable"),
    "no accept": (greeted(), "handshake.peer_unreachable"),
    "a memory that is none": (
        greeted({"type": "accept", "shm": {"socket": 1}}),
        "handshake.malformed_setup",
    ),
    "an accept of another form": (greeted({"type": "accept"}), "handshake.malformed_setup"),
    "ready in place of accept": (
        greeted({"type": "ready", "transcript": "0" * 64}),
        "handshake.malformed_setup",
    ),
    "a group's end in place of accept": (
        greeted(refusal_of(GroupEnded("", failure=INNOCENT))),
        "handshake.group_ended",
    ),
    "an accusation in place of accept": (greeted(refusal_of(ACCUSATION)), "handshake.wrong_group"),
}


def message(one: Team, sender: int, receiver: int, timeout_s: float = 60.0) -> set[Any]:
    """Sends a message from one rank to another; returns what both ends report."""
    sent, received = np.ones(10), np.zeros(10)

    def call(rank: int) -> Any:
        sends, there = rank == sender, sent if rank == sender else received
        where = (there.ctypes.data, there.nbytes)
        box = one.groups[rank].mailbox
        peer = receiver if sends else sender
        return box.wait(box.submit(_native.Message(sends, peer, 1, where, timeout_s)))

    return set(one.all(call, *set(range(SIZE)) - {sender, receiver}))


def refused(monkeypatch: pytest.MonkeyPatch) -> list[SealringError]:
    """Returns a list of the errors with which listeners refuse connections from now on."""
    errors: list[SealringError] = []
    plain = connections.Connections.refused

    def note(self: Any, error: SealringError) -> None:
        errors.append(error)
        plain(self, error)

    monkeypatch.setattr(connections.Connections, "refused", note)
    return errors


def end_of(connection: Connection) -> None:
    """Reads until the victim closes the connection."""
    sock = connection.socket
    sock.settimeout(30.0)
    with contextlib.suppress(ConnectionResetError):
        while sock.recv(4096):
            pass


@pytest.mark.parametrize("by", ["tls", "session"])
@pytest.mark.parametrize("name", LIES)
@pytest.mark.threat("J13")
def test_a_member_that_lies_when_it_makes_a_link(
    monkeypatch: pytest.MonkeyPatch, name: str, by: str
) -> None:
    monkeypatch.setattr(connections, "_ACCEPT_SECONDS", 1.0)
    (lie, expected), errors = LIES[name], refused(monkeypatch)
    with team() as one:
        errors.clear()
        liar = Liar(one, by)
        with liar.connected() as connection:
            assert isinstance(connection, SessionConnection) is (by == "session")
            with contextlib.suppress(SealringError):  # the victim may refuse early
                lie(liar, connection)
            end_of(connection)
        assert [error.code for error in errors] == [expected], errors
        (error,) = errors
        assert isinstance(error, HandshakeError)
        assert error.met == LIAR
        assert not (error.proven and error.peer == OTHER)
        del liar, error
        errors.clear()
        monkeypatch.undo()
        assert message(one, OTHER, VICTIM) == {VICTIM, OTHER}
        assert message(one, LIAR, VICTIM) == {VICTIM, LIAR}


@pytest.mark.threat("J13")
def test_a_member_that_lies_without_end_takes_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Repeats every lie over many connections, which stay open at the same time."""
    monkeypatch.setattr(connections, "_ACCEPT_SECONDS", 1.0)
    with team() as one:
        late = one.groups[VICTIM].engine.exchange
        assert late is not None
        listener = late.listener
        del late

        def lie_much(times: int) -> None:
            for turn in range(times):
                with contextlib.ExitStack() as open_ones, contextlib.suppress(SealringError):
                    liar = Liar(one, ["tls", "session"][turn % 2])
                    for lie, _ in LIES.values():
                        connection = open_ones.enter_context(liar.connected())
                        with contextlib.suppress(SealringError):
                            lie(liar, connection)

        def settled() -> tuple[int, int]:
            until = time.monotonic() + 30
            while listener.connections:
                assert time.monotonic() < until
                time.sleep(0.01)
            gc.collect()
            return len(os.listdir("/proc/self/fd")), resident_bytes()

        lie_much(5)
        descriptors, before = settled()
        lie_much(20)
        after = settled()
        assert after[0] <= descriptors
        assert after[1] - before < 8 << 20
        assert message(one, OTHER, VICTIM) == {VICTIM, OTHER}


# ---- the liar is dialed ------------------------------------------------------------------------


def serve(one: Team, behave: Callable[[Liar, socket.socket], None]) -> Callable[[], None]:
    """Runs `behave` on connections to the liar's address; returns how to stop it."""
    late = one.groups[LIAR].engine.exchange
    assert late is not None
    address = one.groups[LIAR].agreed.members[LIAR].addresses[0]
    late.listener.stop()
    server = socket.create_server(address)
    server.settimeout(0.1)
    ended = threading.Event()
    kept: list[socket.socket] = []

    def run() -> None:
        while not ended.is_set():
            with contextlib.suppress(TimeoutError):
                sock, _ = server.accept()
                kept.append(sock)
                with contextlib.suppress(SealringError, OSError):
                    behave(Liar(one, "tls"), sock)

    thread = threading.Thread(target=run)
    thread.start()

    def end() -> None:
        ended.set()
        thread.join()
        for sock in (server, *kept):
            sock.close()

    return end


def by_tls(liar: Liar, sock: socket.socket) -> Connection:
    """Refuses to resume a session, so that the victim uses TLS, and completes the TLS handshake."""
    if sock.recv(1, socket.MSG_PEEK) == b"\x1f":
        sock.sendall(bytes.fromhex("1f00030000"))
        sock.close()
        raise PeerUnreachable("by TLS next time")
    worker = liar.one.workers[LIAR]
    connection = TlsConnection(
        sock, worker.credentials, dialer=False, who="the victim", deadline=soon(20.0)
    )
    connection.handshake()
    return connection


def telling(*said: Callable[[Liar], bytes]) -> Callable[[Liar, socket.socket], None]:
    """Sends these messages after the victim's hello, whatever the victim says."""

    def behave(liar: Liar, sock: socket.socket) -> None:
        connection = by_tls(liar, sock)
        understood(receive_message(connection), "the victim", VICTIM)
        say(connection, *(each(liar) for each in said))

    return behave


def telling_refusal(error: SealringError) -> Callable[[Liar, socket.socket], None]:
    return telling(lambda _: encode_message(refusal_of(error)))


def half_a_record(_: Liar, sock: socket.socket) -> None:
    sock.sendall(b"\x16\x03\x03\x40")


def half_an_answer(_: Liar, sock: socket.socket) -> None:
    sock.sendall(bytes.fromhex("1f00030040") + bytes(10))


def drips(_: Liar, sock: socket.socket) -> None:
    """Sends an answer to an opening, or a TLS record, with a pause after each byte."""
    first = sock.recv(1, socket.MSG_PEEK)
    whole = bytes.fromhex("1f00030040" if first == b"\x1f" else "1603034000") + bytes(64)
    for byte in whole:
        sock.sendall(bytes([byte]))
        time.sleep(0.2)


def greeting(liar: Liar) -> bytes:
    return write_hello(liar.terms, VICTIM)


HOSTS: dict[str, tuple[Callable[[Liar, socket.socket], None], set[str]]] = {
    "silence": (lambda *_: None, {"group.peer_silent", "group.peer_lost"}),
    "half a record": (half_a_record, {"group.peer_silent", "group.peer_lost"}),
    "half an answer": (half_an_answer, {"group.peer_silent", "group.peer_lost"}),
    "a byte now and then": (drips, {"group.peer_silent", "group.peer_lost"}),
    "silence after TLS": (telling(), {"group.peer_silent", "group.peer_lost"}),
    "no transport": (telling(greeting), {"group.peer_silent", "group.peer_lost"}),
    "hello twice": (telling(greeting, greeting), {"group.peer_lost"}),
    "a hello of another group": (
        telling(lambda liar: write_hello(replace(liar.terms, group="other"), VICTIM)),
        {"group.peer_lost", "group.peer_silent"},
    ),
    "a hello of another epoch": (
        telling(lambda liar: write_hello(replace(liar.terms, epoch="9"), VICTIM)),
        {"group.peer_lost", "group.peer_silent"},
    ),
    "an answer for another purpose": (
        telling(lambda liar: write_hello(replace(liar.terms, purpose="collectives"), VICTIM)),
        {"group.peer_lost"},
    ),
    "an answer for another lane": (
        telling(
            lambda liar: write_hello(replace(liar.terms, purpose="collectives", lane=1), VICTIM)
        ),
        {"group.peer_lost"},
    ),
    "no hello": (telling(lambda _: b"\x01\x02"), {"group.peer_lost"}),
    "not now, for ever": (telling_refusal(PeerUnreachable("not now")), {"group.peer_silent"}),
    "a false address, for ever": (
        telling_refusal(WrongPeer("not I", misdirected=True, code="handshake.wrong_rank")),
        {"group.peer_lost", "group.peer_silent"},
    ),
    "it does not serve this": (telling_refusal(Unsupported("gotcha")), {"group.peer_lost"}),
    "an accusation": (telling_refusal(ACCUSATION), {"group.peer_lost"}),
    "an accusation of a rank that the victim is linked with": (
        telling_refusal(
            WrongPeer("rank 4 lied", peer=4, reported_by=LIAR, code="handshake.wrong_group")
        ),
        {"group.peer_lost"},
    ),
}


@pytest.mark.parametrize("name", HOSTS)
@pytest.mark.threat("J13")
def test_a_member_that_lies_when_it_is_dialed(name: str) -> None:
    """The call that needs the link times out with an error about the liar; the group ends too."""
    behave, expected = HOSTS[name]
    with team() as one:
        end = serve(one, behave)
        try:
            ((kind, peer),) = outcome(one)
            assert kind in expected
            assert peer == LIAR
        finally:
            end()


@pytest.mark.parametrize(
    ("witness", "reporter", "said"),
    [
        (VICTIM, LIAR, f"^rank {LIAR} reported: "),
        (BYSTANDER, BYSTANDER, f"^rank {LIAR} says that rank {BYSTANDER} reported: "),
    ],
)
@pytest.mark.threat("J8")
def test_a_member_says_that_an_innocent_one_saw_another_tamper(
    witness: int, reporter: int, said: str
) -> None:
    """The error is marked as the liar's report, not as seen by the victim or by another rank."""
    lie = TamperedRecord("a record was changed", peer=OTHER, reported_by=witness)
    with team() as one:
        end = serve(one, telling_refusal(GroupEnded("", failure=lie)))
        try:
            there = np.ones(10)
            box = one.groups[VICTIM].mailbox
            where = (there.ctypes.data, there.nbytes)
            with pytest.raises(TamperedRecord, match=said) as caught:
                box.wait(box.submit(_native.Message(True, LIAR, 1, where, 5.0)))
            assert (caught.value.peer, caught.value.reported_by) == (OTHER, reporter)
            del caught, box
        finally:
            end()


def outcome(one: Team) -> list[Any]:
    """Sends a message from the victim to the liar; returns the errors, soon after the timeout."""
    there = np.ones(10)

    def call(rank: int) -> Any:
        box = one.groups[rank].mailbox
        where = (there.ctypes.data, there.nbytes)
        return box.wait(box.submit(_native.Message(True, LIAR, 1, where, TIMEOUT_S)))

    began = time.monotonic()
    try:
        return one.all(call, *set(range(SIZE)) - {VICTIM})
    finally:
        assert time.monotonic() - began < TIMEOUT_S + SLACK_S
