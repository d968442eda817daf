"""Sessions: the secrets that two processes keep from TLS for their later connections.

A session has two secrets from TLS's exporter and the two certificates. Each secret belongs to a
chain, one for the connections that each end opens, so that both ends may open at once. A connection
mixes fresh randomness of both ends into its own secret (resumption.py), and moves its chain one
step on: it derives the next secret and overwrites the old one. So no two connections share a key,
whatever an adversary replays. Somebody who steals a session later cannot compute the keys of
earlier connections.

A session ends with either process and with either certificate. Each connection checks again whether
the peer is still admitted (peers.py).
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Final

from cryptography import x509

from sealring import _native
from sealring.core.identity.kept_key import Wiped
from sealring.core.identity.verification import KnownCertificates, fingerprint_of
from sealring.core.no_fork import OwnLock
from sealring.errors import PeerUnreachable
from sealring.limits import KEY_BYTES

ID_BYTES: Final = 16
EXPORTER_LABEL: Final = b"EXPORTER-sealring-2-session"
EXPORTED_BYTES: Final = 2 * KEY_BYTES + ID_BYTES

_OPEN: Final = b"sealring 2 session open"
_ANSWER: Final = b"sealring 2 session answer"
_CONNECTION: Final = b"sealring 2 session connection"
_NEXT: Final = b"sealring 2 session next"


@dataclass(eq=False, slots=True)
class Chain:
    """The secret for the connections that one end opens, and the number of steps taken."""

    secret: _native.Secret = field(repr=False)
    step: int = 0
    turn: threading.Lock = field(default_factory=threading.Lock, repr=False)
    """A thread that moves the chain on holds this from its first message until the step."""
    _guard: threading.Lock = field(default_factory=threading.Lock, repr=False)
    """Held while the secret is used: another thread may end the session meanwhile."""
    _ended: bool = False

    # The caller of these three holds `turn`:

    def open_tag(self, message: bytes) -> bytes:
        return self._tag(_OPEN, message)

    def answer_tag(self, messages: bytes) -> bytes:
        return self._tag(_ANSWER, messages)

    def take_step(self, randomness: bytes, messages: bytes) -> _native.Secret:
        """Returns one connection's secret. Replaces the chain's secret, and wipes the old one."""
        with self._guard:
            self._require_alive()
            connection = self.secret.derive(randomness, _CONNECTION + messages, KEY_BYTES)
            following = self.secret.derive(randomness, _NEXT + messages, KEY_BYTES)
            self.secret.wipe()
            self.secret = following
            self.step += 1
        return connection

    def end(self) -> None:
        with self._guard:
            self._ended = True
            self.secret.wipe()

    def _tag(self, purpose: bytes, message: bytes) -> bytes:
        with self._guard:
            self._require_alive()
            key = self.secret.derive(b"", purpose, KEY_BYTES)
        with Wiped(key):
            return key.hmac_sha256(message)

    def _require_alive(self) -> None:
        if self._ended:
            raise PeerUnreachable("the session has ended")


@dataclass(frozen=True, eq=False, slots=True)
class Session:
    peer_rank: int
    own_certificate: x509.Certificate
    peer_certificate: x509.Certificate
    id: bytes
    """Public: the network sees it."""
    opening: Chain
    """The chain for connections that this worker opens."""
    answering: Chain
    """The chain for connections that the peer opens."""

    @staticmethod
    def exported(
        material: _native.Secret,
        peer_rank: int,
        own_certificate: x509.Certificate,
        peer_certificate: x509.Certificate,
        *,
        dialer: bool,
    ) -> Session:
        """Makes a session from the material of TLS's exporter, and wipes the material."""
        ident = bytes(material.part(2 * KEY_BYTES, ID_BYTES))
        dialers = Chain(material.part(0, KEY_BYTES))
        acceptors = Chain(material.part(KEY_BYTES, KEY_BYTES))
        material.wipe()
        chains = (dialers, acceptors) if dialer else (acceptors, dialers)
        return Session(peer_rank, own_certificate, peer_certificate, ident, *chains)

    @property
    def own_fingerprint(self) -> bytes:
        return fingerprint_of(self.own_certificate)

    @property
    def peer_fingerprint(self) -> bytes:
        return fingerprint_of(self.peer_certificate)

    def in_date(self, now: datetime) -> bool:
        ends = (self.own_certificate.not_valid_after_utc, self.peer_certificate.not_valid_after_utc)
        return now <= min(ends)

    def end(self) -> None:
        self.opening.end()
        self.answering.end()


class SessionTable:
    """A worker's sessions, at most one for each peer. All methods may be called from any thread."""

    def __init__(self) -> None:
        self._process = _native.ProcessMark()
        self._lock = threading.Lock()
        self._by_rank: dict[int, Session] = {}
        self.by_id: dict[bytes, Session] = {}
        self.certificates = KnownCertificates()
        """Verified certificates: of peers with a session, and of other members of groups."""
        self.handshakes = 0
        """The number of TLS handshakes that made a session."""
        self.resumptions = 0
        """The number of connections under a session, without TLS."""

    @property
    def here(self) -> bool:
        """False in a forked child, which has none of the secrets."""
        return self._process.here

    def add(self, session: Session) -> None:
        """Adds a session, which replaces an older one with the same rank."""
        with self._lock:
            self.handshakes += 1
            self._remove(self._by_rank.get(session.peer_rank))
            self._by_rank[session.peer_rank] = session
            self.by_id[session.id] = session

    def with_rank(self, rank: int) -> Session | None:
        with self._lock:
            return self._in_date(self._by_rank.get(rank))

    def with_id(self, ident: bytes) -> Session | None:
        with self._lock:
            return self._in_date(self.by_id.get(ident))

    def count_resumption(self) -> None:
        with self._lock:
            self.resumptions += 1

    def discard(self, session: Session) -> None:
        """Ends a session, for instance because its two ends may be at different steps."""
        with self._lock:
            self._remove(session)

    def clear(self) -> None:
        with self._lock:
            for session in list(self.by_id.values()):
                self._remove(session)

    def _in_date(self, session: Session | None) -> Session | None:
        if session is None or session.in_date(_now()):
            return session
        self._remove(session)
        return None

    def _remove(self, session: Session | None) -> None:
        if session is None:
            return
        if self._by_rank.get(session.peer_rank) is session:
            del self._by_rank[session.peer_rank]
        self.by_id.pop(session.id, None)
        session.end()


def _now() -> datetime:
    return datetime.now(UTC)


_tables: Final[dict[tuple[str, int], SessionTable]] = {}
_tables_lock: Final = OwnLock()


def process_sessions(job: str, rank: int) -> SessionTable:
    """This process's sessions as the given worker. A forked child starts with an empty table."""
    with _tables_lock:
        table = _tables.get((job, rank))
        if table is None or not table.here:
            table = _tables[job, rank] = SessionTable()
        return table
