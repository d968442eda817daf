"""Connections whose peer is not admitted yet: how many there may be, and which one gives way.

Anybody can open them. There are two stages, silent and greeting. Each is bounded in all and per
source, and when it is full, the connection gives way that has kept us waiting longest. A worker's
handshake takes milliseconds, so it is never the one for long.
"""

from __future__ import annotations

import resource
import socket
import sys
from dataclasses import dataclass
from typing import Final, TypeAlias

from sealring import _native
from sealring.core.handshake.incoming import Incoming
from sealring.formats.bounded_connections import LEAST_SECONDS as LEAST_SECONDS
from sealring.formats.bounded_connections import BoundedConnections
from sealring.formats.bounded_connections import source_of as source_of

MOST_SILENT: Final = 4096
"""Connections that have sent nothing: a descriptor each."""
MOST_GREETING: Final = 1024
"""Connections in TLS's handshake: about 90 kB each."""
_LEAST_SHARE: Final = 16
"""With fewer, a listener's own workers would displace each other."""
ALWAYS_FREE: Final = _LEAST_SHARE // 2
"""A listener with fewer has room for one more of any source, however much the others hold."""
SILENT_SECONDS: Final = 3.0
"""How long a peer may leave us without a byte."""
PROOF_SECONDS: Final = 10.0
"""How long it may take in all to prove itself."""
REFUSAL_SECONDS: Final = 1.0
"""How long a refused peer may take to read why."""
_DISCARDED_BYTES: Final = 64 << 10
"""What it may send meanwhile."""


@dataclass(eq=False, slots=True)
class Unproven:
    sock: socket.socket
    address: str
    port: int
    source: str
    """What counts as one source: an IPv4 address, or the /64 of an IPv6 one."""
    accepted: float
    incoming: Incoming | None = None
    """From its first byte on."""
    refused: float | None = None
    """When it was refused; the socket is open only for it to read the refusal."""
    more: bool = False
    """Bytes came while it was being served."""
    discarded: int = 0
    """Bytes that came after the refusal."""
    waiting_since: float | None = None
    """Since when we wait for the peer; None while it is being served."""

    knocking: bool = False
    """It has sent its first bytes, and waits until it is its turn."""

    def forget(self) -> None:
        """Its secrets; and what it keeps of a private key. No thread may be serving it."""
        if self.incoming is not None:
            self.incoming.forget()

    def close(self) -> None:
        self.forget()
        self.sock.close()

    @property
    def rank(self) -> int | None:
        """Of its peer, once that is admitted."""
        return None if self.incoming is None else self.incoming.rank

    def discard(self) -> bool:
        """What a refused peer has sent since; True if it has closed, or sends without end."""
        try:
            while self.discarded < _DISCARDED_BYTES:
                if not (chunk := self.sock.recv(16 << 10)):
                    break
                self.discarded += len(chunk)
        except BlockingIOError:
            return False
        except OSError:
            pass
        return True

    def has_bytes(self) -> bool:
        """Whether the peer has sent something, closed the connection, or reset it."""
        try:
            return _native.receive_now(self.sock.fileno(), 1, peek=True) is not None
        except OSError:
            return True

    def overdue(self, now: float) -> bool:
        if self.waiting_since is None:
            return False
        if self.refused is not None:
            return now > self.refused + REFUSAL_SECONDS
        return now > min(self.waiting_since + SILENT_SECONDS, self.accepted + PROOF_SECONDS)


UnprovenConnections: TypeAlias = BoundedConnections[Unproven]
"""Those of one stage."""


def limits(
    listeners: int = 1, silent_elsewhere: int = 0, greeting_elsewhere: int = 0
) -> tuple[int, int]:
    """The most silent and the most greeting connections of one of this process's listeners.

    Together they keep to a part of the process's limit of files. A listener may have what the
    others leave free, because many members may dial it at once; and it may always have an equal
    share, so that a flood at one group's listener leaves the others theirs.
    """
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    silent, greeting = MOST_SILENT, MOST_GREETING
    if files != resource.RLIM_INFINITY:
        silent, greeting = min(silent, files // 4), min(greeting, files // 8)
    if listeners <= 1:
        return max(2, silent), max(2, greeting)
    return (
        max(_LEAST_SHARE, silent // listeners, silent - silent_elsewhere),
        max(_LEAST_SHARE, greeting // listeners, greeting - greeting_elsewhere),
    )


def silent_for(sock: socket.socket) -> float:
    """For how many seconds an accepted connection has been open without a byte from the peer.

    It may have waited in the kernel's queue for long. The last acknowledgement that came is the one
    that opened the connection (struct tcp_info, tcpi_last_ack_recv, in milliseconds).
    """
    information = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 60)
    return int.from_bytes(information[56:60], sys.byteorder) / 1000
