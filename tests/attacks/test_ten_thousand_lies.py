"""An admitted member lies ten thousand times, in each message with which a pipe is opened.

Its certificate is valid, so it gets as far as any member: it opens sessions, dials, is dialed, and
takes part in the rounds in which a group forms. It repeats, reorders, cuts and mixes up messages,
or sends none. Each lie must end with an error that names it. After the last lie the victim's
process has no more descriptors than after the first thousand, and hardly more memory or log lines.

What does not end is stopped by the test's own timeout or by a socket's.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import json
import logging
import os
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from cryptography.hazmat.primitives.serialization import Encoding

from sealring import _native
from sealring.core.handshake import SecureChannel, accept, dial
from sealring.core.handshake.channel import receive_message, send_message
from sealring.core.handshake.connection import Connection
from sealring.core.handshake.messages import encode_message, parse_message, write_hello
from sealring.core.handshake.refusals import refusal_of
from sealring.core.handshake.resumption import FRAME, SessionConnection
from sealring.core.handshake.sessions import Session, SessionTable
from sealring.core.handshake.statements import Statement, encode_bundle, parse_bundle
from sealring.core.handshake.terms import PipeName, Terms
from sealring.core.identity import Credentials
from sealring.core.links import build_mesh, forming
from sealring.core.links.exchange import Exchange
from sealring.core.links.rendezvous import encode_addresses
from sealring.core.links.tree import TreeExchange, most_bytes
from sealring.errors import (
    GroupEnded,
    HandshakeError,
    SealringError,
    TamperedRecord,
    WrongPeer,
    named,
)
from tests.core.handshake.meeting import connected, in_background, soon, terms
from tests.core.handshake.test_statements import fields_of
from tests.core.links.teams import SIZE, Team, team
from tests.core.links.worlds import ISSUER, LOOPBACK, DictStore, World, address_key, world

pytestmark = pytest.mark.timeout(600)

LIAR, VICTIM, OTHER = 7, 6, 9
"""LIAR and VICTIM are neighbours in the tree: they have a session and a pipe for collectives."""
TIMES: Final = 10_000
FIRST: Final = 1_000
"""After so many lies the process has allocated everything that it keeps for good."""
MOST_BYTES: Final = 8 << 20
"""How much resident memory later lies may add. A connection in set-up has 64 KiB of buffers, so
keeping one connection in 70 would already exceed this.
"""
MOST_LINES: Final = 32
"""How many log lines later lies may add."""
UNDER_WAY: Final = 8
"""Descriptors of connections that have not ended yet when descriptors are counted."""
NOW_OPEN: Final = 4
"""A member may have so many connections in set-up; with one more, its oldest is refused."""


class Lines(logging.Handler):
    """Counts the lines that are logged."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.count = 0

    def emit(self, _: logging.LogRecord) -> None:
        self.count += 1


class Flat:
    """Asserts that a process uses no more after all lies than after the first thousand."""

    def __init__(self, idle: Callable[[], bool] = lambda: True) -> None:
        self._idle = idle
        self._lines = Lines()
        self._before: tuple[int, int, int] | None = None

    def __enter__(self) -> Flat:
        logging.getLogger("sealring").addHandler(self._lines)
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        logging.getLogger("sealring").removeHandler(self._lines)
        if kind is None:
            assert self._before is not None, "the first thousand were not told of"
            before, after = self._before, self._now()
            assert after[0] - before[0] <= UNDER_WAY, "descriptors"
            assert after[1] - before[1] < MOST_BYTES, ("memory", after[1] - before[1])
            assert after[2] - before[2] <= MOST_LINES, "lines in the log"

    def after(self, lies: int) -> None:
        if lies == FIRST:
            self._before = self._now()

    def _now(self) -> tuple[int, int, int]:
        while not self._idle():
            time.sleep(0.01)
        gc.collect()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        resident = pages * os.sysconf("SC_PAGE_SIZE")
        return len(os.listdir("/proc/self/fd")), resident, self._lines.count


def exchange_of(one: Team, rank: int) -> Exchange:
    found = one.groups[rank].engine.exchange
    assert found is not None
    return found


def message(one: Team, sender: int, receiver: int) -> set[Any]:
    """Sends a message from one rank to another; returns what both ends report."""
    sent, received = np.ones(10), np.zeros(10)

    def call(rank: int) -> Any:
        sends, there = rank == sender, sent if rank == sender else received
        box = one.groups[rank].mailbox
        where = (there.ctypes.data, there.nbytes)
        peer = receiver if sends else sender
        return box.wait(box.submit(_native.Message(sends, peer, 1, where, 60.0)))

    return set(one.all(call, *set(range(SIZE)) - {sender, receiver}))


def changed(hello: bytes, **changes: Any) -> bytes:
    return encode_message({**json.loads(hello), **changes})


def without(hello: bytes, name: str) -> bytes:
    return encode_message({key: said for key, said in json.loads(hello).items() if key != name})


def framed(message: bytes) -> bytes:
    return len(message).to_bytes(4, "big") + message


INNOCENT: Final = TamperedRecord("a record was changed", peer=OTHER, reported_by=VICTIM)
ACCUSATION: Final = WrongPeer(
    "rank 9 lied", peer=OTHER, reported_by=LIAR, code="handshake.wrong_group"
)
READY: Final = encode_message({"type": "ready", "transcript": "0" * 64})


def accept_with(shm: object) -> bytes:
    return encode_message({"type": "accept", "shm": shm})


def transport(kind: object) -> bytes:
    return encode_message({"type": "transport", "transport": kind})


# ---- what the liar may send in place of a hello, at either end

Hellos = Mapping[str, tuple[Callable[[Terms, int], bytes], str]]
"""By name: how to make the message (from terms and the victim's rank), and the error's code."""


def said(**changes: Any) -> Callable[[Terms, int], bytes]:
    """Makes a hello that differs from what the group has agreed on."""
    return lambda own, to: write_hello(replace(own, **changes), to)


def spelled(**changes: Any) -> Callable[[Terms, int], bytes]:
    return lambda own, to: changed(write_hello(own, to), **changes)


HELLOS: Final[Hellos] = {
    "of another group": (said(group="other"), "handshake.wrong_group"),
    "of another epoch": (said(epoch="9"), "handshake.wrong_group"),
    "of another transcript": (said(transcript="0" * 64), "handshake.wrong_group"),
    "of another job": (spelled(job="another"), "handshake.wrong_job"),
    "of another world": (spelled(world=SIZE + 1), "handshake.wrong_world_size"),
    "of other members": (spelled(members="0" * 64), "handshake.wrong_group"),
    "of other settings": (spelled(settings={"record_bytes": 1}), "handshake.settings_mismatch"),
    "of another suite": (spelled(suites=["null"]), "handshake.suite_mismatch"),
    "of another version": (spelled(version=2), "handshake.protocol_mismatch"),
    "of another process": (spelled(instance="0" * 32), "handshake.duplicate_rank"),
    "of another rank": (spelled(sender=OTHER), "handshake.wrong_rank"),
    "for another rank": (spelled(receiver=OTHER), "handshake.wrong_rank"),
    "without its transcript": (spelled(transcript=""), "handshake.malformed_setup"),
    "of a purpose that is none": (spelled(purpose="gossip"), "handshake.malformed_setup"),
    "of a lane of messages": (spelled(lane=1), "handshake.malformed_setup"),
    "of a lane beyond the last": (
        spelled(purpose="collectives", lane=64),
        "handshake.malformed_setup",
    ),
    "of the group's formation, with a transcript": (
        spelled(purpose="form"),
        "handshake.malformed_setup",
    ),
    "with a field too many": (spelled(more=1), "handshake.malformed_setup"),
    "with a field too few": (
        lambda own, to: without(write_hello(own, to), "lane"),
        "handshake.malformed_setup",
    ),
    "with a number as a rank's name": (spelled(sender="7"), "handshake.malformed_setup"),
    "that is an accept": (lambda *_: accept_with(None), "handshake.malformed_setup"),
    "that is the end of a group": (
        lambda *_: encode_message(refusal_of(GroupEnded("", failure=INNOCENT))),
        "handshake.group_ended",
    ),
    "that is an accusation": (
        lambda *_: encode_message(refusal_of(ACCUSATION)),
        "handshake.wrong_group",
    ),
    "that is a refusal for no known reason": (
        lambda *_: encode_message({"type": "refusal", "error": "x", "text": ""}),
        "handshake.malformed_setup",
    ),
    "that is nothing": (lambda *_: b"", "handshake.malformed_setup"),
    "that is rubbish": (lambda *_: b"\x01\x02\x03", "handshake.malformed_setup"),
}


# ---- the liar dials


class Dialing:
    """Speaks to the victim's listener, message by message."""

    def __init__(self, one: Team) -> None:
        self.worker = one.workers[LIAR]
        self.terms = exchange_of(one, LIAR).terms_of(PipeName(VICTIM, "messages"))
        self.hello = write_hello(self.terms, VICTIM)
        self.address = one.groups[LIAR].agreed.members[VICTIM].addresses[0]
        self.earlier = b""
        """A sealed hello from an earlier connection."""

    @property
    def session(self) -> Session:
        found = self.worker.sessions.with_rank(VICTIM)
        assert found is not None
        return found

    def reached(self) -> socket.socket:
        return socket.create_connection(self.address, timeout=60.0)

    def admitted(self) -> SessionConnection:
        """Opens a connection under the session and says nothing else."""
        connection = SessionConnection(
            self.reached(),
            self.worker.sessions,
            session=self.session,
            who="the victim",
            deadline=soon(60.0),
        )
        connection.handshake()
        return connection


def frames(connection: SessionConnection, *messages: bytes) -> list[bytes]:
    assert connection.sends is not None
    return [bytes(connection.sends.seal(framed(each))) for each in messages]


def ended(connection: Connection) -> str:
    """Returns the error's code that the victim sends when it ends the connection."""
    heard = parse_message(receive_message(connection))
    while heard["type"] != "refusal":
        heard = parse_message(receive_message(connection))
    connection.close(until=0.0)
    return str(heard["error"])


Lie = Callable[[Dialing, SessionConnection], None]


def saying(*messages: Callable[[Dialing], bytes]) -> Lie:
    def lie(liar: Dialing, connection: SessionConnection) -> None:
        for each in messages:
            send_message(connection, each(liar))

    return lie


def greeted(*messages: bytes) -> Lie:
    """Sends a true hello and then these messages."""
    return saying(lambda liar: liar.hello, *(lambda _, each=each: each for each in messages))


def announcing(_: Dialing, connection: SessionConnection) -> None:
    connection.send((1 << 30).to_bytes(4, "big"))


def half(liar: Dialing, connection: SessionConnection) -> None:
    connection.send(framed(liar.hello)[: len(liar.hello) // 2])


def half_a_frame(liar: Dialing, connection: SessionConnection) -> None:
    (frame,) = frames(connection, liar.hello)
    connection.socket.send(frame[: len(frame) // 2])


def repeating(liar: Dialing, connection: SessionConnection) -> None:
    (frame,) = frames(connection, liar.hello)
    connection.socket.send(frame + frame)


def reordering(liar: Dialing, connection: SessionConnection) -> None:
    first, second = frames(connection, liar.hello, accept_with(None))
    connection.socket.send(second + first)


def replaying(liar: Dialing, connection: SessionConnection) -> None:
    (frame,) = frames(connection, liar.hello)
    liar.earlier, earlier = frame, liar.earlier or frame[:-1] + bytes([frame[-1] ^ 1])
    connection.socket.send(earlier)


OFFER: Final = {"socket": "0" * 64, "token": "0" * 64}
LIES: Final[Mapping[str, tuple[Lie, str]]] = {
    **{
        f"a hello {name}": (saying(lambda liar, make=make: make(liar.terms, VICTIM)), code)
        for name, (make, code) in HELLOS.items()
    },
    "a hello for a group that forms": (
        saying(lambda liar: changed(liar.hello, purpose="form", transcript="")),
        "handshake.peer_unreachable",
    ),
    "a hello for a pipe that is open": (
        saying(lambda liar: changed(liar.hello, purpose="collectives")),
        "handshake.peer_unreachable",
    ),
    "a hello for a lane that was not agreed on": (
        saying(lambda liar: changed(liar.hello, purpose="collectives", lane=1)),
        "handshake.peer_unreachable",
    ),
    "a message without end": (announcing, "handshake.malformed_setup"),
    "a frame twice": (repeating, "handshake.malformed_setup"),
    "frames in another order": (reordering, "handshake.malformed_setup"),
    "a frame of an earlier connection": (replaying, "handshake.malformed_setup"),
    "hello twice": (
        saying(lambda liar: liar.hello, lambda liar: liar.hello),
        "handshake.malformed_setup",
    ),
    "ready in place of accept": (greeted(READY), "handshake.malformed_setup"),
    "accept without an offer": (
        greeted(encode_message({"type": "accept"})),
        "handshake.malformed_setup",
    ),
    "an offer that is none": (greeted(accept_with({"socket": 1})), "handshake.malformed_setup"),
    "an accusation in place of accept": (
        greeted(encode_message(refusal_of(ACCUSATION))),
        "handshake.wrong_group",
    ),
    "the end of a group in place of accept": (
        greeted(encode_message(refusal_of(GroupEnded("", failure=INNOCENT)))),
        "handshake.group_ended",
    ),
    "a transport that was not offered": (
        greeted(accept_with(OFFER), transport("shm")),
        "handshake.malformed_setup",
    ),
    "a transport that is none": (
        greeted(accept_with(OFFER), transport("pigeon")),
        "handshake.malformed_setup",
    ),
    "link in place of a transport": (
        greeted(accept_with(OFFER), encode_message({"type": "link", "shm": None})),
        "handshake.malformed_setup",
    ),
    "silence": (lambda *_: None, "handshake.peer_unreachable"),
    "half a hello": (half, "handshake.peer_unreachable"),
    "half a frame": (half_a_frame, "handshake.peer_unreachable"),
    "no accept": (greeted(), "handshake.peer_unreachable"),
    "no transport": (greeted(accept_with(OFFER)), "handshake.peer_unreachable"),
}
SILENT: Final = {"silence", "half a hello", "half a frame", "no accept", "no transport"}
"""After one of these the victim waits until the member has too many connections."""


@pytest.mark.threat("J13")
def test_a_member_that_dials() -> None:
    """The victim tells the liar each error, and at the end still serves the liar and others."""
    with team() as one:
        liar, listener = Dialing(one), exchange_of(one, VICTIM).listener
        waiting: deque[SessionConnection] = deque()
        with Flat(lambda: not listener.connections) as flat:
            for count, name in zip(range(1, TIMES + 1), itertools.cycle(LIES), strict=False):
                lie, expected = LIES[name]
                connection = liar.admitted()
                lie(liar, connection)
                if name not in SILENT:
                    assert ended(connection) == expected, name
                else:
                    waiting.append(connection)
                if len(waiting) > NOW_OPEN:
                    assert ended(waiting.popleft()) == "handshake.peer_unreachable"
                if count == FIRST:
                    while waiting:
                        waiting.popleft().close(until=0.0)
                flat.after(count)
            while waiting:
                assert ended(waiting.popleft()) == "handshake.peer_unreachable"
        assert message(one, OTHER, VICTIM) == {VICTIM, OTHER}
        assert message(one, LIAR, VICTIM) == {VICTIM, LIAR}


def parts(liar: Dialing) -> Iterator[Callable[[], str]]:
    """Yields calls that cut each message after each byte and return the victim's error."""

    def cut(connection: SessionConnection, part: bytes) -> str:
        connection.socket.send(part)
        connection.socket.shutdown(socket.SHUT_WR)
        return ended(connection)

    def of_opening(length: int) -> str:
        with contextlib.closing(liar.reached()) as sock:
            sock.sendall(opening(liar.session)[:length])
            sock.shutdown(socket.SHUT_WR)
            return sock.recv(64).hex()

    def of_hello(length: int) -> str:
        connection = liar.admitted()
        return cut(connection, frames(connection, liar.hello)[0][:length])

    def of_accept(length: int) -> str:
        connection = liar.admitted()
        send_message(connection, liar.hello)
        return cut(connection, frames(connection, accept_with(None))[0][:length])

    probe = liar.admitted()
    hello, accepting = frames(probe, liar.hello, accept_with(None))
    probe.close(until=0.0)
    for length in range(len(hello)):
        yield lambda length=length: of_hello(length)
        if length < len(accepting):
            yield lambda length=length: of_accept(length)
        if len(FRAME) <= length < len(opening(liar.session)):  # a shorter start could still be TLS
            yield lambda length=length: of_opening(length) or "handshake.peer_unreachable"


def opening(session: Session, /, **changes: bytes) -> bytes:
    """Returns the first message under a session, with some of its parts changed."""
    right = {
        "head": FRAME + (88).to_bytes(2, "big"),
        "session": session.id,
        "step": session.opening.step.to_bytes(8, "big"),
        "random": secrets.token_bytes(32),
    }
    said = b"".join((right | changes)[name] for name in right)
    both = session.own_fingerprint + session.peer_fingerprint
    return said + changes.get("tag", session.opening.open_tag(both + said))


@pytest.mark.threat("J13")
def test_a_member_that_is_cut_after_each_byte() -> None:
    with team() as one:
        liar, listener = Dialing(one), exchange_of(one, VICTIM).listener
        cuts = itertools.chain.from_iterable(parts(liar) for _ in itertools.repeat(None))
        with Flat(lambda: not listener.connections) as flat:
            for count, cut in enumerate(itertools.islice(cuts, 2 * FIRST), 1):
                assert cut() == "handshake.peer_unreachable"
                flat.after(count)
        assert message(one, LIAR, VICTIM) == {VICTIM, LIAR}


NO_SESSION: Final = FRAME + bytes(2)


def used_opening(liar: Dialing) -> bytes:
    """Returns an opening message with which the liar has already opened a connection."""
    session = liar.session
    used = opening(session)
    with contextlib.closing(liar.reached()) as sock:
        sock.sendall(used)
        answer = sock.recv(69, socket.MSG_WAITALL)
        assert answer[: len(FRAME)] == FRAME
    both = session.own_fingerprint + session.peer_fingerprint
    session.opening.take_step(used[-64:-32] + answer[5:37], both + used + answer)
    return used


def false_openings(liar: Dialing, used: bytes, others: bytes) -> dict[str, Callable[[], bytes]]:
    step = liar.session.opening.step
    return {
        "one that was used": lambda: used,
        "of an earlier step": lambda: opening(liar.session, step=(step - 1).to_bytes(8, "big")),
        "of a later step": lambda: opening(liar.session, step=(step + 1).to_bytes(8, "big")),
        "with another's tag": lambda: opening(liar.session, tag=bytes(32)),
        "of a session that is none": lambda: opening(liar.session, session=bytes(16)),
        "of a session of two others": lambda: opening(liar.session, session=others),
        "of another length": lambda: opening(liar.session, head=FRAME + bytes(2)),
    }


@pytest.mark.threat("J36")
def test_a_member_that_opens_sessions_falsely() -> None:
    """The victim always answers that there is no such session, and the true session goes on."""
    with team() as one:
        liar, listener = Dialing(one), exchange_of(one, VICTIM).listener
        others = one.workers[VICTIM].sessions.with_rank(VICTIM & (VICTIM - 1))
        assert others is not None
        false = false_openings(liar, used_opening(liar), others.id)
        step = liar.session.opening.step
        with Flat(lambda: not listener.connections) as flat:
            for count, name in zip(range(1, 5 * FIRST + 1), itertools.cycle(false), strict=False):
                with contextlib.closing(liar.reached()) as sock:
                    sock.sendall(false[name]())
                    assert sock.recv(64) == NO_SESSION, name
                    assert sock.recv(64) == b"", name
                flat.after(count)
        assert liar.session.opening.step == step
        liar.admitted().close(until=0.0)
        assert message(one, LIAR, VICTIM) == {VICTIM, LIAR}


# ---- the liar is dialed


class Dialed:
    """The liar's answers when the victim dials."""

    def __init__(self, one: Team) -> None:
        self.worker = one.workers[LIAR]
        self.terms = exchange_of(one, LIAR).terms_of(PipeName(VICTIM, "messages"))
        self.hello = write_hello(self.terms, VICTIM)
        self.earlier = b""

    def under_session(self, sock: socket.socket) -> SessionConnection:
        connection = SessionConnection(
            sock, self.worker.sessions, session=None, who="the victim", deadline=soon(60.0)
        )
        while connection.advance() is None:
            connection.wait()
        receive_message(connection)
        return connection

    def accepted(self, sock: socket.socket) -> SecureChannel:
        """Accepts the connection under the session, or by TLS, which makes a new session."""
        worker = self.worker
        return accept(sock, worker.credentials, self.terms, soon(60.0), sessions=worker.sessions)


Behaviour = Callable[[Dialed, socket.socket], object]


def answering(*answer: bytes) -> Behaviour:
    """Sends this answer to the opening of a session."""

    def behave(_: Dialed, sock: socket.socket) -> None:
        assert sock.recv(93, socket.MSG_WAITALL)[:3] == FRAME
        sock.sendall(b"".join(answer))

    return behave


def greeting(*messages: Callable[[Dialed], bytes]) -> Behaviour:
    """Sends these messages as the liar's hello and after it."""

    def behave(liar: Dialed, sock: socket.socket) -> None:
        connection = liar.under_session(sock)
        for each in messages:
            send_message(connection, each(liar))

    return behave


def sealing(
    lie: Callable[[Dialed, SessionConnection], Sequence[bytes]],
) -> Behaviour:
    def behave(liar: Dialed, sock: socket.socket) -> None:
        connection = liar.under_session(sock)
        sock.send(b"".join(lie(liar, connection)))

    return behave


def earlier_frame(liar: Dialed, connection: SessionConnection) -> list[bytes]:
    (frame,) = frames(connection, liar.hello)
    liar.earlier, earlier = frame, liar.earlier or frame[:-1] + bytes([frame[-1] ^ 1])
    return [earlier]


def concluding(*messages: bytes) -> Behaviour:
    """Sends these messages after the victim's accept."""

    def behave(liar: Dialed, sock: socket.socket) -> None:
        connection = liar.accepted(sock).connection
        for each in messages:
            send_message(connection, each)

    return behave


CONCLUSIONS: Final[Mapping[str, tuple[Behaviour, str]]] = {
    "no transport": (concluding(), "handshake.peer_unreachable"),
    "a transport that was not offered": (
        concluding(transport("shm")),
        "handshake.malformed_setup",
    ),
    "a transport that is none": (concluding(transport("pigeon")), "handshake.malformed_setup"),
    "link in place of a transport": (
        concluding(encode_message({"type": "link", "shm": None})),
        "handshake.malformed_setup",
    ),
    "ready in place of a transport": (concluding(READY), "handshake.malformed_setup"),
    "an accusation in place of a transport": (
        concluding(encode_message(refusal_of(ACCUSATION))),
        "handshake.wrong_group",
    ),
    "the end of a group in place of a transport": (
        concluding(encode_message(refusal_of(GroupEnded("", failure=INNOCENT)))),
        "handshake.group_ended",
    ),
}
ANSWERS: Final[Mapping[str, tuple[Behaviour, str]]] = {
    "no answer": (answering(), "handshake.peer_unreachable"),
    "half an answer": (answering(FRAME + b"\0\x40", bytes(10)), "handshake.peer_unreachable"),
    "no session": (answering(NO_SESSION), "handshake.peer_unreachable"),
    "a false answer": (answering(FRAME + b"\0\x40", bytes(64)), "handshake.malformed_setup"),
    "an answer of another length": (
        answering(FRAME + b"\0\x41", bytes(65)),
        "handshake.malformed_setup",
    ),
}
"""Each answer ends the session, so the victim uses TLS next; a conclusion follows each answer."""
GREETINGS: Final[Mapping[str, tuple[Behaviour, str]]] = {
    **{
        f"a hello {name}": (greeting(lambda liar, make=make: make(liar.terms, VICTIM)), code)
        for name, (make, code) in HELLOS.items()
    },
    "a hello for another purpose": (
        greeting(lambda liar: changed(liar.hello, purpose="collectives")),
        "handshake.malformed_setup",
    ),
    "a hello for another lane": (
        greeting(lambda liar: changed(liar.hello, purpose="collectives", lane=1)),
        "handshake.malformed_setup",
    ),
    "hello twice": (
        greeting(lambda liar: liar.hello, lambda liar: liar.hello),
        "handshake.malformed_setup",
    ),
    "no hello": (greeting(), "handshake.peer_unreachable"),
    "half a frame": (
        sealing(lambda liar, connection: [frames(connection, liar.hello)[0][:100]]),
        "handshake.peer_unreachable",
    ),
    "a frame twice": (
        sealing(lambda liar, connection: frames(connection, liar.hello) * 2),
        "handshake.malformed_setup",
    ),
    "frames in another order": (
        sealing(lambda liar, connection: frames(connection, liar.hello, transport("tcp"))[::-1]),
        "handshake.malformed_setup",
    ),
    "a frame of an earlier connection": (sealing(earlier_frame), "handshake.malformed_setup"),
}


@pytest.mark.threat("J13")
def test_a_member_that_is_dialed() -> None:
    """The victim's call that dials raises each error, which is about the member that it dialed."""
    repaired = itertools.cycle(CONCLUSIONS.items())
    kinds = [
        *(pair for each in ANSWERS.items() for pair in (each, next(repaired))),
        *GREETINGS.items(),
        *CONCLUSIONS.items(),
    ]
    with team() as one:
        liar, victim = Dialed(one), exchange_of(one, VICTIM)
        with Flat() as flat:
            for count, (name, (behave, expected)) in zip(
                range(1, TIMES // 2 + 1), itertools.cycle(kinds), strict=False
            ):
                assert dialed(victim, liar, behave) == expected, name
                flat.after(count)
            # The last silent call holds the victim's turn under the session until it times out.
            with ThreadPoolExecutor() as pool:
                unanswered = []
                for behave in (concluding(), greeting(), answering()):
                    silent = threading.Event()
                    unanswered.append(pool.submit(dialed, victim, liar, behave, silent))
                    assert silent.wait(60.0)
                for each in unanswered:
                    assert each.result() == "handshake.peer_unreachable"
        assert message(one, OTHER, VICTIM) == {VICTIM, OTHER}
        assert message(one, LIAR, VICTIM) == {VICTIM, LIAR}


def dialed(
    victim: Exchange, liar: Dialed, behave: Behaviour, silent: threading.Event | None = None
) -> str:
    """Returns the error's code. With `silent` set, the liar keeps the connection open and waits."""
    near, far = connected()
    far.settimeout(60.0)

    def answer() -> None:
        with contextlib.closing(far):
            behave(liar, far)
            far.settimeout(60.0)
            if silent is None:
                far.shutdown(socket.SHUT_WR)
            else:
                silent.set()
            with contextlib.suppress(ConnectionResetError):
                while far.recv(4096):
                    pass

    name = PipeName(LIAR, "messages")
    victim.pipes.want(name)
    with in_background(answer) as answered:
        try:
            victim.set_up(near, name)
        except SealringError as error:
            code = named(error)
    assert answered == [None]
    return code


# ---- a group forms


def linked(own: Terms, to: int, address: tuple[str, int], sessions: SessionTable) -> SecureChannel:
    """Makes a first link as the member that dials."""
    sock = socket.create_connection(address, timeout=60.0)
    channel = dial(sock, CREDENTIALS[own.rank], own, to, soon(60.0), sessions)
    assert channel.receive() == {"type": "transport", "transport": "tcp"}
    return channel


def linked_by(
    victim: int, own: Terms, server: socket.socket, sessions: SessionTable
) -> SecureChannel:
    """Makes a first link as the member that accepts."""
    sock, _ = server.accept()
    channel = accept(sock, CREDENTIALS[own.rank], own, soon(60.0), sessions=sessions)
    assert channel.peer.rank == victim
    channel.send({"type": "transport", "transport": "tcp"})
    return channel


CREDENTIALS: Final = {rank: ISSUER.credentials(rank, world=3) for rank in range(3)}


def assert_formed(mesh: World) -> None:
    """Each pair has one link, whichever end dialed, and one key for each direction."""
    for rank in range(mesh.size):
        assert [link.peer for link in mesh.links(rank)] == [
            peer for peer in range(mesh.size) if peer != rank
        ]
        for link in mesh.links(rank):
            (back,) = [one for one in mesh.links(link.peer) if one.peer == rank]
            assert link.send_key == back.receive_key
            assert link.dialer is not back.dialer


@pytest.mark.threat("J37")
def test_a_member_that_cuts_the_link_that_it_dialed() -> None:
    """The victim waits for rank 1. The liar links and cuts 3,000 times, and then links for good."""
    with world(3, timeout=200.0, transport="tcp") as mesh:
        mesh.start(0, credentials=CREDENTIALS[0])
        own, sessions = mesh.terms(2), SessionTable()
        with Flat() as flat:
            for count in range(1, 3 * FIRST + 1):
                linked(own, 0, mesh.store.address(0), sessions).close(until=0.0)
                flat.after(count)
        for rank in (1, 2):
            mesh.start(rank, credentials=CREDENTIALS[rank], own_terms=own if rank == 2 else None)
        mesh.join()
        assert_formed(mesh)


@pytest.mark.threat("J37")
def test_a_member_that_cuts_the_link_that_it_took() -> None:
    """The victim dials the liar again after each cut."""
    with (
        world(3, timeout=200.0, transport="tcp") as mesh,
        socket.create_server(("127.0.0.1", 0)) as server,
    ):
        server.settimeout(60.0)
        mesh.store.set(address_key(0), encode_addresses([server.getsockname()]))
        mesh.start(2, credentials=CREDENTIALS[2])
        own, sessions = mesh.terms(0), SessionTable()
        with Flat() as flat:
            for count in range(1, 3 * FIRST + 1):
                linked_by(2, own, server, sessions).close(until=0.0)
                flat.after(count)
        for rank in (0, 1):
            mesh.start(rank, credentials=CREDENTIALS[rank], own_terms=own if rank == 0 else None)
        mesh.join()
        assert_formed(mesh)


# ---- the rounds in which a group forms

UP, DOWN, AGREED = 1, 2, 3
PARENT, CHILD = 0, 1
Alter = Callable[["InRounds", bytearray], Iterable[bytes | bytearray]]
"""Returns what the liar sends instead of its message of one round."""


class InRounds:
    """Takes part in the rounds of a group of two and lies once in each attempt."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.address = b'[["127.0.0.1",9]]'
        self.sessions, self.victims = SessionTable(), SessionTable()
        self.number = 0
        self.earlier: dict[int, bytearray] = {}
        """What the liar said of itself in each round of the first attempt."""
        self.server = socket.create_server(("127.0.0.1", 0))
        self.server.settimeout(60.0)

    def attempt(self, words: Sequence[bytes], turn: int, alter: Alter) -> tuple[str, int | None]:
        """Returns how the victim's attempt to form the group ends: the error's code and its rank.

        The liar sends `words` in place of "linked". `alter` changes its message of that turn.
        """
        self.number += 1
        store, victim = DictStore(), 1 - self.rank
        own, others = (
            terms(rank, world=3, members=(0, 1), epoch=str(self.number))
            for rank in (self.rank, victim)
        )
        if self.rank == PARENT:
            store.set(address_key(0), encode_addresses([self.server.getsockname()]))

        def form() -> tuple[str, int | None]:
            try:
                build_mesh(
                    store,
                    CREDENTIALS[victim],
                    others,
                    timeout=60.0,
                    transport="tcp",
                    environ=LOOPBACK,
                    sessions=self.victims,
                )
            except HandshakeError as error:
                return error.code, error.peer
            raise AssertionError("the group formed")

        with in_background(form) as formed:
            if self.rank == CHILD:
                channel = linked(own, victim, store.address(0), self.sessions)
            else:
                channel = linked_by(victim, own, self.server, self.sessions)
            try:
                self.take_part(own, channel, words, turn, alter)
            except SealringError:
                pass  # the victim ends the connection, or the liar refuses its own lie
            finally:
                channel.close()
        (outcome,) = formed
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    def take_part(
        self, own: Terms, channel: SecureChannel, words: Sequence[bytes], turn: int, alter: Alter
    ) -> None:
        turns = itertools.count()

        def send(_: int, message: bytearray) -> None:
            now = next(turns)
            said = parse_bundle(message, 33 if message[0] == AGREED else 1)
            if self.number == 1:
                self.earlier[now] = said[self.rank]
            for each in alter(self, message) if now == turn else [message]:
                channel.send_raw(bytearray(each), soon(60.0))

        conversation = forming.agree(
            lambda: CREDENTIALS[self.rank], own, self.address, {}, sparse=False
        )
        exchange = TreeExchange(own.members, own.rank, conversation, send)
        for each in words or [linked_with({str(channel.peer.rank): channel.peer_hello.instance})]:
            send_message(channel.connection, each)
        exchange.start()
        while True:
            heard = channel.heard(soon(60.0), most_bytes(2))
            if heard is None:
                channel.connection.wait()
            elif isinstance(heard, bytearray):
                exchange.take(channel.peer.rank, heard)
                if exchange.result is not None and self.rank == PARENT:
                    exchange.pass_on(CHILD)


def linked_with(instances: object) -> bytes:
    return encode_message({"type": "linked", "instances": instances})


def true(_: InRounds, message: bytearray) -> list[bytearray]:
    return [message]


def of_kind(kind: int, head: bytes = b"") -> Alter:
    return lambda _, message: [bytes([kind]) + head + message[1:]]


def stating(change: Callable[[InRounds, dict[int, bytearray]], object]) -> Alter:
    """Changes the statements in the liar's message with `change`."""

    def alter(liar: InRounds, message: bytearray) -> list[bytearray]:
        start = 33 if message[0] == AGREED else 1
        said = parse_bundle(message, start)
        change(liar, said)
        return [encode_bundle(said, bytes(message[:start]))]

    return alter


def of_itself(make: Callable[[InRounds, bytearray], bytes | bytearray]) -> Alter:
    def change(liar: InRounds, said: dict[int, bytearray]) -> None:
        said[liar.rank] = bytearray(make(liar, said[liar.rank]))

    return stating(change)


def certified_by(another: Mapping[int, Credentials]) -> Alter:
    """States the certificate in `another` for the liar's rank, not the one on its links."""

    def make(liar: InRounds, own: bytearray) -> bytearray:
        fields = fields_of(bytes(own))
        shown = b"none"
        if liar.rank in another:
            shown = another[liar.rank].certificate.public_bytes(Encoding.DER)
        secret = _native.Secret(bytearray(fields[6]))
        said = Statement(
            liar.rank, fields[1].decode(), "here", liar.address, shown, fields[5], secret
        )
        return said.encode()

    return of_itself(make)


def half_of(_: InRounds, message: bytearray) -> list[bytearray]:
    return [message[: len(message) // 2]]


MALFORMED, GROUP, DUPLICATE = (
    "handshake.malformed_setup",
    "handshake.wrong_group",
    "handshake.duplicate_rank",
)
WORDS: Final[Mapping[str, tuple[list[bytes], str]]] = {
    "linked with no rank": ([linked_with({})], MALFORMED),
    "linked with what is no rank": ([linked_with({"x": "0" * 32})], MALFORMED),
    "linked with another process": (
        [linked_with({"0": "0" * 32, "1": "0" * 32})],
        DUPLICATE,
    ),
    "linked twice": ([linked_with({"2": "0" * 32})] * 2, MALFORMED),
    "ready at once": ([READY], MALFORMED),
    "ready before the rounds": ([linked_with({"2": "0" * 32}), READY], MALFORMED),
    "a hello": ([encode_message({"type": "hello"})], MALFORMED),
    "rubbish": ([b"\x7f"], MALFORMED),
    "nothing": ([b""], MALFORMED),
}
ROUNDS: Final[Mapping[str, tuple[int, Alter, str]]] = {
    "half a message": (0, half_of, MALFORMED),
    "a message of no kind": (0, of_kind(9), MALFORMED),
    "the last round's at first": (0, of_kind(AGREED, bytes(32)), MALFORMED),
    "for no rank": (0, stating(lambda _, said: said.clear()), MALFORMED),
    "half a statement": (0, of_itself(lambda _, own: own[: len(own) // 2]), MALFORMED),
    "a statement of another rank": (
        0,
        of_itself(lambda _, own: own[:11] + b"\x02" + own[12:]),
        MALFORMED,
    ),
    "a contribution of zeros": (0, of_itself(lambda _, own: own[:-32] + bytes(32)), MALFORMED),
    "a statement of an earlier attempt": (0, of_itself(lambda liar, _: liar.earlier[0]), DUPLICATE),
    "another's certificate": (
        0,
        certified_by(dict.fromkeys((PARENT, CHILD), CREDENTIALS[2])),
        "handshake.wrong_rank",
    ),
    "another certificate of its own": (
        0,
        certified_by({rank: ISSUER.credentials(rank, world=3) for rank in (PARENT, CHILD)}),
        DUPLICATE,
    ),
    "no certificate": (0, certified_by({}), MALFORMED),
    "a signature of an earlier attempt": (1, of_itself(lambda liar, _: liar.earlier[1]), GROUP),
    "a statement for a signature": (1, of_itself(lambda liar, _: liar.earlier[0]), GROUP),
    "no confirmation": (2, of_itself(lambda *_: bytes(32)), GROUP),
    "a confirmation of an earlier attempt": (
        2,
        of_itself(lambda liar, _: liar.earlier[2]),
        GROUP,
    ),
}
AS_CHILD: Final[Mapping[str, tuple[int, Alter, str]]] = {
    "down, from below": (0, of_kind(DOWN), MALFORMED),
    "for its parent": (0, stating(lambda _, said: said.update({0: said.pop(1)})), MALFORMED),
    "for its parent too": (0, stating(lambda _, said: said.update({0: said[1]})), MALFORMED),
    "its first message twice": (0, lambda _, message: [message, message], GROUP),
}
AS_PARENT: Final[Mapping[str, tuple[int, Alter, str]]] = {
    "up, from above": (0, of_kind(UP), MALFORMED),
    "without the child's words": (0, stating(lambda _, said: said.pop(1)), MALFORMED),
    "the child's words changed": (
        0,
        stating(lambda _, said: said[1].append(0)),
        MALFORMED,
    ),
    "its first message twice": (0, lambda _, message: [message, message], MALFORMED),
    "another transcript at last": (
        2,
        lambda _, message: [message[:1] + bytes(32) + message[33:]],
        GROUP,
    ),
    "the last round's as an earlier one": (
        2,
        lambda _, message: [bytes([DOWN]) + message[33:]],
        MALFORMED,
    ),
}


@pytest.mark.threat("J37")
@pytest.mark.parametrize(("rank", "rounds"), [(PARENT, AS_PARENT), (CHILD, AS_CHILD)])
def test_a_member_in_the_rounds(rank: int, rounds: Mapping[str, tuple[int, Alter, str]]) -> None:
    """No group forms, and the victim's error names the liar."""
    liar = InRounds(rank)
    lies: dict[str, tuple[Sequence[bytes], int, Alter, str]] = {
        "the first": ([], 2, of_itself(lambda *_: bytes(32)), GROUP),
        **{name: (words, -1, true, code) for name, (words, code) in WORDS.items()},
        **{name: ([], *lie) for name, lie in (*ROUNDS.items(), *rounds.items())},
    }
    with contextlib.closing(liar.server), Flat() as flat:
        for count, name in zip(range(1, 2 * FIRST + 1), itertools.cycle(lies), strict=False):
            words, turn, alter, expected = lies[name]
            assert liar.attempt(words, turn, alter) == (expected, rank), name
            flat.after(count)
