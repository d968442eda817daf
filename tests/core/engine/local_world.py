"""A whole world of native engines inside one process, one thread a rank.

What crosses each link can be watched and changed: a test puts an attacker in the middle of a TCP
link, a function from the bytes that came to the bytes that go on.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import queue
import socket
import string
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol, Self

import numpy as np

from sealring import _native
from sealring._native import LinkMemory
from sealring._stand_ins import Probe
from sealring.core.engine.collective import Collective
from sealring.core.engine.cuda.wires import Wire
from sealring.core.engine.engine import CollectiveEngine
from sealring.core.engine.mailbox import Mailbox
from sealring.core.engine.streams import StreamCaller
from sealring.core.links.memory import SharedMemory
from sealring.limits import RING_CONTROL_BYTES
from tests.core.engine.host_streams import HostStreams
from tests.core.engine.stand_ins import (
    attach_host_device,
    attach_host_driver,
    attach_host_driver_to_mailbox,
)

RING_BYTES = 256 << 10
MEMORY_BYTES = RING_BYTES + RING_CONTROL_BYTES


class Last(bytes):
    """The last bytes that pass: after them the link is cut in both directions."""


class Change(Protocol):
    """Takes the bytes that came and returns the bytes to send on, whole or piece by piece."""

    def __call__(self, data: bytes, /) -> bytes | Iterator[bytes]: ...


@dataclass
class LocalLink:
    """The engine's view of one link's end."""

    host: str
    socket: socket.socket
    memory: SharedMemory | None
    send_key: _native.Secret
    receive_key: _native.Secret
    peer_group_key: _native.Secret


class Middle(threading.Thread):
    """Carries bytes one way, from one socket to another, through `change`.

    An end in one direction is passed on as just that, as a router would: what the other direction
    still carries (an alert, say) arrives.
    """

    def __init__(self, source: socket.socket, sink: socket.socket, change: Change) -> None:
        super().__init__(daemon=True)
        self.source, self.sink, self.change = source, sink, change
        self._sending = threading.Lock()
        self.start()

    def inject(self, data: bytes) -> None:
        """Sends the attacker's own bytes between the bytes that came."""
        with self._sending:
            self.sink.sendall(data)

    def run(self) -> None:
        cut = False
        with contextlib.suppress(OSError):
            while not cut and (data := self.source.recv(1 << 20)):
                changed = self.change(data)
                for part in (changed,) if isinstance(changed, bytes) else changed:
                    with self._sending:
                        self.sink.sendall(part)
                    cut = cut or isinstance(part, Last)
        with contextlib.suppress(OSError):
            if not cut and not getattr(self.change, "holds_open", False):
                self.sink.shutdown(socket.SHUT_WR)
        if cut:
            for end in (self.source, self.sink):
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        far, _ = server.accept()
    for end in (near, far):
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return near, far


def untouched(data: bytes) -> bytes:
    return data


@dataclass
class LocalWorld:
    world: int
    transport: str = "tcp"
    record_bytes: int = 64 << 10
    rekey_bytes: int = 64 << 30
    middle: dict[tuple[int, int], Change] = field(default_factory=dict)
    """(sender, receiver) -> what happens to the bytes on their way."""
    keys_seed: bytes = b"test"
    context: bytes = b"c" * 32
    hosts: Sequence[int] | None = None
    """The number of the host each rank says it is on. None: every rank has a host of its own."""
    devices: dict[int, int] = field(default_factory=dict)
    """The lag of each device, by rank. The CPU plays the devices that hold these ranks' tensors."""
    driver: Literal["launched", "prelaunched", None] = None
    """The devices are GPUs whose driver the CPU plays: they are launched, or told ahead."""
    contexts: dict[int, bytes] = field(default_factory=dict)
    """The context of each rank that believes it is in another group than the rest."""

    def __post_init__(self) -> None:
        self.memories: dict[tuple[int, int], int] = {}
        """(owner, peer) -> the file of the owner's part, not sealed: the host writes anywhere."""
        self.middles: dict[tuple[int, int], Middle] = {}
        self._relays: list[socket.socket] = []
        self.number = 0
        self.probes: dict[int, Probe] = {}
        """The probes of the devices that the CPU plays, by rank."""
        ends: dict[tuple[int, int], LocalLink] = {}
        for low in range(self.world):
            for high in range(low + 1, self.world):
                ends[low, high], ends[high, low] = self._connect(low, high)
        self._start(
            [
                [(peer, ends[rank, peer]) for peer in range(self.world) if peer != rank]
                for rank in range(self.world)
            ]
        )
        self.pool = ThreadPoolExecutor(self.world)

    def _start(self, links: list[list[tuple[int, LocalLink]]]) -> None:
        self.engines = [
            CollectiveEngine(
                rank,
                self.world,
                context=self.contexts.get(rank, self.context),
                group_key=self.key("group", rank),
                links=links[rank],
                host=self._host(rank),
                record_bytes=self.record_bytes,
                rekey_bytes=self.rekey_bytes,
                gpu_record_bytes=self.record_bytes,
            )
            for rank in range(self.world)
        ]
        for rank, lag in self.devices.items():
            if self.driver is None:
                native = self.engines[rank]._native
                self.probes[rank] = attach_host_device(native, lag, self.world)
            else:
                prelaunch = self.driver == "prelaunched"
                attach_host_driver(self.engines[rank]._native, prelaunch=prelaunch)

    def wire(
        self,
        wanted: Wire,
        gpus: str | None = None,
        *,
        ranks: Sequence[int] | None = None,
        timeout_s: float = 10.0,
    ) -> list[BaseException | None]:
        """Lets the devices agree on a way between them, as a group's first call with a GPU does.

        `gpus` has a letter for each rank's; `ranks` are those that come.
        """
        names = gpus or string.ascii_letters
        first = self.number + 1

        def one(rank: int) -> BaseException | None:
            try:
                exchanges = self.engines[rank].agree_on_wire(
                    wanted, gpu=names[rank], timeout_s=timeout_s
                )
                for number, each in enumerate(exchanges, first):
                    self.engines[rank].run(number, each, timeout_s)
                    self.number = number
            except BaseException as error:
                return error
            return None

        return list(self.pool.map(one, range(self.world) if ranks is None else ranks))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        # Goodbyes need the other side's attention only if links are full: close side by side.
        list(self.pool.map(lambda end: end.close(), self.ends()))
        self.pool.shutdown()
        for memory in self.memories.values():
            os.close(memory)
        self.memories.clear()
        for middle in self.middles.values():
            middle.join(10)
        for end in self._relays:
            end.close()

    def ends(self) -> Sequence[CollectiveEngine | Mailbox]:
        """The engines or mailboxes at the ends of the links, in rank order."""
        return self.engines

    def _host(self, rank: int) -> str:
        return f"host-{rank if self.hosts is None else self.hosts[rank]}"

    def key(self, *words: object) -> _native.Secret:
        return _native.Secret(hashlib.sha256(repr((self.keys_seed, words)).encode()).digest())

    def _connect(self, low: int, high: int) -> tuple[LocalLink, LocalLink]:
        a, b = tcp_pair()
        if (low, high) in self.middle or (high, low) in self.middle:
            # a <-> near is the low rank's link to the middle, far <-> b the middle's to the high's.
            near = b
            far, b = tcp_pair()
            self._relays += [near, far]
            for (source, sink), way in (((near, far), (low, high)), ((far, near), (high, low))):
                change = self.middle.get(way, untouched)
                self.middles[way] = Middle(source, sink, change)
        if self.transport == "shm":
            for owner, peer in ((low, high), (high, low)):
                memory = os.memfd_create("sealring-test")
                os.ftruncate(memory, MEMORY_BYTES)
                self.memories[owner, peer] = memory
        links = []
        for me, peer, end in ((low, high, a), (high, low, b)):
            end.setblocking(False)
            links.append(
                LocalLink(
                    host=self._host(peer),
                    socket=end,
                    memory=self._map(me, peer) if self.transport == "shm" else None,
                    send_key=self.key("pair", me, peer),
                    receive_key=self.key("pair", peer, me),
                    peer_group_key=self.key("group", peer),
                )
            )
        return links[0], links[1]

    def _map(self, owner: int, peer: int) -> SharedMemory:
        return SharedMemory(
            LinkMemory(self.memories[owner, peer], RING_BYTES, writable=True),
            LinkMemory(self.memories[peer, owner], RING_BYTES, writable=False),
        )

    def run(
        self,
        collectives: Sequence[Collective | None],
        timeout_s: float | Sequence[float] = 10.0,
        numbers: Sequence[int] | None = None,
    ) -> list[BaseException | None]:
        """Runs each rank's collective and returns the errors they end with, in rank order.

        A rank whose collective is None does not call at all. `numbers` are the collectives' numbers
        as the ranks count them, where a test has them disagree.
        """
        return self.run_one_after_another([[each] for each in collectives], timeout_s, numbers)

    def run_one_after_another(
        self,
        sequences: Sequence[Sequence[Collective | None]],
        timeout_s: float | Sequence[float] = 10.0,
        numbers: Sequence[int] | None = None,
    ) -> list[BaseException | None]:
        """Each rank runs its collectives as fast as it can, up to its first error."""
        counted = numbers if numbers is not None else [self.number + 1] * self.world
        self.number = max(counted) + max(map(len, sequences)) - 1
        patience = [timeout_s] * self.world if isinstance(timeout_s, float | int) else timeout_s

        def one(rank: int) -> BaseException | None:
            for number, collective in enumerate(sequences[rank], counted[rank]):
                if collective is None:
                    continue
                if rank in self.devices:
                    collective = replace(collective, ready=0)
                run = (
                    self._run_prelaunched if self.driver == "prelaunched" else CollectiveEngine.run
                )
                try:
                    run(self.engines[rank], number, collective, patience[rank])
                except BaseException as error:
                    return error
            return None

        return list(self.pool.map(one, range(self.world)))

    def _run_prelaunched(
        self, engine: CollectiveEngine, number: int, collective: Collective, timeout_s: float
    ) -> None:
        """Runs it as a group does when only a stream waits. Returns once the stream has gone on."""
        stream = StreamCaller(HostStreams(engine.prelaunch_stream))
        queued: queue.SimpleQueue[_native.Completion] = queue.SimpleQueue()
        caller = threading.Thread(target=engine.submit_ahead, args=(collective, stream, queued.put))
        caller.start()
        launched = queued.get(timeout=60)
        assert launched.streams_wait
        try:
            engine.run(number, collective, timeout_s, launched)
        except BaseException:
            engine.release_streams(launched)
            raise
        finally:
            caller.join()
            while not launched.done:
                time.sleep(0.0001)


class LocalMail(LocalWorld):
    """A local world with mailboxes in place of engines."""

    def _start(self, links: list[list[tuple[int, LocalLink]]]) -> None:
        self.mailboxes = [
            Mailbox(
                rank,
                self.world,
                context=self.contexts.get(rank, self.context),
                links=links[rank],
                record_bytes=self.record_bytes,
                rekey_bytes=self.rekey_bytes,
                gpu_record_bytes=self.record_bytes,
            )
            for rank in range(self.world)
        ]
        self.streams: dict[int, int] = {}
        for rank, lag in self.devices.items():
            if self.driver is None:
                native = self.mailboxes[rank]._native
                self.probes[rank] = attach_host_device(native, lag, self.world)
            else:
                self.streams[rank] = attach_host_driver_to_mailbox(self.mailboxes[rank]._native)

    def caller(self, rank: int) -> _native.CallerStream | None:
        """A free stream if the rank's memory is a device's, None if it is the CPU's."""
        if rank not in self.devices:
            return None
        return _native.CallerStream(0, self.streams.get(rank, 0), self.driver == "prelaunched")

    def ends(self) -> Sequence[CollectiveEngine | Mailbox]:
        return self.mailboxes


def send(
    box: Mailbox,
    peer: int,
    tag: int,
    memory: tuple[int, int],
    timeout_s: float,
    caller: _native.CallerStream | None = None,
) -> _native.Completion:
    return box.submit(_native.Message(True, peer, tag, memory, timeout_s), caller)


def receive(
    box: Mailbox,
    peer: int,
    tag: int,
    memory: tuple[int, int],
    timeout_s: float,
    caller: _native.CallerStream | None = None,
) -> _native.Completion:
    return box.submit(_native.Message(False, peer, tag, memory, timeout_s), caller)


def slot(array: np.ndarray[Any, Any]) -> tuple[int, int]:
    return array.ctypes.data, array.nbytes
