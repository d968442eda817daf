"""What two verified workers settle over TLS before their records flow: the transport.

dialer    -> {"type": "accept", "shm": null or where the acceptor may leave its memory}
             without an offer: the acceptor's last message follows, "tcp"
             with one: the acceptor leaves its memory there
acceptor  -> {"type": "link", "shm": null or where the dialer may leave its memory}
             the dialer takes the acceptor's memory and leaves its own
dialer    -> {"type": "transport", "transport": "shm" or "tcp"}
             the acceptor takes the dialer's memory
acceptor  -> {"type": "transport", "transport": "shm" or "tcp"}, "shm" only if the dialer said so

So each end has mapped the other's memory before the last "shm" is said, and neither waits for the
other but over TLS. The acceptor's last message also says that it takes this connection for the link
of the two: the dialer does not before that.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Final, Literal, Self

from sealring.core.handshake.channel import SecureChannel
from sealring.core.handshake.messages import Hello, Message, exactly
from sealring.core.identity.verification import VerifiedPeer
from sealring.core.links.descriptors import Address, leave
from sealring.core.links.memory import (
    OwnMemory,
    SharedMemory,
    create_memory,
    offer_of,
    parse_offer,
)
from sealring.errors import MalformedSetup, Unsupported

Transport = Literal["auto", "tcp", "shm"]

_LINK: Final = frozenset({"type", "shm"})
_TRANSPORT: Final = frozenset({"type", "transport"})
_REFUSED: Final = "the peer could not open, or refused, our memory"


@dataclass(frozen=True, slots=True)
class Settled:
    memory: SharedMemory | None


class DialersMemory:
    """A dialer's own memory, from its offer until the transport is settled; then it is closed."""

    def __init__(self, sock: socket.socket, transport: Transport, own_host: str) -> None:
        self._socket = sock
        self._transport = transport
        self._own_host = own_host
        self._own: OwnMemory | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._own is not None:
            self._own.close()

    def offer(self, peer: VerifiedPeer, hello: Hello) -> Message | None:
        near = self._transport == "auto" and _near(self._socket, hello.host, self._own_host)
        if self._transport == "shm" or near:
            self._own = _own_memory(self._transport, peer.rank, hello.host)
        return None if self._own is None else offer_of(self._own.inbox.address)

    def settle(self, channel: SecureChannel, *, bare_next: bool = False) -> Settled:
        """`bare_next`: records follow the acceptor's last message, and no further set-up message.

        The acceptor may then read records as soon as it has the dialer's last message: a refusal
        would be a forged record to it.
        """
        own, memory = self._own, None
        if own is not None:
            memory = self._exchange(channel, own)
            channel.send(_transport_of(memory))
        if bare_next:
            channel.say_no_more()
        confirmed = _serves(channel, channel.receive())
        if confirmed and memory is None:
            raise _malformed(channel, "chose a transport that it was not offered")
        if memory is not None and not confirmed:
            memory = None
            if self._transport == "shm":
                raise _no_shared_memory(channel.peer.rank, channel.peer_hello.host, _REFUSED)
        return Settled(memory)

    def _exchange(self, channel: SecureChannel, own: OwnMemory) -> SharedMemory | None:
        offer = _offered(channel, channel.receive())
        reason = _REFUSED
        if offer is not None:
            try:
                memory = SharedMemory(own.mapping, own.take_peers())
                leave(offer, [own.fd])
                return memory
            except Unsupported as problem:
                reason = str(problem)
        if self._transport == "shm":
            raise _no_shared_memory(channel.peer.rank, channel.peer_hello.host, reason)
        return None


def settle_as_acceptor(
    channel: SecureChannel, transport: Transport, reserve: Callable[[], None] = lambda: None
) -> Generator[None, None, Settled]:
    """`reserve` is called before the last message; what it raises is told to the dialer.

    It yields while a message of the dialer is missing, or while the dialer takes nothing: the
    thread that is here serves all listeners of the process.
    """
    rank, host = channel.peer.rank, channel.peer_hello.host
    offer = None if channel.offer is None else parse_offer(channel.offer)
    own = memory = None
    reason = "the peer offered none"
    try:
        if offer is not None and transport != "tcp":
            own = _own_memory(transport, rank, host)
        if offer is not None:
            left = False
            if own is not None:
                try:
                    leave(offer, [own.fd])
                    left = True
                except Unsupported as problem:
                    reason = str(problem)
            if not left and transport == "shm":
                raise _no_shared_memory(rank, host, reason)
            inbox = offer_of(own.inbox.address) if own is not None and left else None
            yield from channel.sending({"type": "link", "shm": inbox})
            chosen = _serves(channel, (yield from channel.awaited()))
            if chosen and not left:
                raise _malformed(channel, "chose a transport that it was not offered")
            reason = _REFUSED
            if chosen and own is not None:
                try:
                    memory = SharedMemory(own.mapping, own.take_peers())
                except Unsupported as problem:
                    reason = str(problem)
        if memory is None and transport == "shm":
            raise _no_shared_memory(rank, host, reason)
        reserve()
        yield from channel.sending(_transport_of(memory))
    finally:
        if own is not None:
            own.close()
    return Settled(memory)


def _own_memory(transport: Transport, peer: int, host: str) -> OwnMemory | None:
    """Our part of the memory, with its file and inbox, if this machine has some to give."""
    try:
        return create_memory()
    except Unsupported as problem:
        if transport == "shm":
            raise _no_shared_memory(peer, host, str(problem)) from problem
    return None


def _offered(channel: SecureChannel, message: Message) -> Address | None:
    _require(channel, message, "link", _LINK)
    return None if message["shm"] is None else parse_offer(message["shm"])


def _transport_of(memory: SharedMemory | None) -> Message:
    return {"type": "transport", "transport": "tcp" if memory is None else "shm"}


def _serves(channel: SecureChannel, message: Message) -> bool:
    """Whether the peer says that shared memory serves."""
    _require(channel, message, "transport", _TRANSPORT)
    if message["transport"] not in ("tcp", "shm"):
        raise _malformed(channel, "chose a transport that it was not offered")
    return bool(message["transport"] == "shm")


def _require(channel: SecureChannel, message: Message, kind: str, fields: frozenset[str]) -> None:
    if message["type"] != kind:
        raise _malformed(channel, "did not say how to link")
    exactly(message, fields)


def _malformed(channel: SecureChannel, what: str) -> MalformedSetup:
    return MalformedSetup(f"rank {channel.peer.rank} {what}", peer=channel.peer.rank, proven=True)


def _near(sock: socket.socket, host: str, own_host: str) -> bool:
    """Whether an offer is worth making; the acceptor's checks decide."""
    if host == own_host:
        return True
    try:
        own, peer = sock.getsockname(), sock.getpeername()
    except OSError:  # already cut, as the next message will tell
        return False
    return isinstance(own, tuple) and isinstance(peer, tuple) and bool(own[0] == peer[0])


def _no_shared_memory(peer: int, host: str, reason: str) -> Unsupported:
    return Unsupported(
        f"shared memory is required and not available with rank {peer} on {host} ({reason}): use "
        "the transport auto or tcp"
    )
