"""How descriptors get from one process of a machine to another: through a Unix socket.

The receiver opens an inbox: datagram sockets in the abstract namespace under a random name. The
address of the inbox, its name and a token, goes to the sender over a channel that is authentic and
secret. The sender sends one datagram: the token, its own number, and the descriptors. It waits for
no answer. When the receiver knows, over that same channel, that the datagram was sent, it looks
into the inbox once.

Any process in the network namespace can see the name and send something. The kernel compares the
token, by a filter of the socket, while the sender is in its call: what has another one never gets
to the receiver. That matters because a descriptor must be closed by the process that has it last,
and that can take as long as its sender likes: a TCP socket that lingers, a file whose file system
is a process of the sender's. Which user a datagram comes from is not asked: the kernel's answer
(SO_PEERCRED) proves a user, not a member of the group.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import fcntl
import hmac
import os
import secrets
import socket
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from sealring.core.links.threads import borrow
from sealring.errors import Unsupported

NAME_BYTES: Final = 32
TOKEN_BYTES: Final = 32
_PREFIX: Final = b"\0sealring/"
"""The leading zero byte is what makes a Unix socket's name abstract."""
_SENDER: Final = struct.Struct("<I")
_MESSAGE_BYTES: Final = TOKEN_BYTES + _SENDER.size
_SENDERS_OF_A_SOCKET: Final = 8
"""Linux keeps 11 datagrams for a socket unless net.unix.max_dgram_qlen was changed."""
_MOST_DESCRIPTORS: Final = 253
"""Of one datagram: Linux's own limit."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where descriptors may be left, and what they must come with."""

    name: bytes
    token: bytes = field(repr=False)

    def path(self, sender: int) -> bytes:
        """The name of the socket for the sender with this number."""
        return b"%s%s/%d" % (_PREFIX, self.name.hex().encode(), sender // _SENDERS_OF_A_SOCKET)

    def packed(self) -> bytes:
        return self.name + self.token

    @staticmethod
    def unpacked(packed: bytes) -> Address:
        return Address(packed[:NAME_BYTES], packed[NAME_BYTES:])


PACKED_BYTES: Final = NAME_BYTES + TOKEN_BYTES


class Inbox:
    """Sockets for the time of one exchange. The caller closes it."""

    def __init__(self, senders: Iterable[int] = (0,)) -> None:
        """`senders` are the numbers of those that may leave something."""
        self.address = Address(secrets.token_bytes(NAME_BYTES), secrets.token_bytes(TOKEN_BYTES))
        self._senders = frozenset(senders)
        self._sockets: list[socket.socket] = []
        try:
            for path in sorted({self.address.path(sender) for sender in self._senders}):
                self._sockets.append(one := socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
                one.setblocking(False)
                _admit_only(one, self.address.token)  # before others can reach it
                one.bind(path)
        except OSError as problem:
            self.close()
            raise Unsupported(f"no Unix socket can be made here: {problem.strerror}") from problem

    def take(self) -> dict[int, list[int]]:
        """The descriptors that were left, by their senders' numbers.

        They are the caller's, who closes them with `close_received`.
        """
        taken: dict[int, list[int]] = {}
        for one in self._sockets:
            # More than the senders may leave: one that goes on and on is not listened to for ever.
            for _ in range(2 * _SENDERS_OF_A_SOCKET):
                try:
                    sender, descriptors = _read(one, self.address.token)
                except OSError:  # there is no further one
                    break
                if descriptors and sender in self._senders - taken.keys():
                    taken[sender] = descriptors
                else:
                    close_received(descriptors)
        return taken

    def close(self) -> None:
        for one in self._sockets:
            # What the kernel finds in a socket that is closed, it would close on this thread.
            with contextlib.suppress(OSError):
                _attach(one, [(_RETURN, 0, 0, 0)])  # nothing is admitted any more
                while True:
                    close_received(_read(one, self.address.token)[1])
            one.close()


def leave(address: Address, descriptors: Sequence[int], sender: int = 0) -> None:
    """Leave descriptors in the inbox at the address; Unsupported if that cannot be."""
    message = address.token + _SENDER.pack(sender)
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))]
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as own:
            own.setblocking(False)
            own.sendmsg([message], rights, 0, address.path(sender))
    except ConnectionRefusedError as problem:
        raise Unsupported(
            "the peer is not in this worker's network namespace, where a descriptor could go"
        ) from problem
    except OSError as problem:
        raise Unsupported(
            f"a descriptor cannot be passed to the peer: {problem.strerror}"
        ) from problem


def close_received(descriptors: Iterable[int]) -> None:
    """Closes what another process sent, which may not be what it should be.

    To close a memory file takes no time. What else it may be is closed by another thread.
    """
    others = []
    for descriptor in descriptors:
        try:
            fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
            os.close(descriptor)
        except OSError:  # no memory file
            others.append(descriptor)
    if not others:
        return

    def close() -> None:
        for descriptor in others:
            os.close(descriptor)

    try:
        borrow("sealring-close", close)
    except RuntimeError:  # no more threads are allowed here
        close()


def _read(inbox: socket.socket, token: bytes) -> tuple[int, list[int]]:
    """The sender's number and its descriptors, none if it is no such message.

    OSError if there is none.
    """
    descriptors = array.array("i")
    message, ancillary, result, _ = inbox.recvmsg(
        _MESSAGE_BYTES,
        socket.CMSG_SPACE(_MOST_DESCRIPTORS * descriptors.itemsize),
        socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC,
    )
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            descriptors.frombytes(data[: len(data) - len(data) % descriptors.itemsize])
    whole = result & (socket.MSG_TRUNC | socket.MSG_CTRUNC) == 0 and len(message) == _MESSAGE_BYTES
    # The filter has compared it, unless this kernel only says that it takes filters.
    if not whole or not hmac.compare_digest(message[:TOKEN_BYTES], token):
        close_received(descriptors)
        return 0, []
    return _SENDER.unpack(message[TOKEN_BYTES:])[0], descriptors.tolist()


# ---- the filter: a program of the kernel's, which sees a datagram before it is queued ------------

_SO_ATTACH_FILTER: Final = 26  # no name in Python
_INSTRUCTION: Final = struct.Struct("=HBBI")
_PROGRAM: Final = struct.Struct("@HP")
_LOAD_LENGTH, _LOAD_WORD, _LOAD_ZERO, _LOAD_SUM = 0x80, 0x20, 0x00, 0x60
_XOR, _OR_X, _TO_X, _STORE_SUM, _IF_EQUAL, _RETURN = 0xA4, 0x4C, 0x07, 0x02, 0x15, 0x06
_WHOLE: Final = 0xFFFFFFFF


def _admit_only(inbox: socket.socket, token: bytes) -> None:
    """Has the kernel drop all datagrams but those of a message's length that begin with the token.

    Every word of the token is compared, so that the time tells nothing of it.
    """
    code = [(_LOAD_LENGTH, 0, 0, 0), (_IF_EQUAL, 1, 0, _MESSAGE_BYTES), (_RETURN, 0, 0, 0)]
    code += [(_LOAD_ZERO, 0, 0, 0), (_STORE_SUM, 0, 0, 0)]
    for place in range(0, len(token), 4):
        word = int.from_bytes(token[place : place + 4])
        code += [(_LOAD_WORD, 0, 0, place), (_XOR, 0, 0, word), (_TO_X, 0, 0, 0)]
        code += [(_LOAD_SUM, 0, 0, 0), (_OR_X, 0, 0, 0), (_STORE_SUM, 0, 0, 0)]
    code += [(_IF_EQUAL, 0, 1, 0), (_RETURN, 0, 0, _WHOLE), (_RETURN, 0, 0, 0)]
    _attach(inbox, code)


def _attach(inbox: socket.socket, code: Sequence[tuple[int, int, int, int]]) -> None:
    packed = b"".join(_INSTRUCTION.pack(*each) for each in code)
    memory = ctypes.create_string_buffer(packed, len(packed))
    program = _PROGRAM.pack(len(code), ctypes.addressof(memory))
    inbox.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)
