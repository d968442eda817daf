"""The process at the other end of a Unix socket, as the kernel knows it."""

from __future__ import annotations

import socket
import struct
from dataclasses import dataclass
from typing import Final

_CREDENTIALS: Final = struct.Struct("3i")


@dataclass(frozen=True, slots=True)
class PeerProcess:
    pid: int
    uid: int


def peer_of(sock: socket.socket) -> PeerProcess:
    """For a connection to a listening socket: the process that called listen()."""
    packed = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(packed)
    return PeerProcess(pid, uid)
