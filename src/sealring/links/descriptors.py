"""How a descriptor gets from one process of a machine to another: through a Unix socket.

The receiver opens an inbox, which is a listening socket in the abstract namespace under a random
name. The address of the inbox, its name and a token, goes to the sender over a channel that is
authentic and secret. The sender connects and leaves one message: the token, its own number, and
the descriptor. It waits for no answer. When the receiver knows, over that same channel, that the
message was left, it looks into the inbox once.

Any process in the network namespace can see the name and connect. It does not know the token, so
what it leaves is closed, and nothing waits for it. Which user a connection belongs to is not asked:
the kernel's answer (SO_PEERCRED) proves a user, not a member of the group.
"""

from __future__ import annotations

import array
import contextlib
import hmac
import os
import secrets
import socket
import struct
from dataclasses import dataclass, field
from typing import Final

from sealring.errors import Unsupported

NAME_BYTES: Final = 32
TOKEN_BYTES: Final = 32
_PREFIX: Final = b"\0sealring/"
"""The leading zero byte is what makes a Unix socket's name abstract."""
_SENDER: Final = struct.Struct("<I")
_MESSAGE_BYTES: Final = TOKEN_BYTES + _SENDER.size
_WAITING: Final = 4096
"""Connections that may wait in an inbox: Linux's own limit unless it was raised. A stranger who
wants to keep the sender out must make all of them after the inbox was opened and before the sender
connects; the link then stays with TCP."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where a descriptor may be left, and what it must come with."""

    name: bytes
    token: bytes = field(repr=False)

    @property
    def path(self) -> bytes:
        return _PREFIX + self.name.hex().encode()

    def packed(self) -> bytes:
        return self.name + self.token

    @staticmethod
    def unpacked(packed: bytes) -> Address:
        return Address(packed[:NAME_BYTES], packed[NAME_BYTES:])


PACKED_BYTES: Final = NAME_BYTES + TOKEN_BYTES


class Inbox:
    """A listening socket for the time of one exchange. The caller closes it."""

    def __init__(self) -> None:
        self.address = Address(secrets.token_bytes(NAME_BYTES), secrets.token_bytes(TOKEN_BYTES))
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._socket.setblocking(False)
            self._socket.bind(self.address.path)
            self._socket.listen(_WAITING)
        except OSError as problem:
            self._socket.close()
            raise Unsupported(f"no Unix socket can be made here: {problem.strerror}") from problem

    def take(self) -> dict[int, int]:
        """The descriptors that were left, by their senders' numbers; they are the caller's."""
        taken: dict[int, int] = {}
        for _ in range(_WAITING + 1):
            try:
                connection, _ = self._socket.accept()
            except BlockingIOError:
                break
            except OSError:  # the connection ended, or this process may open no further file
                continue
            with connection:
                left = _read(connection, self.address.token)
            if left is None:
                continue
            sender, descriptor = left
            if sender in taken:
                os.close(descriptor)
            else:
                taken[sender] = descriptor
        return taken

    def close(self) -> None:
        self._socket.close()


def leave(address: Address, descriptor: int, sender: int = 0) -> None:
    """Leave the descriptor in the inbox at the address; Unsupported if that cannot be."""
    message = address.token + _SENDER.pack(sender)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.setblocking(False)
        try:
            connection.connect(address.path)
            socket.send_fds(connection, [message], [descriptor])
        except ConnectionRefusedError as problem:
            raise Unsupported(
                "the peer is not in this worker's network namespace, where a descriptor could go"
            ) from problem
        except OSError as problem:
            raise Unsupported(
                f"a descriptor cannot be passed to the peer: {problem.strerror}"
            ) from problem


def _read(connection: socket.socket, token: bytes) -> tuple[int, int] | None:
    """The sender's number and its descriptor; None, and nothing kept, if it is no such message."""
    descriptors = array.array("i")
    # The sender left its message before it said so: what is not here now does not come.
    flags = socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
    try:
        message, ancillary, result, _ = connection.recvmsg(
            _MESSAGE_BYTES, socket.CMSG_LEN(descriptors.itemsize), flags
        )
    except OSError:
        return None
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            descriptors.frombytes(data[: len(data) - len(data) % descriptors.itemsize])
    whole = result & (socket.MSG_TRUNC | socket.MSG_CTRUNC) == 0
    if (
        whole
        and len(descriptors) == 1
        and len(message) == _MESSAGE_BYTES
        and hmac.compare_digest(message[:TOKEN_BYTES], token)
    ):
        return _SENDER.unpack(message[TOKEN_BYTES:])[0], descriptors[0]
    for descriptor in descriptors:
        with contextlib.suppress(OSError):
            os.close(descriptor)
    return None
