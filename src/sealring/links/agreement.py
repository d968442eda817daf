"""What two verified workers settle over TLS before their records flow: the transport.

dialer    -> {"type": "link", "shm": null or where the acceptor may leave its memory}
             the acceptor leaves it there
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

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, Literal

from sealring.errors import MalformedSetup, Unsupported
from sealring.handshake.channel import SecureChannel
from sealring.handshake.messages import Message, exactly
from sealring.links.descriptors import Address, leave
from sealring.links.memory import (
    OwnMemory,
    SharedMemory,
    create_memory,
    offer_of,
    parse_offer,
)

Transport = Literal["auto", "tcp", "shm"]

_LINK: Final = frozenset({"type", "shm"})
_TRANSPORT: Final = frozenset({"type", "transport"})
_REFUSED: Final = "the peer could not open, or refused, our memory"


@dataclass(frozen=True, slots=True)
class Settled:
    memory: SharedMemory | None


def settle_as_dialer(
    channel: SecureChannel, transport: Transport, own_host: str, *, bare_next: bool = False
) -> Settled:
    """`bare_next`: records follow the acceptor's last message, and no further set-up message."""
    wanted = transport == "shm" or (transport == "auto" and _near(channel, own_host))
    with _own_memory(channel, transport, wanted) as own:
        _send_link(channel, own)
        offer = _receive_link(channel)
        if offer is not None and own is None:
            raise _malformed(channel, "offered memory that it was not asked for")
        memory, reason = None, _REFUSED
        if offer is not None and own is not None:
            try:
                memory = SharedMemory(own.mapping, own.take_peers())
                leave(offer, own.fd)
            except Unsupported as problem:
                memory, reason = None, str(problem)
        if memory is None and transport == "shm":
            raise _no_shared_memory(channel, reason)
        _send_transport(channel, memory)
        if bare_next:
            # The acceptor may read records from here on: a refusal would be a forged one to it.
            channel.say_no_more()
        confirmed = _receive_transport(channel)
        if confirmed and memory is None:
            raise _malformed(channel, "chose a transport that it was not offered")
        if memory is not None and not confirmed:
            memory = None
            if transport == "shm":
                raise _no_shared_memory(channel, _REFUSED)
    return Settled(memory)


def settle_as_acceptor(
    channel: SecureChannel, transport: Transport, reserve: Callable[[], None] = lambda: None
) -> Settled:
    """`reserve` is called before the last message; what it raises is told to the dialer."""
    offer = _receive_link(channel)
    with _own_memory(channel, transport, offer is not None and transport != "tcp") as own:
        left, reason = False, "the peer offered none"
        if offer is not None and own is not None:
            try:
                leave(offer, own.fd)
                left = True
            except Unsupported as problem:
                reason = str(problem)
        if not left and transport == "shm":
            raise _no_shared_memory(channel, reason)
        _send_link(channel, own if left else None)
        chosen = _receive_transport(channel)
        if chosen and not left:
            raise _malformed(channel, "chose a transport that it was not offered")
        memory, reason = None, _REFUSED
        if chosen and own is not None:
            try:
                memory = SharedMemory(own.mapping, own.take_peers())
            except Unsupported as problem:
                reason = str(problem)
        if memory is None and transport == "shm":
            raise _no_shared_memory(channel, reason)
        reserve()
        _send_transport(channel, memory)
    return Settled(memory)


@contextmanager
def _own_memory(
    channel: SecureChannel, transport: Transport, wanted: bool
) -> Iterator[OwnMemory | None]:
    """Our part of the memory, with its file and inbox, which are closed after the exchange."""
    own = None
    if wanted:
        try:
            own = create_memory()
        except Unsupported as problem:
            if transport == "shm":
                raise _no_shared_memory(channel, str(problem)) from problem
    try:
        yield own
    finally:
        if own is not None:
            own.close()


def _send_link(channel: SecureChannel, own: OwnMemory | None) -> None:
    offer = None if own is None else offer_of(own.inbox.address)
    channel.send({"type": "link", "shm": offer})


def _receive_link(channel: SecureChannel) -> Address | None:
    message = _receive(channel, "link", _LINK)
    return None if message["shm"] is None else parse_offer(message["shm"])


def _send_transport(channel: SecureChannel, memory: SharedMemory | None) -> None:
    channel.send({"type": "transport", "transport": "tcp" if memory is None else "shm"})


def _receive_transport(channel: SecureChannel) -> bool:
    """Whether the peer says that shared memory serves."""
    message = _receive(channel, "transport", _TRANSPORT)
    if message["transport"] not in ("tcp", "shm"):
        raise _malformed(channel, "chose a transport that it was not offered")
    return bool(message["transport"] == "shm")


def _receive(channel: SecureChannel, kind: str, fields: frozenset[str]) -> Message:
    message = channel.receive()
    if message["type"] != kind:
        raise _malformed(channel, "did not say how to link")
    exactly(message, fields)
    return message


def _malformed(channel: SecureChannel, what: str) -> MalformedSetup:
    return MalformedSetup(f"rank {channel.peer.rank} {what}", peer=channel.peer.rank, proven=True)


def _near(channel: SecureChannel, own_host: str) -> bool:
    """Whether an offer is worth making; the acceptor's checks decide."""
    if channel.peer_hello.host == own_host:
        return True
    try:
        own, peer = channel.socket.getsockname(), channel.socket.getpeername()
    except OSError:  # already cut, as the next message will tell
        return False
    return isinstance(own, tuple) and isinstance(peer, tuple) and bool(own[0] == peer[0])


def _no_shared_memory(channel: SecureChannel, reason: str) -> Unsupported:
    return Unsupported(
        f"shared memory is required and not available with rank {channel.peer.rank} on "
        f"{channel.peer_hello.host} ({reason}): use the transport auto or tcp"
    )
