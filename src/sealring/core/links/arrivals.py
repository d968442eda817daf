"""Connections that others made, until each is a link: one object each, and how many there may be.

Anybody can open them. Until its peer is admitted a connection is in one of two stages, silent and
greeting. Each stage is bounded in all and per source, and when it is full, the connection gives way
that has kept us waiting longest. A worker's handshake takes milliseconds, so it is never the one
for long. The listeners of this process share these bounds. An admitted worker may have few.
"""

from __future__ import annotations

import logging
import os
import resource
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Generator, Sized
from dataclasses import dataclass
from typing import Final, Protocol, TypeAlias

from sealring import _native
from sealring.core.handshake.incoming import Incoming
from sealring.errors import MalformedSetup, PeerUnreachable, SealringError
from sealring.formats.bounded_connections import LEAST_SECONDS as LEAST_SECONDS
from sealring.formats.bounded_connections import BoundedConnections
from sealring.formats.bounded_connections import source_of as source_of

_LOG = logging.getLogger("sealring")

HandOver: TypeAlias = Callable[[], None]
"""Called when the socket is no longer the listener's, or the dialer's."""
Serving: TypeAlias = Generator[None, None, HandOver]
"""What is said with an admitted peer until the link is made. It yields while bytes are missing."""
MAX_CONNECTIONS_PER_WORKER: Final = 4
"""Connections of one worker that are being set up at once: a pipe for collectives, one for messages
and a further lane, and one that its worker has given up."""


class Sharer(Protocol):
    """A listener, as far as the others matter to it."""

    @property
    def silent(self) -> Sized: ...
    @property
    def greeting(self) -> Sized: ...
    def close_descriptors(self) -> None: ...


_open: Final[weakref.WeakSet[Sharer]] = weakref.WeakSet()
_opening = threading.Lock()
"""Held by a thread that changes `_open` or looks through it."""


def join(listener: Sharer) -> None:
    with _opening:
        _open.add(listener)


def leave(listener: Sharer) -> None:
    with _opening:
        _open.discard(listener)


def share_of(listener: Sharer) -> tuple[int, int]:
    """How many silent and how many greeting connections it may have now."""
    with _opening:
        others = [each for each in _open if each is not listener]
    return limits(
        len(others) + 1,
        sum(len(each.silent) for each in others),
        sum(len(each.greeting) for each in others),
    )


def _close_in_child() -> None:
    """A child that outlives its parent must not keep the parent's port open: peers would wait."""
    global _opening
    _opening = threading.Lock()  # a thread of the parent may hold it
    for listener in list(_open):
        listener.close_descriptors()


os.register_at_fork(after_in_child=_close_in_child)


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
class Arrival:
    """A connection that somebody made to this process, until it is a link or closed."""

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
    serving: Serving | None = None
    """What is said with its peer once that is admitted."""

    def forget(self) -> None:
        """Its secrets; and what it keeps of a private key. No thread may be serving it."""
        if self.incoming is not None:
            self.incoming.forget()

    def close(self) -> None:
        if self.serving is not None:
            self.serving.close()
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

    def go_on(self) -> HandOver | SealringError | None:
        """Serve an admitted peer with the bytes that have come; None while some are missing.

        An error is told to the peer. The socket stays open, so that the peer can read that.
        """
        assert self.incoming is not None
        assert self.serving is not None
        try:
            next(self.serving)
            if time.monotonic() < self.incoming.deadline:
                return None
            return self.give_up("did not finish the set-up in time")
        except StopIteration as ended:
            hand_over: HandOver = ended.value
            return hand_over
        except SealringError as error:
            self.incoming.tell(error)
            return error
        except Exception as problem:
            # Whatever this is, the peer may have caused it, so it must not end the job.
            _LOG.exception("sealring: a connection was dropped")
            who = self.incoming.who
            return MalformedSetup(f"the connection of {who} was dropped: {problem!r}")

    def give_up(self, why: str) -> SealringError:
        """The error of a link that is not made."""
        assert self.incoming is not None
        assert self.serving is not None
        self.serving.close()
        error = PeerUnreachable(f"{self.incoming.who} {why}", peer=self.incoming.rank, proven=True)
        self.incoming.tell(error)
        return error

    def hand_over(self, call: HandOver) -> None:
        try:
            call()
        except Exception:
            _LOG.exception("sealring: a worker's connection was not served to its end")


UnprovenConnections: TypeAlias = BoundedConnections[Arrival]
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
