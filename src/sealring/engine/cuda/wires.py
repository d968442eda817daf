"""Which way records take from GPU to GPU, agreed by all ranks of a group.

host   shared memory of the host, which the GPUs read and write by themselves
peer   another process's GPU memory, by CUDA's inter-process handles: NVLink, or the same GPU
links  the group's links, by way of pinned memory and a CPU that copies: any two GPUs

First each rank tells whether it has a GPU that serves. A way other than `links` needs all ranks on
one host: each rank makes an area for its records and tells the others how to find it; each opens
the others' areas and tells whether it could. All come to the same conclusion. The rounds are small
collectives of the group itself, so what they tell is sealed.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Generator, Sequence
from enum import StrEnum
from typing import Final

from sealring import _native
from sealring.engine.cpu import Collective
from sealring.engine.datatypes import DType
from sealring.errors import Unsupported
from sealring.limits import WIRE_PAYLOAD_BYTES as PAYLOAD_BYTES
from sealring.limits import WIRE_SLOTS as SLOTS
from sealring.links import files
from sealring.schedule import Algorithm, Operation

_PAGE: Final = 4096
_LETTER: Final = struct.Struct("<BBHIQII32s64s136x")
"""Version, whether there is an offer, unused, slots, payload, pid, file, nonce, handle."""
_REASON_BYTES: Final = 1023
_VERDICT: Final = struct.Struct(f"<B{_REASON_BYTES}s")
"""Whether it went well, and if not, why.

What a peer says here decides only which way records take; it is a member of the group, and they are
sealed on all ways."""
_VERSION: Final = 1


class Wire(StrEnum):
    AUTO = "auto"
    LINKS = "links"
    HOST = "host"
    PEER = "peer"


class _Round:
    """One all-gather of a short letter per rank."""

    def __init__(self, world: int, own: bytes) -> None:
        size = len(own)
        self._own = ctypes.create_string_buffer(own, size)
        self._all = [ctypes.create_string_buffer(size) for _ in range(world)]

    def collective(self) -> Collective:
        slots = [(ctypes.addressof(each), len(each)) for each in (*self._all, self._own)]
        total = len(self._own) * len(self._all)
        return Collective(Operation.INTRODUCTION, Algorithm.DIRECT, slots, total, DType.BYTES)

    def letters(self) -> list[bytes]:
        return [each.raw for each in self._all]


def _judged(world: int, problem: str) -> Generator[Collective, None, str]:
    """What the first rank that has a problem says of it; nothing if none has."""
    told = problem.encode()[:_REASON_BYTES]
    verdicts = _Round(world, _VERDICT.pack(not problem, told))
    yield verdicts.collective()
    for peer, verdict in enumerate(verdicts.letters()):
        good, reason = _VERDICT.unpack(verdict)
        if not good:
            return f"rank {peer}: {reason.rstrip(bytes(1)).decode(errors='replace')}"
    return ""


class _Way:
    """How the areas of one kind are made and found."""

    def __init__(self, native: _native.Engine, wire: Wire) -> None:
        self._native = native
        self._wire = wire
        self._file: int | None = None
        area = _native.wire_area_bytes(SLOTS, PAYLOAD_BYTES)
        pages = -(-area // _PAGE) * _PAGE
        self._shape = files.Shape(pages + _PAGE, pages, files.SIZE_SEALS)

    def offer(self) -> bytes:
        nonce, handle, file = b"", b"", 0
        if self._wire is Wire.PEER:
            handle = self._native.offer_gpu_wires(SLOTS, PAYLOAD_BYTES)
        else:
            self._file, nonce = files.create(self._shape, "sealring-wire")
            files.seal(self._file, self._shape)
            file = self._file
            self._native.offer_host_wires(SLOTS, PAYLOAD_BYTES, file)
        return _LETTER.pack(_VERSION, 1, 0, SLOTS, PAYLOAD_BYTES, os.getpid(), file, nonce, handle)

    def open(self, peer: int, letter: bytes) -> None:
        version, offered, _, slots, payload, pid, file, nonce, handle = _LETTER.unpack(letter)
        if version != _VERSION or not offered:
            raise Unsupported(f"rank {peer} offers none")
        if (slots, payload) != (SLOTS, PAYLOAD_BYTES):
            raise Unsupported(f"rank {peer} has {slots} slots of {payload} bytes")
        if self._wire is Wire.PEER:
            self._native.open_gpu_wire(peer, handle)
            return
        fd = files.find(pid, file, nonce, self._shape, writable=True)
        try:
            self._native.open_host_wire(peer, fd, self._shape.bytes)
        finally:
            os.close(fd)

    def close(self) -> None:
        """The mappings stay."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


def agree(
    native: _native.Engine, rank: int, world: int, wanted: Wire, *, one_host: bool, problem: str
) -> Generator[Collective, None, None]:
    """The collectives by which the ranks agree; afterwards `native.wired` is the same on all.

    `problem` is why this rank's GPU cannot serve, if it cannot. Unsupported, on all ranks alike, if
    there is such a rank, or if `wanted` names a way that is not to be had.
    """
    why = yield from _judged(world, problem)
    if why:
        raise Unsupported(why)
    if wanted is not Wire.AUTO and wanted is not Wire.LINKS and not one_host:
        raise Unsupported(
            f"SEALRING_GPU_WIRE={wanted} needs all ranks on one host, and these are on several: "
            "set it to links, or leave it to auto"
        )
    for wire in _ways(wanted, one_host=one_host and world > 1):
        why = yield from _try(native, rank, world, wire)
        if not why:
            return
    if wanted in (Wire.HOST, Wire.PEER) and world > 1:
        raise Unsupported(
            f"SEALRING_GPU_WIRE={wanted} cannot be had: {why}. Leave it to auto, which takes "
            "whatever way there is"
        )


def _ways(wanted: Wire, *, one_host: bool) -> Sequence[Wire]:
    if not one_host or wanted is Wire.LINKS:
        return ()
    return (Wire.PEER, Wire.HOST) if wanted is Wire.AUTO else (wanted,)


def _try(
    native: _native.Engine, rank: int, world: int, wire: Wire
) -> Generator[Collective, None, str]:
    """Nothing, and it is used; or why it is not to be had, by the first rank that has it not."""
    way = _Way(native, wire)
    reason, letter = "", bytes(_LETTER.size)
    try:
        try:
            letter = way.offer()
        except (Unsupported, RuntimeError) as problem:
            reason = str(problem)
        offers = _Round(world, letter)
        yield offers.collective()
        try:
            for peer, other in enumerate(offers.letters()):
                if peer != rank and not reason:
                    way.open(peer, other)
        except (Unsupported, RuntimeError) as problem:
            reason = str(problem)
        why = yield from _judged(world, reason)
    finally:
        way.close()
    if why:
        native.drop_wires()
    else:
        native.use_wires()
    return why
