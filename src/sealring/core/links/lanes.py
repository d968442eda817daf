"""Further pipes between two members of a group that are linked: of shared memory, or by TCP.

The members tell each other over their links where a pipe may be left, with a token. Of each pair
the higher rank brings the pipe: it connects to the lower one's listener, or leaves one end of a
socket in its inbox (links/descriptors.py), where both leave their memory as well. Neither waits for
the other: each looks for what was left when all have said, over the links, that they have left it.

A pipe carries records under keys that both ends have, so it need not prove anything. The token
keeps those out who are no members. A connection without it is dropped.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import hmac
import os
import secrets
import select
import socket
import struct
import termios
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from sealring.core.handshake.messages import Message, digest, encode_message, integer, parse_message
from sealring.core.links import setting_up
from sealring.core.links.descriptors import (
    PACKED_BYTES,
    TOKEN_BYTES,
    Address,
    Inbox,
    close_received,
    leave,
)
from sealring.core.links.link import prepare_socket
from sealring.core.links.memory import SharedMemory, create_file, open_memory
from sealring.core.no_fork import NoFork
from sealring.errors import MalformedSetup, Unsupported


class Callers:
    """Of listeners that do not block. The caller closes it."""

    def __init__(self, listeners: Iterable[socket.socket], size: int, most: int) -> None:
        """A greeting has `size` bytes. Of more than `most` connections the oldest is dropped."""
        self._size, self._most = size, most
        self.listeners = {each.fileno(): each for each in listeners}
        self._waiting: dict[int, tuple[socket.socket, bytearray]] = {}
        self._poll = select.poll()  # a process may have more descriptors than select() takes
        for descriptor in self.listeners:
            self._poll.register(descriptor, select.POLLIN)

    def greeted(self, deadline: float) -> Iterator[tuple[socket.socket, bytes]]:
        """Waits until something comes; gives the connections whose greeting is whole by then."""
        left = max(0.0, deadline - time.monotonic())
        for descriptor, _ in self._poll.poll(left * 1e3):
            if (listener := self.listeners.get(descriptor)) is not None:
                self._admit(listener)
            elif descriptor in self._waiting and (greeting := self._read(descriptor)) is not None:
                yield self._let_go(descriptor), greeting

    def _admit(self, listener: socket.socket) -> None:
        try:
            sock, _ = setting_up.accept(listener)
        except (BlockingIOError, ConnectionAbortedError):
            return
        sock.setblocking(False)
        if len(self._waiting) >= self._most:
            self._let_go(next(iter(self._waiting))).close()
        self._waiting[sock.fileno()] = sock, bytearray()
        self._poll.register(sock, select.POLLIN)

    def _read(self, descriptor: int) -> bytes | None:
        sock, greeting = self._waiting[descriptor]
        try:
            part = sock.recv(self._size - len(greeting))
        except BlockingIOError:
            return None
        except OSError:
            part = b""
        greeting += part
        if not part:
            self._let_go(descriptor).close()
        return bytes(greeting) if len(greeting) == self._size else None

    def _let_go(self, descriptor: int) -> socket.socket:
        self._poll.unregister(descriptor)
        return self._waiting.pop(descriptor)[0]

    def close(self) -> None:
        for sock, _ in self._waiting.values():
            sock.close()
        self._waiting.clear()


LETTER_BYTES: Final = 2048
GREETING: Final = struct.Struct(f"<{TOKEN_BYTES}sII")
"""What a connection begins with: the token, the rank that made it, and the lane."""
_SECONDS: Final = 5.0
"""How long a rank may take to make its connections, or to find those that were made."""
_PART_OF_TIMEOUT: Final = 0.5
"""Of the time that the others wait for it: at its end they give the rank up, and not the lanes."""
_AT_ONCE: Final = 0.001
_STRANGERS: Final = 64
"""Connections that may be open without a greeting, beside those of members."""


@dataclass(frozen=True, slots=True)
class FirstEnd:
    """This rank's end of its link to a member: where further pipes lead to."""

    transport: Literal["tcp", "shm"]
    family: int
    own: tuple[Any, ...]
    """The socket's address and the peer's, as the system writes them; nothing if it is cut."""
    theirs: tuple[Any, ...]


def first_end(sock: socket.socket, memory: SharedMemory | None) -> FirstEnd:
    if memory is not None or sock.family not in (socket.AF_INET, socket.AF_INET6):
        return FirstEnd("shm", sock.family, (), ())
    try:
        return FirstEnd("tcp", sock.family, sock.getsockname(), sock.getpeername())
    except OSError:
        # The member was lost while the group formed. The group's first collective says so, and
        # that comes before any further pipe.
        return FirstEnd("tcp", sock.family, (), ())


@dataclass(frozen=True, slots=True)
class Pipe:
    """One that both ends have. Its owner closes the socket."""

    lane: int
    peer: int
    socket: socket.socket
    memory: SharedMemory | None = field(default=None, repr=False)


class Lanes:
    """One attempt to have `count` lanes with all members; ranks are the group's."""

    def __init__(
        self,
        rank: int,
        ends: Mapping[int, FirstEnd],
        count: int,
        timeout_s: float = 2 * _SECONDS,
    ) -> None:
        """`timeout_s` is how long the others wait for this rank."""
        self._rank, self._ends, self._count = rank, ends, count
        self._patience_s = min(_SECONDS, timeout_s * _PART_OF_TIMEOUT)
        self.token = secrets.token_bytes(TOKEN_BYTES)
        self.inbox: Inbox | None = None
        self.listeners: dict[str, socket.socket] = {}
        self.made: dict[tuple[int, int], socket.socket] = {}
        """By lane and peer: this rank's ends of the pipes that it brings."""
        self._memories: dict[tuple[int, int], tuple[Any, int]] = {}

    def _further(self) -> range:
        return range(1, self._count)

    def _by(self, transport: str) -> Iterator[tuple[int, FirstEnd]]:
        return ((peer, end) for peer, end in self._ends.items() if end.transport == transport)

    def offer(self) -> bytes:
        """What the others must know."""
        if any(self._by("shm")):
            self.inbox = Inbox(peer for peer, _ in self._by("shm"))
        for peer, end in self._by("tcp"):
            if not end.own or not end.theirs:
                raise Unsupported(f"the link to rank {peer} was cut")
            if peer > self._rank and end.own[0] not in self.listeners:
                self.listeners[end.own[0]] = _listener(end)
        letter = _encode(
            inbox=self.inbox.address.packed() if self.inbox else bytes(PACKED_BYTES),
            token=self.token,
            ports={host: each.getsockname()[1] for host, each in self.listeners.items()},
        )
        if len(letter) > LETTER_BYTES:
            raise Unsupported("this rank has too many addresses for one letter")
        return letter.ljust(LETTER_BYTES)

    def leave_pipes(self, letters: Sequence[bytes]) -> None:
        """Called when all offers are known."""
        deadline = time.monotonic() + self._patience_s
        for peer, end in self._ends.items():
            address, token, ports = _decode(letters[peer])
            if end.transport == "shm":
                self._leave_memories(address, peer)
            elif peer < self._rank:
                for lane in self._further():
                    self.made[lane, peer] = self.connect(end, token, ports, lane, deadline)

    def _leave_memories(self, address: Address, peer: int) -> None:
        """The files of all lanes in their order, then the bells if this rank brings them."""
        with contextlib.ExitStack() as left:
            descriptors = []
            for lane in self._further():
                self._memories[lane, peer] = create_file()
                descriptors.append(self._memories[lane, peer][1])
            for lane in self._further() if peer < self._rank else ():
                self.made[lane, peer], far = setting_up.pair()
                descriptors.append(left.enter_context(far).fileno())
            leave(address, descriptors, self._rank)

    def connect(
        self, end: FirstEnd, token: bytes, ports: Mapping[str, int], lane: int, deadline: float
    ) -> socket.socket:
        host = end.theirs[0]
        if host not in ports:
            raise Unsupported(f"the peer does not listen at {host}, where it was reached")
        sock = setting_up.create(end.family)
        try:
            sock.settimeout(max(_AT_ONCE, deadline - time.monotonic()))
            sock.connect((host, ports[host], *end.theirs[2:]))
            sock.sendall(GREETING.pack(token, self._rank, lane))
            prepare_socket(sock)
        except OSError as problem:
            sock.close()
            raise Unsupported(
                f"no further connection can be made to {host}: {problem}"
            ) from problem
        return sock

    def take_pipes(self) -> list[Pipe]:
        """Called when all ranks have left theirs. In the order of the lanes.

        The sockets are then the caller's.
        """
        accepted = self._accept()
        left: dict[int, list[int]] = {}
        pipes: list[Pipe] = []
        try:
            with NoFork():  # a child would inherit the sockets among them
                left = self.inbox.take() if self.inbox else {}
                for peer, _ in self._by("shm"):
                    self._take_memories(peer, left.get(peer, []), pipes)
            for peer, _ in self._by("tcp"):
                for lane in self._further():
                    place = accepted if peer > self._rank else self.made
                    if (lane, peer) not in place:
                        raise Unsupported(f"a connection of rank {peer} did not come")
                    pipes.append(Pipe(lane, peer, place.pop((lane, peer))))
        except BaseException:
            for pipe in pipes:
                pipe.socket.close()
            raise
        finally:
            close_received(fd for each in left.values() for fd in each)
            for each in accepted.values():
                each.close()
        return sorted(pipes, key=lambda pipe: pipe.lane)

    def _take_memories(self, peer: int, left: list[int], pipes: list[Pipe]) -> None:
        """Adds the pipes to one peer. What it takes out of `left` is a pipe's then."""
        lanes, brought = self._further(), peer > self._rank
        if len(left) != len(lanes) * (1 + brought):
            raise Unsupported("the memory of another rank did not come")
        for lane in reversed(lanes):  # the bells lie at the end
            mapping, _ = self._memories[lane, peer]
            memory = SharedMemory(mapping, open_memory(left[lane - 1]))
            bell = _bell(left) if brought else self.made.pop((lane, peer))
            pipes.append(Pipe(lane, peer, bell, memory))

    def _accept(self) -> dict[tuple[int, int], socket.socket]:
        """The connections that members made, by lane and rank; strangers' are dropped."""
        expected = {
            (lane, peer)
            for peer, _ in self._by("tcp")
            for lane in self._further()
            if peer > self._rank
        }
        accepted: dict[tuple[int, int], socket.socket] = {}
        callers = Callers(self.listeners.values(), GREETING.size, len(expected) + _STRANGERS)
        deadline = time.monotonic() + self._patience_s
        try:
            while expected - accepted.keys():
                if time.monotonic() >= deadline:
                    raise Unsupported("a connection of another rank did not come")
                for sock, greeting in callers.greeted(deadline):
                    token, peer, lane = GREETING.unpack(greeting)
                    known = hmac.compare_digest(token, self.token) and (lane, peer) in expected
                    if known and (lane, peer) not in accepted:
                        accepted[lane, peer] = sock
                        prepare_socket(sock)
                    else:
                        sock.close()
        except BaseException:
            for sock in accepted.values():
                sock.close()
            raise
        finally:
            callers.close()
        return accepted

    def close(self) -> None:
        """What was not taken is closed; mappings stay as long as they are used."""
        if self.inbox is not None:
            self.inbox.close()
        for each in (*self.listeners.values(), *self.made.values()):
            each.close()
        for _, fd in self._memories.values():
            os.close(fd)
        self.listeners, self.made, self._memories = {}, {}, {}


def _listener(end: FirstEnd) -> socket.socket:
    """At the address where the peer was reached, or reached us."""
    sock = setting_up.create(end.family)
    try:
        sock.setblocking(False)
        sock.bind((end.own[0], 0, *end.own[2:]))
        sock.listen(socket.SOMAXCONN)
    except OSError as problem:
        sock.close()
        raise Unsupported(f"this rank cannot listen at {end.own[0]}: {problem}") from problem
    return sock


def _bell(left: list[int]) -> socket.socket:
    """The last descriptor, as a socket; it stays where it is if it is none."""
    try:
        bell = setting_up.received(left[-1])
    except OSError as problem:
        raise Unsupported("the socket of another rank did not come") from problem
    setting_up.refuse_descriptors(bell)
    # What it holds already may have come with some.
    if (bell.family, bell.type) != (socket.AF_UNIX, socket.SOCK_STREAM) or _holds_bytes(bell):
        bell.detach()
        raise Unsupported("the socket of another rank did not come")
    left.pop()
    return bell


def _holds_bytes(sock: socket.socket) -> bool:
    waiting = array.array("i", [0])
    fcntl.ioctl(sock, termios.FIONREAD, waiting)
    return waiting[0] != 0


def _encode(*, inbox: bytes, token: bytes, ports: Mapping[str, int]) -> bytes:
    address = Address.unpacked(inbox)
    return encode_message(
        {
            "type": "lanes",
            "name": address.name.hex(),
            "inbox": address.token.hex(),
            "token": token.hex(),
            "ports": dict(ports),
        }
    )


def _decode(letter: bytes) -> tuple[Address, bytes, dict[str, int]]:
    message: Message = parse_message(letter.rstrip())
    ports = message.get("ports")
    if type(ports) is not dict:
        raise MalformedSetup("an offer of further lanes has no ports")
    return (
        Address(bytes.fromhex(digest(message, "name")), bytes.fromhex(digest(message, "inbox"))),
        bytes.fromhex(digest(message, "token")),
        {host: integer(ports, host, 1, 65535) for host in ports},
    )
