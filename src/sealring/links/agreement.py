"""What two verified workers settle over TLS before their records flow: group keys and transport.

dialer    -> {"type": "link", "group_key", "shm": null or an offer}
acceptor  -> {"type": "link", "group_key", "transport": "shm" or "tcp"}
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Final, Literal

from sealring.errors import MalformedSetup, Unsupported
from sealring.handshake.channel import SecureChannel
from sealring.handshake.messages import Message, digest, exactly
from sealring.links.memory import create_memory, open_memory, parse_offer

Transport = Literal["auto", "tcp", "shm"]

_OFFER: Final = frozenset({"type", "group_key", "shm"})
_ANSWER: Final = frozenset({"type", "group_key", "transport"})


@dataclass(frozen=True, slots=True)
class Settled:
    memory_fd: int | None
    peer_group_key: bytes = field(repr=False)


def settle_as_dialer(
    channel: SecureChannel, group_key: bytes, transport: Transport, own_host: str
) -> Settled:
    memory_fd, offer = None, None
    if transport == "shm" or (transport == "auto" and _near(channel, own_host)):
        try:
            memory_fd, offer = create_memory()
        except Unsupported as problem:
            if transport == "shm":
                raise _no_shared_memory(channel, str(problem)) from problem
    try:
        channel.send(
            {
                "type": "link",
                "group_key": group_key.hex(),
                "shm": None if offer is None else offer.message(),
            }
        )
        answer = _link_message(channel, _ANSWER)
        chosen = answer["transport"]
        if chosen not in ("shm", "tcp") or (chosen == "shm" and memory_fd is None):
            raise MalformedSetup(
                f"rank {channel.peer.rank} chose a transport that it was not offered",
                peer=channel.peer.rank,
                proven=True,
            )
        if chosen == "tcp" and transport == "shm":
            raise _no_shared_memory(channel, "the peer could not open, or refused, our memory")
    except BaseException:
        if memory_fd is not None:
            os.close(memory_fd)
        raise
    if chosen == "tcp" and memory_fd is not None:
        os.close(memory_fd)
        memory_fd = None
    return Settled(memory_fd, bytes.fromhex(digest(answer, "group_key")))


def settle_as_acceptor(channel: SecureChannel, group_key: bytes, transport: Transport) -> Settled:
    message = _link_message(channel, _OFFER)
    peer_group_key = bytes.fromhex(digest(message, "group_key"))
    offer = None if message["shm"] is None else parse_offer(message["shm"])
    memory_fd, reason = None, "the peer offered none"
    if offer is not None and transport != "tcp":
        try:
            memory_fd = open_memory(offer)
        except Unsupported as problem:
            reason = str(problem)
    if memory_fd is None and transport == "shm":
        raise _no_shared_memory(channel, reason)
    try:
        channel.send(
            {
                "type": "link",
                "group_key": group_key.hex(),
                "transport": "tcp" if memory_fd is None else "shm",
            }
        )
    except BaseException:
        if memory_fd is not None:
            os.close(memory_fd)
        raise
    return Settled(memory_fd, peer_group_key)


def _link_message(channel: SecureChannel, fields: frozenset[str]) -> Message:
    message = channel.receive()
    if message["type"] != "link":
        raise MalformedSetup(
            f"rank {channel.peer.rank} did not say how to link",
            peer=channel.peer.rank,
            proven=True,
        )
    exactly(message, fields)
    digest(message, "group_key")
    return message


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
        f"shared memory is required and cannot be had with rank {channel.peer.rank} on "
        f"{channel.peer_hello.host} ({reason}): use the transport auto or tcp"
    )
