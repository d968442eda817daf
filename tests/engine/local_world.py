"""A whole world of native engines inside one process, one thread a rank.

What crosses each link can be watched and changed: a test puts a man in the middle of a TCP link and
gives him a function from the bytes that came to the bytes that go on.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sealring.engine.cpu import Collective, CpuEngine

RING_BYTES = 256 << 10


@dataclass
class LocalLink:
    """The engine's view of one link's end."""

    host: str
    socket: socket.socket
    memory_fd: int | None
    dialer: bool
    send_key: bytes
    receive_key: bytes
    peer_group_key: bytes


class Middle(threading.Thread):
    """Carries bytes from one socket to another through `change`; closes when either end does."""

    def __init__(
        self, source: socket.socket, sink: socket.socket, change: Callable[[bytes], bytes | None]
    ) -> None:
        super().__init__(daemon=True)
        self.source, self.sink, self.change = source, sink, change
        self.start()

    def run(self) -> None:
        try:
            while data := self.source.recv(1 << 20):
                changed = self.change(data)
                if changed is None:
                    break
                self.sink.sendall(changed)
        except OSError:
            pass
        for end in (self.source, self.sink):
            try:
                end.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
            end.close()


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        far, _ = server.accept()
    for end in (near, far):
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return near, far


@dataclass
class LocalWorld:
    world: int
    transport: str = "tcp"
    record_bytes: int = 64 << 10
    rekey_bytes: int = 64 << 30
    middle: dict[tuple[int, int], Callable[[bytes], bytes | None]] = field(default_factory=dict)
    """(sender, receiver) -> what happens to the bytes on their way."""
    keys_seed: bytes = b"test"
    context: bytes = b"c" * 32

    def __post_init__(self) -> None:
        self.memories: list[int] = []
        self.number = 0
        ends: dict[tuple[int, int], LocalLink] = {}
        for low in range(self.world):
            for high in range(low + 1, self.world):
                ends[low, high], ends[high, low] = self._connect(low, high)
        self.engines = [
            CpuEngine(
                rank,
                self.world,
                context=self.context,
                group_key=self._key("group", rank),
                links=[(peer, ends[rank, peer]) for peer in range(self.world) if peer != rank],
                record_bytes=self.record_bytes,
                rekey_bytes=self.rekey_bytes,
                ring_bytes=RING_BYTES,
            )
            for rank in range(self.world)
        ]
        self.pool = ThreadPoolExecutor(self.world)

    def __enter__(self) -> LocalWorld:
        return self

    def __exit__(self, *_: object) -> None:
        # Goodbyes need the other side's attention only if links are full: close side by side.
        list(self.pool.map(lambda engine: engine.close(), self.engines))
        self.pool.shutdown()
        for memory in self.memories:
            os.close(memory)

    def _key(self, *words: object) -> bytes:
        import hashlib

        return hashlib.sha256(repr((self.keys_seed, words)).encode()).digest()

    def _connect(self, low: int, high: int) -> tuple[LocalLink, LocalLink]:
        a, b = tcp_pair()
        if (low, high) in self.middle or (high, low) in self.middle:
            inner_a, inner_b = tcp_pair()
            # a <-> b is now a's link to the middle; inner is the middle's link to b's engine.
            Middle(b, inner_a, self.middle.get((low, high), lambda data: data))
            Middle(inner_a, b, self.middle.get((high, low), lambda data: data))
            b = inner_b
        memory: int | None = None
        if self.transport == "shm":
            memory = os.memfd_create("sealring-test")
            os.ftruncate(memory, 2 * (4096 + RING_BYTES))
            self.memories.append(memory)
        links = []
        for me, peer, end in ((low, high, a), (high, low, b)):
            end.setblocking(False)
            links.append(
                LocalLink(
                    host=f"host-{peer}",
                    socket=end,
                    memory_fd=None if memory is None else os.dup(memory),
                    dialer=me == high,
                    send_key=self._key("pair", me, peer),
                    receive_key=self._key("pair", peer, me),
                    peer_group_key=self._key("group", peer),
                )
            )
        return links[0], links[1]

    def run(
        self, collectives: Sequence[Collective], timeout_s: float = 10.0
    ) -> list[BaseException | None]:
        """Every rank runs its collective; the errors they end with, in rank order."""
        self.number += 1
        number = self.number

        def one(rank: int) -> BaseException | None:
            try:
                self.engines[rank].run(number, collectives[rank], timeout_s)
            except BaseException as error:
                return error
            return None

        return list(self.pool.map(one, range(self.world)))


def slot(array: np.ndarray[Any, Any]) -> tuple[int, int]:
    return array.ctypes.data, array.nbytes
