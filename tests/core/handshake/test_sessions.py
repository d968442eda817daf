"""Connections under a session use no TLS, repeat no key, and keep no old key for a thief."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from sealring import _native
from sealring.core.handshake import (
    SecureChannel,
    SessionTable,
    Terms,
    accept,
    dial,
    resumption,
    sessions,
)
from sealring.core.identity import Credentials
from sealring.errors import (
    ForkedProcess,
    HandshakeError,
    MalformedSetup,
    PeerIncompatible,
    PeerNotAdmitted,
    PeerUnreachable,
    WrongPeer,
    named,
)
from tests.codes import coded
from tests.core.handshake.meeting import connected, in_background, soon, terms
from tests.core.identity.issuing import Issuer

ISSUER = Issuer()
ONE, ZERO = ISSUER.credentials(1), ISSUER.credentials(0)


class Pair:
    """Rank 1, which dials, and rank 0, which accepts."""

    def __init__(self) -> None:
        self.one, self.zero = SessionTable(), SessionTable()

    @contextlib.contextmanager
    def connection(
        self,
        *,
        one: tuple[Credentials, Terms] = (ONE, terms(1)),
        zero: tuple[Credentials, Terms] = (ZERO, terms(0)),
    ) -> Iterator[tuple[SecureChannel, SecureChannel]]:
        near, far = connected()
        with in_background(lambda: accept(far, *zero, soon(), sessions=self.zero)) as accepted:
            dialed = dial(near, *one, 0, soon(), self.one)
        answered = accepted[0]
        assert isinstance(answered, SecureChannel), answered
        try:
            yield dialed, answered
        finally:
            dialed.close(until=0)
            answered.close(until=0)

    def meet(self, **ends: Any) -> tuple[bytes, bytes]:
        """Returns the keys of one more connection."""
        with self.connection(**ends) as (dialed, answered):
            assert dialed.link_keys.send == answered.link_keys.receive
            assert dialed.link_keys.receive == answered.link_keys.send
            return bytes(dialed.link_keys.send), bytes(dialed.link_keys.receive)

    @property
    def counts(self) -> tuple[int, int]:
        assert (self.one.handshakes, self.one.resumptions) == (
            self.zero.handshakes,
            self.zero.resumptions,
        )
        return self.one.handshakes, self.one.resumptions


def test_only_the_first_connection_makes_a_handshake() -> None:
    pair = Pair()
    for group in ("default", "row", "column"):
        pair.meet(one=(ONE, terms(1, group=group)), zero=(ZERO, terms(0, group=group)))
    assert pair.counts == (1, 2)


@pytest.mark.threat("K4")
def test_a_replayed_epoch_repeats_no_key() -> None:
    """The untrusted store may repeat an epoch; here the processes' instances repeat too."""
    pair = Pair()
    same = {"one": (ONE, terms(1, instance="1" * 32)), "zero": (ZERO, terms(0, instance="0" * 32))}
    keys = [key for _ in range(4) for key in pair.meet(**same)]
    assert pair.counts == (1, 3)
    assert len(set(keys)) == len(keys)


def test_messages_of_any_length_go_both_ways() -> None:
    pair = Pair()
    pair.meet()
    with pair.connection() as (dialed, answered):
        long = {"type": "a", "s": "x" * 16000}
        for sender, receiver in ((dialed, answered), (answered, dialed)):
            sender.send(long)
            sender.send({"type": "b"})
            assert receiver.receive() == long
            assert receiver.receive() == {"type": "b"}
        raw = bytearray(b"\x01" + bytes(range(256)) * 200)
        dialed.send_raw(bytearray(raw), soon())
        while (heard := answered.heard(soon(), 1 << 20)) is None:
            answered.connection.wait()
        assert heard == raw
        # Records after the last frame stay unread for the bare socket.
        dialed.send({"type": "last"})
        dialed.detach().send(b"records")
        assert answered.receive() == {"type": "last"}
        assert answered.detach().recv(100) == b"records"
    assert pair.counts == (1, 1)


def test_what_two_workers_disagree_on_is_told_as_over_tls() -> None:
    pair = Pair()
    pair.meet()
    near, far = connected()
    answer = in_background(lambda: accept(far, ZERO, terms(0), soon(), sessions=pair.zero))
    with (
        answer as outcome,
        pytest.raises(WrongPeer, check=coded("handshake.wrong_group")) as raised,
    ):
        dial(near, ONE, terms(1, epoch="other"), 0, soon(), pair.one)
    assert raised.value.proven
    assert named(outcome[0]) == "handshake.wrong_group"
    assert isinstance(outcome[0], WrongPeer)
    assert outcome[0].peer == 1
    pair.meet()
    assert pair.counts == (1, 2), "the session goes on"


# ---- forward secrecy ----------------------------------------------------------------------------


@pytest.mark.threat("K5")
def test_a_stolen_session_does_not_open_what_was_before() -> None:
    """A later step's secret of a session gives none of the keys of an earlier step."""
    pair = Pair()
    pair.meet()
    (session,) = pair.one.by_id.values()
    before = session.opening
    first = bytes(before.secret)
    held = before.secret
    recorded = _recorded(pair)
    stolen = bytes(before.secret)
    assert stolen != first
    assert bytes(held) == bytes(32), "the old secret is overwritten"
    # The recorded messages are public; together with the old secret they give the key ...
    assert _set_up_key(first, recorded) == recorded["key"]
    # ... and with the present secret they do not.
    assert _set_up_key(stolen, recorded) != recorded["key"]


def _recorded(pair: Pair) -> dict[str, bytes]:
    taken: dict[str, bytes] = {}
    plain = sessions.Chain.take_step

    def take_step(self: sessions.Chain, randomness: bytes, messages: bytes) -> _native.Secret:
        secret = plain(self, randomness, messages)
        taken.update(randomness=randomness, messages=messages, key=bytes(secret))
        return secret

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sessions.Chain, "take_step", take_step)
        pair.meet()
    return taken


def _set_up_key(secret: bytes, recorded: dict[str, bytes]) -> bytes:
    info = b"sealring 2 session connection" + recorded["messages"]
    return bytes(_native.Secret(secret).derive(recorded["randomness"], info, 32))


# ---- the end of a session -----------------------------------------------------------------------


def test_a_peer_that_was_started_again_is_met_by_tls() -> None:
    pair = Pair()
    pair.meet()
    pair.zero = SessionTable()
    near, far = connected()
    answer = in_background(lambda: accept(far, ZERO, terms(0), soon(), sessions=pair.zero))
    with answer as outcome, pytest.raises(PeerUnreachable, match="no session") as raised:
        dial(near, ONE, terms(1), 0, soon(), pair.one)
    assert not raised.value.proven, "so the dialer tries again"
    assert isinstance(outcome[0], PeerUnreachable)
    pair.meet()
    assert (pair.one.handshakes, pair.zero.handshakes) == (2, 1)


@pytest.mark.threat("J30")
def test_a_session_ends_with_either_certificate(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair()
    pair.meet()

    later = datetime.now(UTC) + timedelta(days=400)
    monkeypatch.setattr(sessions, "_now", lambda: later)
    assert pair.one.with_rank(0) is None
    assert pair.one.by_id == {}


@pytest.mark.threat("J30")
def test_a_peer_that_is_no_longer_admitted_gets_no_connection_by_its_session() -> None:
    """Rank 0 judges the peer again each time, by the authorities that it trusts at that time."""
    pair = Pair()
    pair.meet()
    other = Issuer("other").credentials(0)
    near, far = connected()
    answer = in_background(lambda: accept(far, other, terms(0), soon(), sessions=pair.zero))
    with answer as outcome, pytest.raises(PeerUnreachable, match="no session"):
        dial(near, ONE, terms(1), 0, soon(), pair.one)
    assert isinstance(outcome[0], PeerUnreachable)
    assert pair.zero.with_rank(1) is None
    # By TLS the peer is told why.
    near, far = connected()
    answer = in_background(lambda: accept(far, other, terms(0), soon(), sessions=pair.zero))
    with (
        answer as outcome,
        pytest.raises(PeerNotAdmitted, check=coded("handshake.unknown_authority")),
    ):
        dial(near, ONE, terms(1), 0, soon(), pair.one)
    assert named(outcome[0]) == "handshake.unknown_authority"
    assert isinstance(outcome[0], PeerNotAdmitted)
    assert outcome[0].code == "handshake.unknown_authority"
    assert not outcome[0].proven


def test_a_session_of_another_world() -> None:
    pair = Pair()
    pair.meet()
    near, far = connected()
    six: dict[str, Any] = {"world": 6, "members": tuple(range(6))}
    answer = in_background(lambda: accept(far, ZERO, terms(0, **six), soon(), sessions=pair.zero))
    with (
        answer as outcome,
        pytest.raises(PeerIncompatible, check=coded("handshake.wrong_world_size")),
    ):
        dial(near, ONE, terms(1, **six), 0, soon(), pair.one)
    assert isinstance(outcome[0], HandshakeError)


def test_sessions_of_a_parent_are_not_a_childs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "_tables", {})
    table = sessions.process_sessions("job", 0)
    assert sessions.process_sessions("job", 0) is table
    assert sessions.process_sessions("job", 1) is not table
    monkeypatch.setattr(SessionTable, "here", property(lambda self: self is not table))
    assert sessions.process_sessions("job", 0) is not table


# ---- an adversary on the network ----------------------------------------------------------------


def opening(pair: Pair, changed: Any = None) -> bytes:
    """Returns rank 1's first message of a connection that gets no answer."""
    near, far = connected()
    with in_background(lambda: _first(far)) as said, contextlib.suppress(HandshakeError):
        dial(near, ONE, terms(1), 0, soon(), pair.one)
    assert isinstance(said[0], bytes)
    return said[0]


def _first(sock: socket.socket) -> bytes:
    with sock:
        sock.settimeout(10)
        return sock.recv(1000)


def answered(pair: Pair, first: bytes) -> BaseException | SecureChannel:
    """Sends `first` to rank 0, which must answer that it has no such session."""
    near, far = connected()
    accepting = in_background(lambda: accept(far, ZERO, terms(0), soon(), sessions=pair.zero))
    with accepting as outcome, near:
        near.settimeout(10)
        near.sendall(first)
        assert near.recv(100) == bytes([31, 0, 3, 0, 0])
    return outcome[0]


@pytest.mark.threat("J30")
def test_a_changed_or_forged_opening_is_refused_and_does_no_harm() -> None:
    pair = Pair()
    pair.meet()
    step = next(iter(pair.zero.by_id.values())).answering.step
    message = opening(pair)
    for at in (5, 20, 30, 60, 91):
        changed = bytearray(message)
        changed[at] ^= 1
        assert isinstance(answered(pair, bytes(changed)), PeerUnreachable)
    (session,) = pair.zero.by_id.values()
    assert session.answering.step == step, "no step without a proof"


@pytest.mark.threat("K4")
def test_a_replayed_opening_is_refused() -> None:
    pair = Pair()
    pair.meet()
    near, far = connected()
    heard: list[bytes] = []
    plain = resumption.SessionConnection.send_all

    def send_all(self: resumption.SessionConnection, data: bytes) -> None:
        heard.append(data)
        plain(self, data)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(resumption.SessionConnection, "send_all", send_all)
        near.close()
        far.close()
        pair.meet()
    first = next(data for data in heard if len(data) == 93)
    assert isinstance(answered(pair, first), PeerUnreachable)
    pair.meet()
    assert pair.counts == (1, 2)


@pytest.mark.parametrize(
    "answer", [b"\x1f\x00\x03\x00\x40" + bytes(64), b"\x1f\x00\x03\x00\x00", b"rubbish!" * 20, b""]
)
@pytest.mark.threat("J30")
def test_a_server_without_the_session_is_not_believed(answer: bytes) -> None:
    pair = Pair()
    pair.meet()
    near, far = connected()

    def serve() -> None:
        with far:
            far.recv(1000)
            far.sendall(answer)

    with in_background(serve), pytest.raises((PeerUnreachable, MalformedSetup)) as raised:
        dial(near, ONE, terms(1), 0, soon(), pair.one)
    assert not raised.value.proven
    assert pair.one.with_rank(0) is None, "the next attempt is a TLS handshake"
    pair.meet()
    assert (pair.one.handshakes, pair.zero.handshakes) == (2, 2)


@pytest.mark.threat("J31")
def test_a_frame_that_was_changed_is_refused() -> None:
    pair = Pair()
    pair.meet()
    with pair.connection() as (dialed, answered):
        dialed.send({"type": "a"})
        answered.socket.settimeout(10)
        frame = bytearray(answered.socket.recv(1000))
        answered.socket.setblocking(False)
        frame[-1] ^= 1
        dialed.socket.send(frame)
        with pytest.raises(MalformedSetup, match="changed on its way"):
            answered.receive()


@pytest.mark.parametrize("first", ["the second frame", "no frame"])
def test_after_a_malformed_frame_no_other_is_opened(first: str) -> None:
    key = bytes(_native.Secret.random(32))
    sealing = _native.FrameSealer(_native.Secret(key), resumption.FRAME)
    opening = _native.FrameOpener(_native.Secret(key), resumption.FRAME)
    sealing.seal(b"lost")
    second = sealing.seal(b"second")
    near, far = socket.socketpair()
    with near, far:
        near.sendall(second if first == "the second frame" else b"\x00" * 5 + second)
        with pytest.raises(ValueError, match=r"changed on its way|is no frame"):
            opening.receive(far.fileno())
        near.sendall(second)
        with pytest.raises(RuntimeError, match="keys were wiped"):
            opening.receive(far.fileno())


def test_a_frame_that_is_too_long_is_not_read() -> None:
    pair = Pair()
    pair.meet()
    with pair.connection() as (dialed, answered):
        dialed.socket.send(b"\x1f\x00\x03\xff\xff")
        with pytest.raises(MalformedSetup, match="1f0003ffff"):
            answered.receive()


def test_either_end_may_open() -> None:
    pair = Pair()
    keys = [*pair.meet()]
    near, far = connected()
    with in_background(lambda: accept(far, ONE, terms(1), soon(), sessions=pair.one)) as accepted:
        dialed = dial(near, ZERO, terms(0), 1, soon(), pair.zero)
    answered = accepted[0]
    assert isinstance(answered, SecureChannel)
    assert dialed.link_keys.send == answered.link_keys.receive
    keys += [bytes(dialed.link_keys.send), bytes(dialed.link_keys.receive)]
    dialed.close(until=0)
    answered.close(until=0)
    keys += pair.meet()
    assert pair.counts == (1, 2)
    assert len(set(keys)) == 6


@pytest.mark.threat("K4")
def test_many_connections_at_once_each_take_a_step_of_their_own() -> None:
    pair = Pair()
    pair.meet()
    keys: list[bytes] = []
    threads = [
        threading.Thread(target=lambda: keys.extend(pair.meet()), name=f"meet-{number}")
        for number in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert pair.counts == (1, 8)
    assert len(set(keys)) == 16


@pytest.mark.parametrize("changed", ["dialer", "acceptor"])
@pytest.mark.threat("J30")
def test_a_worker_with_another_key_does_not_go_on_with_its_session(changed: str) -> None:
    """Otherwise the link's key could differ from the key in the worker's statement."""
    pair = Pair()
    pair.meet()
    ends = {"one": (ISSUER.credentials(1), terms(1))}
    if changed == "acceptor":
        ends = {"zero": (ISSUER.credentials(0), terms(0))}
        near, far = connected()
        with (
            in_background(lambda: accept(far, *ends["zero"], soon(), sessions=pair.zero)),
            pytest.raises(PeerUnreachable, match="no session"),
        ):
            dial(near, ONE, terms(1), 0, soon(), pair.one)
    pair.meet(**ends)
    assert pair.counts == (2, 0)


def frames_of(count: int) -> tuple[resumption.SessionConnection, int]:
    """Returns the receiving end of a connection and how many bytes wait there for it."""
    near, far = socket.socketpair()
    key = bytes(_native.Secret.random(32))
    sender, receiver = (
        resumption.SessionConnection(sock, SessionTable(), session=None, who="x", deadline=soon())
        for sock in (near, far)
    )
    sender.sends = _native.FrameSealer(_native.Secret(key), resumption.FRAME)
    receiver.receives = _native.FrameOpener(_native.Secret(key), resumption.FRAME)
    near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 22)
    with near:
        sender.send(b"\x01" * count)
    return receiver, len(far.recv(1 << 20, socket.MSG_PEEK))


def test_the_deadline_counts_where_the_peer_never_pauses() -> None:
    """Every frame is there already, so no call waits."""
    receiver, sealed = frames_of(4 << 14)
    with receiver.socket as far:
        receiver.deadline = 0.0
        with pytest.raises(PeerUnreachable, match="in time"):
            receiver.receive(4 << 14)
        assert len(far.recv(1 << 20)) == sealed // 4 * 3


@pytest.mark.parametrize(
    "cuts", [[], [1], [3, 4, 5], [9], [13, 14], [9, 13]], ids=lambda cuts: f"cut at {cuts}"
)
def test_messages_are_found_however_frames_cut_them(cuts: list[int]) -> None:
    """The messages have 5, 0 and 300 bytes, and come in one or several frames."""
    messages = [b"hello", b"", b"x" * 300]
    whole = b"".join(len(each).to_bytes(4, "big") + each for each in messages)
    near, far = socket.socketpair()
    key = bytes(_native.Secret.random(32))
    receiver = resumption.SessionConnection(
        far, SessionTable(), session=None, who="x", deadline=soon()
    )
    sealing = _native.FrameSealer(_native.Secret(key), resumption.FRAME)
    receiver.receives = _native.FrameOpener(_native.Secret(key), resumption.FRAME)
    with near, far:
        sealed = b""
        for start, end in itertools.pairwise([0, *cuts, len(whole)]):
            sealed += sealing.seal(memoryview(whole[start:end]))
        found = []
        for byte in range(len(sealed)):  # one byte at a time: no call may lose what has come
            near.sendall(sealed[byte : byte + 1])
            while (message := receiver.message_now()) is not None:
                found.append(bytes(message))
        assert found == messages


def test_room_is_made_for_what_has_come_and_not_for_what_was_announced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    receiver, _ = frames_of(4 << 14)
    room: list[int] = []
    opened: list[bytearray] = []
    plain = resumption.SessionConnection.receive_some

    def some(self: Any, into: memoryview) -> int:
        room.append(len(into))
        count = plain(self, into)
        assert any(self._plain)
        opened.append(self._plain)
        return count

    monkeypatch.setattr(resumption.SessionConnection, "receive_some", some)
    with receiver.socket, pytest.raises(PeerUnreachable, match="closed"):
        receiver.receive(1 << 30)
    assert len(opened) == 4
    assert max(room) <= 1 << 17
    assert not any(b for frame in opened[:-1] for b in frame), "opened frames are overwritten"


def test_a_connection_that_is_cut_does_not_wait_for_its_turn() -> None:
    """Another connection waits for the peer's answer; stopping this one must not wait too."""
    pair = Pair()
    pair.meet()
    session = pair.one.with_rank(0)
    assert session is not None
    near, far = connected()
    with far, session.opening.turn:
        with (
            in_background(lambda: dial(near, ONE, terms(1), 0, soon(), pair.one)) as outcome,
            contextlib.suppress(OSError),
        ):
            near.shutdown(socket.SHUT_RDWR)
        assert isinstance(outcome[0], PeerUnreachable)
        assert "closed the connection" in str(outcome[0])


def test_bytes_behind_a_frame_stay_in_the_socket() -> None:
    """The bytes after the last frame are records and belong to the bare socket."""
    key = bytes(_native.Secret.random(32))
    sealing = _native.FrameSealer(_native.Secret(key), resumption.FRAME)
    opening = _native.FrameOpener(_native.Secret(key), resumption.FRAME)
    near, far = socket.socketpair()
    with near, far:
        near.sendall(sealing.seal(b"the last one") + b"a record")
        assert opening.receive(far.fileno()) == bytearray(b"the last one")
        assert far.recv(100) == b"a record"
        assert opening.receive(far.fileno()) is None


@pytest.mark.parametrize("what", ["again", "swapped", "of another version", "without content"])
def test_a_frame_that_is_not_the_next_one_is_refused(what: str) -> None:
    key = bytes(_native.Secret.random(32))
    sealing = _native.FrameSealer(_native.Secret(key), resumption.FRAME)
    opening = _native.FrameOpener(_native.Secret(key), resumption.FRAME)
    one, two = sealing.seal(b"one"), sealing.seal(b"two")
    sent = {
        "again": one + one,
        "swapped": two,
        "of another version": resumption.FRAME[:2] + b"\xff" + one[3:],
        "without content": resumption.FRAME + b"\x00\x10" + bytes(16),
    }[what]
    problem = "changed on its way" if what in ("again", "swapped") else "no frame: "
    near, far = socket.socketpair()
    with near, far:
        near.sendall(sent)
        if what == "again":
            assert opening.receive(far.fileno()) == bytearray(b"one")
        with pytest.raises(ValueError, match=problem):
            opening.receive(far.fileno())


def test_wiped_keys_seal_and_open_nothing() -> None:
    key = _native.Secret.random(32)
    sealing = _native.FrameSealer(key, resumption.FRAME)
    opening = _native.FrameOpener(key, resumption.FRAME)
    sealed = sealing.seal(b"x")
    sealing.wipe()
    opening.wipe()
    near, far = socket.socketpair()
    with near, far:
        near.sendall(sealed)
        with pytest.raises(RuntimeError, match="wiped"):
            opening.receive(far.fileno())
    with pytest.raises(RuntimeError, match="wiped"):
        sealing.seal(b"x")


def test_a_forked_child_seals_no_frame() -> None:
    """A child that sealed would use a nonce that its parent uses too."""
    sealing = _native.FrameSealer(_native.Secret.random(32), resumption.FRAME)
    child = os.fork()
    if child == 0:
        try:
            sealing.seal(b"x")
        except ForkedProcess:
            os._exit(7)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
