"""A connection under a session: two messages open it, then it carries set-up messages as TLS does.

    dialer   -> open:   session id (16) || step (8) || random (32) || tag (32)
    acceptor -> answer: random (32) || tag (32)       or empty: it has no such session

Each message is in a frame. A frame has the form of a TLS record with a content type that TLS does
not use: type (1), version (2), length (2), content. A tag is HMAC-SHA256 with a key of the
session's present step, over both certificates' digests and all that was said before the tag. With
the answer both ends move the dialer's chain one step on. A dialer that gets no valid answer cannot
know whether the acceptor has done so. It ends the session, and the next attempt is a TLS handshake.
So an adversary that interferes with these two messages causes only handshakes.

Set-up messages then travel in frames too: AES-256-GCM ciphertext and tag, with one key for each
direction, a counter as the nonce and the frame's header as associated data. A changed frame raises
MalformedSetup and ends the attempt to form the group, as a changed TLS record does. No byte is read
past the last frame, because records follow on the same socket.
"""

from __future__ import annotations

import hmac
import secrets
import select
import socket
import time
from collections.abc import Callable, Generator
from typing import Final

from cryptography import x509

from sealring import _native
from sealring.core.handshake.connection import Connection
from sealring.core.handshake.sessions import ID_BYTES, Chain, Session, SessionTable
from sealring.errors import MalformedSetup, PeerUnreachable
from sealring.limits import (
    KEY_BYTES,
    MAX_SETUP_BYTES,
    PROTOCOL_VERSION,
    SESSION_FRAME,
)

FRAME: Final = bytes([SESSION_FRAME, 0, PROTOCOL_VERSION])
"""The first bytes of every frame: a content type that TLS does not use, and the version."""
_HEADER_BYTES: Final = len(FRAME) + 2
_RANDOM_BYTES: Final = 32
_MAC_BYTES: Final = 32
_OPEN_BYTES: Final = ID_BYTES + 8 + _RANDOM_BYTES + _MAC_BYTES
_ANSWER_BYTES: Final = _RANDOM_BYTES + _MAC_BYTES
_LOOK_SECONDS: Final = 0.05
SETUP_KEYS: Final = b"sealring 2 set-up keys"
_EXPORTER: Final = b"sealring 2 exporter"


class SessionConnection(Connection):
    def __init__(
        self,
        sock: socket.socket,
        sessions: SessionTable,
        *,
        session: Session | None,
        who: str,
        deadline: float,
        may_go_on: Callable[[Session], bool] = lambda _: True,
    ) -> None:
        """A dialer gives the session; for an acceptor the peer's first message names it.

        If `may_go_on` returns False, for instance because the peer is no longer admitted, an
        acceptor ends the session. The peer then tries TLS, and learns the reason from it.
        """
        super().__init__(sock, who, deadline)
        self._may_go_on = may_go_on
        self._sessions = sessions
        self._session = session
        self._opening = b""
        self._secret: _native.Secret | None = None
        self.sends: _native.FrameSealer | None = None
        self.receives: _native.FrameOpener | None = None
        self._plain = bytearray()
        """The content of the last frame, of which `_taken` bytes were taken."""
        self._taken = 0

    @property
    def own_fingerprint(self) -> bytes:
        assert self._session is not None
        return self._session.own_fingerprint

    def check_negotiated(self) -> None:
        """Does nothing: a session negotiates nothing, and its TLS connection was checked."""

    def handshake(self) -> x509.Certificate:
        """Opens the connection as the dialer. Ends the session if that fails."""
        session = self._session
        assert session is not None
        chain = session.opening
        self._take_turn(chain)
        try:
            self._open(session, chain)
        except BaseException:
            self._sessions.discard(session)
            raise
        finally:
            chain.turn.release()
        self._sessions.count_resumption()
        self.established = True
        return session.peer_certificate

    def _take_turn(self, chain: Chain) -> None:
        """Waits for this thread's turn on the chain, until the deadline or until the socket closes.

        Another thread may close the socket.
        """
        while not chain.turn.acquire(timeout=_LOOK_SECONDS):
            if time.monotonic() >= self.deadline:
                raise PeerUnreachable(f"{self.who} did not answer another connection in time")
            try:
                cut = not self._socket.recv(1, socket.MSG_PEEK)
            except BlockingIOError:
                cut = False
            except OSError:
                cut = True
            if cut:
                raise self._closed()

    def _open(self, session: Session, chain: Chain) -> None:
        fingerprints = session.own_fingerprint + session.peer_fingerprint
        ours = secrets.token_bytes(_RANDOM_BYTES)
        message = _header(_OPEN_BYTES) + session.id + chain.step.to_bytes(8, "big") + ours
        message += chain.open_tag(fingerprints + message)
        self.send_all(message)
        answer = self._receive_all(_HEADER_BYTES)
        if answer == _header(0):
            raise PeerUnreachable(f"{self.who} has no session with this worker any more")
        if answer == _header(_ANSWER_BYTES):
            answer += self._receive_all(_ANSWER_BYTES)
        said, tag = answer[:-_MAC_BYTES], answer[-_MAC_BYTES:]
        right = chain.answer_tag(fingerprints + message + said)
        if not hmac.compare_digest(tag, right):
            raise MalformedSetup(f"{self.who} did not prove that it has the session")
        theirs = said[_HEADER_BYTES:]
        self.take_keys(chain, ours + theirs, fingerprints + message + answer, dialer=True)

    def advance(self) -> x509.Certificate | None:
        """Answers the dialer's opening message as the acceptor; None while it is incomplete."""
        whole = _HEADER_BYTES + _OPEN_BYTES
        while len(self._opening) < whole:
            try:
                chunk = _native.receive_now(self._socket.fileno(), whole - len(self._opening))
            except OSError:
                chunk = b""
            if chunk is None:
                return None
            if not chunk:
                raise PeerUnreachable(f"{self.who} closed the connection during set-up")
            self._opening += chunk
        session = self._sessions.with_id(self._opening[_HEADER_BYTES:][:ID_BYTES])
        of_its_length = self._opening.startswith(_header(_OPEN_BYTES))
        if not of_its_length or session is None or not self._answer(session):
            self.send_all(_header(0))
            raise PeerUnreachable(f"{self.who} asked for a session that this worker does not have")
        self._session = session
        self._sessions.count_resumption()
        self.established = True
        return session.peer_certificate

    def _answer(self, session: Session) -> bool:
        """Answers if the peer proved the session at the step that it has here. Returns whether."""
        said, tag = self._opening[:-_MAC_BYTES], self._opening[-_MAC_BYTES:]
        step = int.from_bytes(said[_HEADER_BYTES + ID_BYTES :][:8], "big")
        fingerprints = session.peer_fingerprint + session.own_fingerprint
        chain = session.answering
        with chain.turn:
            if step != chain.step:
                return False
            if not hmac.compare_digest(tag, chain.open_tag(fingerprints + said)):
                return False
            # Checked after the tag: the id is public, and a stranger must not cause this work.
            if not self._may_go_on(session):
                self._sessions.discard(session)
                return False
            ours = secrets.token_bytes(_RANDOM_BYTES)
            answer = _header(_ANSWER_BYTES) + ours
            answer += chain.answer_tag(fingerprints + self._opening + answer)
            theirs = said[-_RANDOM_BYTES:]
            messages = fingerprints + self._opening + answer
            self.take_keys(chain, theirs + ours, messages, dialer=False)
        self.send_all(answer)
        return True

    def take_keys(self, chain: Chain, randomness: bytes, messages: bytes, *, dialer: bool) -> None:
        self._secret = chain.take_step(randomness, messages)
        keys = self._secret.derive(b"", SETUP_KEYS, 2 * KEY_BYTES)
        forth, back = keys.part(0, KEY_BYTES), keys.part(KEY_BYTES, KEY_BYTES)
        keys.wipe()
        first, second = (forth, back) if dialer else (back, forth)
        self.sends = _native.FrameSealer(first, FRAME)
        self.receives = _native.FrameOpener(second, FRAME)
        first.wipe()
        second.wipe()

    def export(self, label: bytes, length: int, context: bytes) -> _native.Secret:
        assert self._secret is not None
        info = _EXPORTER + len(label).to_bytes(4, "big") + label + context
        return self._secret.derive(b"", info, length)

    def _sending(self, data: bytes | bytearray) -> Generator[None, None, None]:
        assert self.sends is not None
        if len(data) <= _native.FRAME_BYTES:
            yield from self._sending_all(self.sends.seal(data))
            return
        for at in range(0, len(data), _native.FRAME_BYTES):
            with memoryview(data) as left, left[at : at + _native.FRAME_BYTES] as part:
                sealed = self.sends.seal(part)
            yield from self._sending_all(sealed)

    def message_now(self, most: int = MAX_SETUP_BYTES) -> bytearray | None:
        """The peer's next message. Nearly always it is one whole frame, copied only once."""
        if self._announced is None and not self._at and self._taken == len(self._plain):
            if not self._receive_frame():
                return None
            plain = self._plain
            if 4 + self._allowed(int.from_bytes(plain[:4], "big"), most) == len(plain):
                message = plain[4:]
                _native.erase(plain)
                self._plain = bytearray()
                return message
        return super().message_now(most)

    def receive_some(self, into: memoryview) -> int:
        if self._taken == len(self._plain) and not self._receive_frame():
            return 0
        count = min(len(into), len(self._plain) - self._taken)
        with memoryview(self._plain) as plain, plain[self._taken : self._taken + count] as part:
            into[:count] = part
        self._taken += count
        return count

    def _receive_frame(self) -> bool:
        """Receives a frame. Returns False while some of it is missing."""
        assert self.receives is not None
        try:
            plain = self.receives.receive(self._socket.fileno())
        except OSError as problem:
            raise self._closed() from problem
        except ValueError as problem:
            raise MalformedSetup(f"{self.who}: {problem}") from None
        if plain is None:
            return False
        _native.erase(self._plain)
        self._plain, self._taken = plain, 0
        return True

    def _drop(self) -> None:
        for secret in (self._secret, self.sends, self.receives):
            if secret is not None:
                secret.wipe()
        _native.erase(self._plain)

    def send_all(self, data: bytes) -> None:
        for _ in self._sending_all(data):
            self._wait(select.POLLOUT)

    def _sending_all(self, data: bytes) -> Generator[None, None, None]:
        at = 0
        while at < len(data):
            try:
                at += self._socket.send(data[at:] if at else data)
                continue
            except BlockingIOError:
                pass
            except OSError as problem:
                raise self._closed() from problem
            yield

    def _receive_all(self, count: int) -> bytes:
        received = b""
        while len(received) < count:
            try:
                chunk = _native.receive_now(self._socket.fileno(), count - len(received))
            except OSError as problem:
                raise self._closed() from problem
            if chunk is None:
                self._wait(select.POLLIN)
                continue
            if not chunk:
                raise self._closed()
            received += chunk
        return received

    def _closed(self) -> PeerUnreachable:
        return PeerUnreachable(f"{self.who} closed the connection during set-up")


def _header(length: int) -> bytes:
    return FRAME + length.to_bytes(2, "big")
