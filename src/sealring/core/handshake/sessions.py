"""Sessions: what two processes that proved themselves by TLS keep for their later connections.

A session is two secrets from TLS's exporter and the two certificates. Each secret is a chain: one
for the connections that one end opens, one for those of the other end, so that both may open at
once. A connection mixes fresh randomness of both ends into its own secret (resumption.py) and takes
its chain one step on: the next secret is derived and the old one overwritten. So no two connections
share a key, whatever an adversary replays, and who gets hold of a session later cannot compute the
keys of the connections before.

A session ends with either process, and with either certificate. Whether the peer is still admitted
is judged anew for each connection (channel.py).
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
    """The secret of the connections that one end opens, and the step that it has reached."""

    secret: _native.Secret = field(repr=False)
    step: int = 0
    turn: threading.Lock = field(default_factory=threading.Lock, repr=False)
    """Held by the thread that takes the chain one step on, from its first message to the step."""
    _guard: threading.Lock = field(default_factory=threading.Lock, repr=False)
    """Held while the secret is used: another thread may end the session meanwhile."""
    _ended: bool = False

    # In one's turn:

    def open_tag(self, message: bytes) -> bytes:
        return self._tag(_OPEN, message)

    def answer_tag(self, messages: bytes) -> bytes:
        return self._tag(_ANSWER, messages)

    def take_step(self, randomness: bytes, messages: bytes) -> _native.Secret:
        """The secret of one connection; the chain's own is replaced and the old one wiped."""
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
    """Public. Known to the two ends and to the network between them."""
    opening: Chain
    """For the connections that this worker opens."""
    answering: Chain
    """For those that the peer opens."""

    @staticmethod
    def exported(
        material: _native.Secret,
        peer_rank: int,
        own_certificate: x509.Certificate,
        peer_certificate: x509.Certificate,
        *,
        dialer: bool,
    ) -> Session:
        """From what TLS's exporter gave both ends, which is wiped."""
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
        """Of those, and of members of groups that this worker has no session with."""
        self.handshakes = 0
        """TLS handshakes that ended in a session."""
        self.resumptions = 0
        """Connections under a session, without TLS."""

    @property
    def here(self) -> bool:
        """False in a forked child, which has none of the secrets."""
        return self._process.here

    def add(self, session: Session) -> None:
        """A newer session with a rank takes the place of the older one."""
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
        """End a session whose two ends may no longer be at one step."""
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
    """The sessions of this process as that worker; a forked child starts with none."""
    with _tables_lock:
        table = _tables.get((job, rank))
        if table is None or not table.here:
            table = _tables[job, rank] = SessionTable()
        return table
