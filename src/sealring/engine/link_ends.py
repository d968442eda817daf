"""A link on its way from the set-up to the native core."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from typing import Literal, Protocol

from sealring import _native
from sealring.links.memory import SharedMemory


class LinkEnds(Protocol):
    """What the engine takes from a link once the handshake is done (links.Link has it)."""

    @property
    def host(self) -> str: ...
    @property
    def memory(self) -> SharedMemory | None: ...
    @property
    def send_key(self) -> _native.Secret: ...
    @property
    def receive_key(self) -> _native.Secret: ...
    @property
    def peer_group_key(self) -> _native.Secret: ...
    @property
    def socket(self) -> socket.socket: ...


@dataclass(frozen=True, slots=True)
class LinkSocket:
    """The socket of a link, as those see it who look at this process from outside."""

    peer: int
    """Its rank in the job."""
    host: str
    transport: Literal["tcp", "shm"]
    inode: int
    """Linux gives the number to no other socket while this one is open."""


def socket_of(peer: int, link: LinkEnds) -> LinkSocket:
    """Called before the link is handed over."""
    transport: Literal["tcp", "shm"] = "tcp" if link.memory is None else "shm"
    return LinkSocket(peer, link.host, transport, os.fstat(link.socket.fileno()).st_ino)


def hand_over(native: _native.Endpoint, peer: int, link: LinkEnds, *, publishes: bool) -> None:
    """Gives the socket, the memory and the keys to the native core, which copies the keys."""
    keys = (link.send_key, link.receive_key)
    group_key = link.peer_group_key if publishes else None
    if link.memory is None:
        native.add_tcp_link(peer, link.socket.detach(), *keys, group_key)
    else:
        native.add_shm_link(peer, link.socket.detach(), *link.memory, *keys, group_key)
    for key in (*keys, link.peer_group_key):
        key.wipe()
