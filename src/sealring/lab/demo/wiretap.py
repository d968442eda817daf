"""The attacker in the middle: a relay that records, and may change, what two workers exchange.

It reads what anyone on the path can read: first TLS, whose records show only their length, then
sealring's records, whose headers are authenticated but not secret.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Final

import numpy as np
import torch.distributed  # noqa: F401 (makes the module below importable)
from numpy.typing import NDArray
from torch._C._distributed_c10d import Store

from sealring import _native
from sealring.core.links.rendezvous import encode_addresses, parse_addresses
from sealring.core.schedule import Operation
from sealring.limits import HEADER_BYTES, SESSION_FRAME, TAG_BYTES

SEALED_HEADER_BYTES: Final = HEADER_BYTES + TAG_BYTES
PAIR: Final[int] = _native.RecordKind.PAIR
GROUP: Final[int] = _native.RecordKind.GROUP
"""The two kinds of records that carry data of collectives."""
_TLS_HEADER_BYTES: Final = 5
_TLS_TYPES: Final = (*range(20, 25), SESSION_FRAME)
"""TLS's content types, and that of set-up under a session, which has the form of a TLS record."""
_MAGIC: Final = ord("S")
_SMALL_ALL_REDUCE: Final = 32 << 10
"""An all-reduce of at most this many bytes is not taken for a gradient."""

Address = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Sighting:
    """A record that passed: its header's fields, and its place in the stream."""

    fields: dict[str, int]
    start: int

    @property
    def payload(self) -> slice:
        start = self.start + SEALED_HEADER_BYTES
        return slice(start, start + self.fields["length"])

    @property
    def is_data(self) -> bool:
        return self.fields["kind"] in (PAIR, GROUP)

    @property
    def is_gradient(self) -> bool:
        return (
            self.is_data
            and self.fields["operation"] == Operation.ALL_REDUCE
            and self.fields["total"] > _SMALL_ALL_REDUCE
        )


class Dissector:
    """Finds the records in the stream of one direction of a link."""

    def __init__(self) -> None:
        self.seen = 0
        self.setup_bytes = 0
        """The bytes that were TLS."""
        self._header = bytearray()
        self._skip = 0

    def feed(self, data: bytes) -> list[Sighting]:
        sightings = []
        at = 0
        while at < len(data):
            if self._skip:
                step = min(self._skip, len(data) - at)
                self._skip -= step
                at += step
                continue
            first = self._header[0] if self._header else data[at]
            wanted = SEALED_HEADER_BYTES if first == _MAGIC else _TLS_HEADER_BYTES
            piece = data[at : at + wanted - len(self._header)]
            self._header += piece
            at += len(piece)
            if len(self._header) < wanted:
                break
            if first == _MAGIC:
                sightings.append(self._record(self.seen + at - wanted))
            else:
                self._tls_record()
            self._header.clear()
        self.seen += len(data)
        return sightings

    def _record(self, start: int) -> Sighting:
        fields = _native.parse_header(bytes(self._header))
        if fields is None:
            raise ValueError("a record's header that sealring never writes")
        self._skip = fields["length"] + TAG_BYTES
        return Sighting(fields, start)

    def _tls_record(self) -> None:
        if self._header[0] not in _TLS_TYPES:
            raise ValueError(f"neither TLS nor a record: {self._header.hex(' ')}")
        self._skip = int.from_bytes(self._header[3:5], "big")
        self.setup_bytes += _TLS_HEADER_BYTES + self._skip


@dataclass(frozen=True, slots=True)
class Flip:
    """Flips one bit in the first record of gradient number `gradient`, counted from 1."""

    gradient: int
    byte: int = 1000
    bit: int = 3


@dataclass(frozen=True, slots=True)
class Flipped:
    record: Sighting
    offset: int
    """The changed byte's offset in the stream."""
    bit: int
    at: float
    """The time by the monotonic clock, which all processes of a machine share."""


@dataclass
class TappedWire:
    """One direction of the tapped link."""

    flip: Flip | None = None
    flipped: Flipped | None = None
    stream: bytearray = field(default_factory=bytearray)
    """The bytes as they were sent, before any change."""
    sightings: list[Sighting] = field(default_factory=list)
    dissector: Dissector = field(default_factory=Dissector)
    gradients: list[int] = field(default_factory=list)
    """The numbers of the all-reduces that look like gradients, in the order they came."""
    _aim: tuple[Sighting, int] | None = None

    def carry(self, data: bytes) -> bytes:
        """Records `data`; returns the bytes to pass on, which may be changed."""
        start = self.dissector.seen
        self.stream += data
        for sighting in self.dissector.feed(data):
            self._see(sighting)
        if self._aim is None or self.flip is None or self.flipped is not None:
            return data
        record, offset = self._aim
        if not start <= offset < start + len(data):
            return data
        changed = bytearray(data)
        changed[offset - start] ^= 1 << self.flip.bit
        self.flipped = Flipped(record, offset, self.flip.bit, time.monotonic())
        return bytes(changed)

    def _see(self, sighting: Sighting) -> None:
        self.sightings.append(sighting)
        if not sighting.is_gradient:
            return
        number = sighting.fields["collective"]
        if number not in self.gradients[-8:]:
            self.gradients.append(number)
        if self._aim is None and self.flip and len(self.gradients) == self.flip.gradient:
            place = min(self.flip.byte, sighting.fields["length"] - 1)
            self._aim = (sighting, sighting.payload.start + place)


class Relay:
    """Listens at the false address of a peer, and connects the lured worker to the real peer."""

    def __init__(self, find_target: Callable[[], Address], flip: Flip | None = None) -> None:
        self._find_target = find_target
        self._flip = flip
        self._server = socket.create_server(("127.0.0.1", 0))
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._problems: list[Exception] = []
        self.links: list[tuple[TappedWire, TappedWire]] = []
        """(to the worker that was lured, from it), one pair for each connection."""
        self._start(self._accept)

    @property
    def address(self) -> Address:
        host, port = self._server.getsockname()[:2]
        return str(host), int(port)

    @property
    def link(self) -> tuple[TappedWire, TappedWire]:
        """The wires of the connection that carried records; raises an error that occurred here."""
        if self._problems:
            raise self._problems[0]
        for towards, back in self.links:
            if towards.sightings:
                return towards, back
        raise RuntimeError("no record came through the wiretap")

    def close(self) -> None:
        for sock in (self._server, *self._sockets):
            # A thread may wait on the descriptor. Unlike close(), this wakes it.
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for sock in (self._server, *self._sockets):
            sock.close()

    def __enter__(self) -> Relay:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self, target: Callable[..., None], *arguments: object) -> None:
        thread = threading.Thread(target=target, args=arguments, name="wiretap", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                lured, _ = self._server.accept()
            except OSError:  # closed
                return
            self._sockets.append(lured)
            try:
                peer = socket.create_connection(self._find_target())
            except Exception as problem:
                self._problems.append(problem)
                lured.close()
                continue
            self._sockets.append(peer)
            for sock in (lured, peer):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            towards, back = TappedWire(self._flip), TappedWire()
            self.links.append((towards, back))
            self._start(self._pump, peer, lured, towards)
            self._start(self._pump, lured, peer, back)

    def _pump(self, source: socket.socket, sink: socket.socket, wire: TappedWire) -> None:
        open_sink = True
        try:
            while data := source.recv(1 << 18):
                passed_on = wire.carry(data)
                if not open_sink:
                    continue
                try:
                    sink.sendall(passed_on)
                except OSError:  # the receiver has left; keep recording what is still sent
                    open_sink = False
        except OSError:
            pass
        except Exception as problem:
            self._problems.append(problem)
            with suppress(OSError):
                source.shutdown(socket.SHUT_RDWR)
        with suppress(OSError):
            sink.shutdown(socket.SHUT_WR)


# ---- the rendezvous store is the attacker's, and may send a worker to any address


_TARGET: Final = "wiretap/target"


class HonestStore(Store):
    """Passes all calls on to another store. A base class for stores that lie in one answer."""

    def __init__(self, store: Store) -> None:
        super().__init__()
        self._store = store

    def get(self, key: str) -> bytes:
        return bytes(self._store.get(key))

    def set(self, key: str, value: str) -> None:
        self._store.set(key, value)

    def check(self, keys: list[str]) -> bool:
        return self._store.check(keys)

    def add(self, key: str, value: int) -> int:
        return self._store.add(key, value)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        if timeout is None:
            self._store.wait(keys)
        else:
            self._store.wait(keys, timeout)


class LyingStore(HonestStore):
    """An honest store, except that it gives the wiretap's address as that of one rank.

    It runs in the worker's process, which makes no difference: the worker sees only its answers.
    """

    def __init__(self, store: Store, *, about: int, relay: Address) -> None:
        super().__init__(store)
        self._about = f"/address/{about}"
        self._relay = relay

    def get(self, key: str) -> bytes:
        value = super().get(key)
        if not key.endswith(self._about):
            return value
        # The wiretap must know the real address of the peer.
        self._store.set(_TARGET, value.decode())
        return encode_addresses([self._relay]).encode()


def real_address(store: Store) -> Address:
    """The address that the lured worker asked for."""
    return parse_addresses(bytes(store.get(_TARGET)))[0]


# ---- computations on captured traffic


_WINDOW: Final = 8
"""The bytes of a window. Shorter pieces occur by chance in any long stream."""
_STRIDE: Final = 4
"""A window of plaintext begins at every float."""
SHORTEST_RUN: Final = _WINDOW + _STRIDE - 1
"""A piece of plaintext of this length contains a whole window, so it is always found."""
_ENOUGH_HITS: Final = 64


def entropy(data: bytes | bytearray) -> float:
    """The entropy in bits per byte, from the frequencies of byte values; 8 is the maximum."""
    if not data:
        return 0.0
    counts = np.bincount(np.frombuffer(data, np.uint8), minlength=256)
    shares = counts[counts > 0] / len(data)
    return max(0.0, -float(np.sum(shares * np.log2(shares))))


def longest_plaintext_run(stream: bytes, plaintexts: Iterable[bytes]) -> int:
    """The length of the longest piece of a plaintext found in the stream; 0 if there is none.

    Every piece of SHORTEST_RUN bytes or more is found. If there are very many, only the first ones
    are measured.
    """
    return max((_longest(stream, plaintext) for plaintext in plaintexts), default=0)


def _longest(stream: bytes, plaintext: bytes) -> int:
    windows = _windows(plaintext)
    if not len(windows) or len(stream) < _WINDOW:
        return 0
    order = np.argsort(windows, kind="stable")
    ordered = windows[order]
    longest = 0
    for shift in range(_WINDOW):
        words = np.frombuffer(stream, "<u8", (len(stream) - shift) // _WINDOW, shift)
        found = np.minimum(np.searchsorted(ordered, words), len(ordered) - 1)
        for index in np.flatnonzero(ordered[found] == words)[:_ENOUGH_HITS]:
            at, place = int(index) * _WINDOW + shift, int(order[found[index]]) * _STRIDE
            before = _agreement(stream[:at][::-1], plaintext[:place][::-1])
            longest = max(longest, before + _agreement(stream[at:], plaintext[place:]))
    return longest


def _windows(data: bytes) -> NDArray[np.uint64]:
    count = (len(data) - _WINDOW) // _STRIDE + 1
    if count <= 0:
        return np.empty(0, np.uint64)
    halves = np.frombuffer(data, "<u4", count + 1).astype(np.uint64)
    return halves[:-1] | halves[1:] << np.uint64(32)


def _agreement(one: bytes, other: bytes) -> int:
    """The length of the common prefix."""
    length = min(len(one), len(other))
    differ = np.frombuffer(one, np.uint8, length) != np.frombuffer(other, np.uint8, length)
    return int(np.argmax(differ)) if differ.any() else length
