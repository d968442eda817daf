"""Sets up each way between GPUs: memory areas that peers can reach, or NCCL communicators."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from sealring import _native, limits
from sealring.core.links import memory
from sealring.core.links.descriptors import Address, Inbox, close_received, leave
from sealring.errors import Unsupported
from sealring.limits import EXCHANGE_BYTES, GPU_PAYLOAD_BYTES
from sealring.limits import WIRE_PAYLOAD_BYTES as PAYLOAD_BYTES
from sealring.limits import WIRE_SLOTS as SLOTS

_PAGE: Final = 4096
_HANDLE_BYTES: Final = 64
_AREA_BYTES: Final = 128 << 20
_LEAST_SLOTS, _MOST_SLOTS = 2, 12
"""Slots in an area for each rank of the group. In a segment a rank seals up to two records for each
rank. With NCCL between hosts six segments are open at once; otherwise up to six, as long as the
area stays small."""


@dataclass(frozen=True, slots=True)
class Meeting:
    """The group's hosts, and how long ranks wait for each other while a way is set up."""

    hosts: tuple[int, ...]
    """The host's number of each rank. NCCL carries records between ranks of different numbers."""
    patience_s: float


class Way(Protocol):
    """One way between GPUs, while it is set up: `offer`, then `hand_out`, then `open`."""

    def offer(self) -> bytes:
        """Makes this rank's area; returns the bytes that the other ranks need to reach it.

        All ranks return the same number of bytes.
        """

    def hand_out(self, letters: Sequence[bytes]) -> None:
        """Called with the offers of all ranks. `open` follows when all ranks have done this."""

    def open(self, letters: Sequence[bytes]) -> None: ...
    def close(self) -> None: ...


class PeerMemory:
    def __init__(self, native: _native.Engine, rank: int, _: object) -> None:
        self._native, self._rank = native, rank

    def offer(self) -> bytes:
        return self._native.offer_gpu_wires(SLOTS, PAYLOAD_BYTES).ljust(_HANDLE_BYTES, bytes(1))

    def hand_out(self, letters: Sequence[bytes]) -> None:
        pass

    def open(self, letters: Sequence[bytes]) -> None:
        for peer in _others(self._rank, letters):
            self._native.open_gpu_wire(peer, letters[peer])

    def close(self) -> None:
        pass


class HostMemory:
    """Each rank's area is a memory file; it sends the descriptor to the inbox of every other
    rank."""

    def __init__(self, native: _native.Engine, rank: int, meeting: Meeting) -> None:
        self._native, self._rank, self._world = native, rank, len(meeting.hosts)
        self._file: int | None = None
        self._inbox: Inbox | None = None
        area = _native.wire_area_bytes(SLOTS, PAYLOAD_BYTES)
        self._shape = memory.FileShape(-(-area // _PAGE) * _PAGE, memory.SIZE_SEALS)

    def offer(self) -> bytes:
        self._file = memory.create_memory_file(self._shape, "sealring-wire")
        memory.seal_file(self._file, self._shape)
        self._native.offer_host_wires(SLOTS, PAYLOAD_BYTES, self._file)
        self._inbox = Inbox(range(self._world))
        return self._inbox.address.packed()

    def hand_out(self, letters: Sequence[bytes]) -> None:
        assert self._file is not None
        for peer in _others(self._rank, letters):
            leave(Address.unpacked(letters[peer]), [self._file], self._rank)

    def open(self, letters: Sequence[bytes]) -> None:
        assert self._inbox is not None
        left = self._inbox.take()
        try:
            for peer in _others(self._rank, letters):
                if peer not in left:
                    raise Unsupported("the memory of another rank did not come")
                memory.check_file(left[peer][0], self._shape)
                self._native.open_host_wire(peer, left[peer][0], self._shape.bytes)
        finally:
            close_received(fd for each in left.values() for fd in each)

    def close(self) -> None:
        """Closes the descriptors. The mappings stay."""
        if self._file is not None:
            os.close(self._file)
            self._file = None
        if self._inbox is not None:
            self._inbox.close()
            self._inbox = None


class Nccl:
    """NCCL communicators of all ranks. Each rank offers ids for them, and rank 0's ids are used."""

    def __init__(self, native: _native.Engine, rank: int, meeting: Meeting) -> None:
        self._native, self._rank, self._meeting = native, rank, meeting

    def offer(self) -> bytes:
        self._native.offer_exchanges(EXCHANGE_BYTES)
        return self._native.new_meeting_id()

    def hand_out(self, letters: Sequence[bytes]) -> None:
        pass

    def open(self, letters: Sequence[bytes]) -> None:
        hosts, patience_s = self._meeting.hosts, self._meeting.patience_s
        deadline = time.monotonic() + patience_s
        peers = [each for each in _others(self._rank, letters) if hosts[each] != hosts[self._rank]]
        self._native.meet(letters[0], peers, patience_s)
        # A larger group connects before a program's first use (linked_programs.py).
        if len(hosts) <= limits.MOST_LINKED_AT_ONCE:
            self._native.connect(peers, max(0.0, deadline - time.monotonic()))

    def close(self) -> None:
        pass


class InsideHosts:
    """Peer memory inside each host, and the links between hosts."""

    def __init__(
        self,
        native: _native.Engine,
        rank: int,
        meeting: Meeting,
        least_slots: int = _LEAST_SLOTS,
    ) -> None:
        """`least_slots` is the least number of slots in the area for each rank of the group."""
        self._native, self._rank, self._hosts = native, rank, meeting.hosts
        self._least_slots = least_slots

    def offer(self) -> bytes:
        world = len(self._hosts)
        fitting = _AREA_BYTES // (world * GPU_PAYLOAD_BYTES)
        slots = world * min(_MOST_SLOTS, max(self._least_slots, fitting))
        records = max(1, min(PAYLOAD_BYTES, _AREA_BYTES // slots) // GPU_PAYLOAD_BYTES)
        handle = self._native.offer_gpu_wires(slots, records * GPU_PAYLOAD_BYTES)
        self._native.mark_mixed()
        return handle.ljust(_HANDLE_BYTES, bytes(1))

    def hand_out(self, letters: Sequence[bytes]) -> None:
        pass

    def open(self, letters: Sequence[bytes]) -> None:
        for peer in _others(self._rank, letters):
            if self._hosts[peer] == self._hosts[self._rank]:
                self._native.open_gpu_wire(peer, letters[peer][:_HANDLE_BYTES])

    def close(self) -> None:
        pass


class Hierarchical:
    """Peer memory inside each host, NCCL between hosts."""

    def __init__(self, native: _native.Engine, rank: int, meeting: Meeting) -> None:
        self._inside = InsideHosts(native, rank, meeting, _MOST_SLOTS)
        self._between = Nccl(native, rank, meeting)

    def offer(self) -> bytes:
        return self._inside.offer() + self._between.offer()

    def hand_out(self, letters: Sequence[bytes]) -> None:
        pass

    def open(self, letters: Sequence[bytes]) -> None:
        self._inside.open([each[:_HANDLE_BYTES] for each in letters])
        self._between.open([each[_HANDLE_BYTES:] for each in letters])

    def close(self) -> None:
        pass


def _others(rank: int, letters: Sequence[bytes]) -> Iterator[int]:
    return (peer for peer in range(len(letters)) if peer != rank)
