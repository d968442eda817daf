"""A link on its way from the set-up to the native core."""

from __future__ import annotations

import socket
from typing import Protocol

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
