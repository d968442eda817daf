"""What set-up leaves behind: a plain socket, perhaps shared memory, and the keys for both."""

from __future__ import annotations

import socket
from dataclasses import dataclass, field
from typing import Final

from sealring import _native
from sealring.core.handshake.channel import SecureChannel
from sealring.core.handshake.connection import never_block
from sealring.core.handshake.terms import Purpose
from sealring.core.links.memory import SharedMemory

# A host that answers nothing for about a minute is gone; a rank that merely computes has a kernel
# that answers for it.
_KEEPALIVE_IDLE_SECONDS: Final = 15
_KEEPALIVE_INTERVAL_SECONDS: Final = 5
_KEEPALIVE_COUNT: Final = 9


@dataclass(frozen=True, slots=True)
class Link:
    """One peer of the group. Its owner closes the socket."""

    peer: int
    """Its rank in the job."""
    purpose: Purpose
    lane: int
    host: str
    """Its own name for its machine, for people to read."""
    address: str
    socket: socket.socket
    """Connected, non-blocking, no longer TLS. With shared memory: doorbell and sign of life."""
    memory: SharedMemory | None
    dialer: bool
    """Whether this side dialed."""
    send_key: _native.Secret = field(repr=False)
    receive_key: _native.Secret = field(repr=False)
    peer_group_key: _native.Secret | None = field(repr=False)
    """Of a first link; the engine has every member's by the time the others are made."""
    fingerprint: str
    """SHA-256 of the peer's public key, by which a broker would take it out of the job."""

    def discard(self) -> None:
        self.socket.close()
        self.send_key.wipe()
        self.receive_key.wipe()


def link_of(
    channel: SecureChannel,
    memory: SharedMemory | None,
    peer_group_key: _native.Secret | None,
    *,
    dialer: bool,
) -> Link:
    """Ends the channel; its socket, prepared before, carries records from here on."""
    return Link(
        peer=channel.peer.rank,
        purpose=channel.peer_hello.purpose,
        lane=channel.peer_hello.lane,
        host=channel.peer_hello.host,
        address=channel.address,
        socket=channel.detach(),
        memory=memory,
        dialer=dialer,
        send_key=channel.link_keys.send,
        receive_key=channel.link_keys.receive,
        peer_group_key=peer_group_key,
        fingerprint=channel.peer.key,
    )


def send_without_delay(sock: socket.socket) -> None:
    """Set-up is many short messages: each would wait for the last one's acknowledgement (40 ms)."""
    if sock.family in (socket.AF_INET, socket.AF_INET6):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def prepare_socket(sock: socket.socket) -> None:
    """Options for a socket that carries records.

    TCP_USER_TIMEOUT is left alone: Linux counts a peer against it that is alive and does not read
    (it computes, and its window is full), and lets it replace the count of keep-alive probes. What
    bounds a collective whose bytes are not acknowledged is the collective's own timeout.
    """
    never_block(sock)
    if sock.family not in (socket.AF_INET, socket.AF_INET6):
        return
    tcp = socket.IPPROTO_TCP
    sock.setsockopt(tcp, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(tcp, socket.TCP_KEEPIDLE, _KEEPALIVE_IDLE_SECONDS)
    sock.setsockopt(tcp, socket.TCP_KEEPINTVL, _KEEPALIVE_INTERVAL_SECONDS)
    sock.setsockopt(tcp, socket.TCP_KEEPCNT, _KEEPALIVE_COUNT)
