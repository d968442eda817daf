"""Which way records take from GPU to GPU, agreed by all ranks of a group.

host   shared memory of the host, which the GPUs read and write by themselves
peer   another process's GPU memory, by CUDA's inter-process handles: NVLink, or the same GPU
nccl   NCCL's sends and receives, for clusters with RDMA
links  the group's links, by way of pinned memory and a CPU that copies: any two GPUs

What travels is the same on all of them: sealed records. First each rank tells whether it has a GPU
that serves. For all ways but `links` each rank makes an area for its records and tells the others
how to reach it; each tries to reach the others' and tells whether it could. All come to the same
conclusion. The rounds are small collectives of the group itself, so what they tell is sealed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterator, Sequence
from enum import StrEnum
from itertools import permutations
from typing import Final, Protocol

from sealring import _native
from sealring.engine.collective import Collective
from sealring.engine.rounds import Round, judged
from sealring.errors import Unsupported
from sealring.limits import WIRE_PAYLOAD_BYTES as PAYLOAD_BYTES
from sealring.limits import WIRE_SLOTS as SLOTS
from sealring.links import files
from sealring.links.descriptors import Address, Inbox, leave

_PAGE: Final = 4096
_HANDLE_BYTES: Final = 64
_ID_BYTES: Final = 128
_GPU_BYTES: Final = 64
_MOST_CHANNELS: Final = 8


class Wire(StrEnum):
    AUTO = "auto"
    LINKS = "links"
    HOST = "host"
    PEER = "peer"
    NCCL = "nccl"


class _Way(Protocol):
    """How the areas of one kind are made and found."""

    def offer(self) -> bytes:
        """What the others must know; of the same length on all ranks."""

    def hand_out(self, letters: Sequence[bytes]) -> None:
        """Called when all offers are known. `open` follows when all ranks have done this."""

    def open(self, letters: Sequence[bytes]) -> None: ...
    def close(self) -> None: ...


class _PeerMemory:
    def __init__(self, native: _native.Engine, rank: int, _world: int) -> None:
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


class _HostMemory:
    """A file of each rank, whose descriptor goes into an inbox of each other rank."""

    def __init__(self, native: _native.Engine, rank: int, _world: int) -> None:
        self._native, self._rank = native, rank
        self._file: int | None = None
        self._inbox: Inbox | None = None
        area = _native.wire_area_bytes(SLOTS, PAYLOAD_BYTES)
        self._shape = files.Shape(-(-area // _PAGE) * _PAGE, files.SIZE_SEALS)

    def offer(self) -> bytes:
        self._file = files.create(self._shape, "sealring-wire")
        files.seal(self._file, self._shape)
        self._native.offer_host_wires(SLOTS, PAYLOAD_BYTES, self._file)
        self._inbox = Inbox()
        return self._inbox.address.packed()

    def hand_out(self, letters: Sequence[bytes]) -> None:
        assert self._file is not None
        for peer in _others(self._rank, letters):
            leave(Address.unpacked(letters[peer]), self._file, self._rank)

    def open(self, letters: Sequence[bytes]) -> None:
        assert self._inbox is not None
        left = self._inbox.take()
        try:
            for peer in _others(self._rank, letters):
                if peer not in left:
                    raise Unsupported("the memory of another rank did not come")
                files.check(left[peer], self._shape)
                self._native.open_host_wire(peer, left[peer], self._shape.bytes)
        finally:
            for fd in left.values():
                os.close(fd)

    def close(self) -> None:
        """The mappings stay."""
        if self._file is not None:
            os.close(self._file)
            self._file = None
        if self._inbox is not None:
            self._inbox.close()
            self._inbox = None


class _Nccl:
    """A channel from every rank to every other, each with an id that its sender makes."""

    def __init__(self, native: _native.Engine, rank: int, world: int) -> None:
        self._native, self._rank, self._world = native, rank, world

    def offer(self) -> bytes:
        if self._world > _MOST_CHANNELS:
            raise Unsupported(
                f"every rank has a channel to every other, and these are {self._world} ranks: "
                f"more than {_MOST_CHANNELS}"
            )
        self._native.offer_channels(SLOTS, PAYLOAD_BYTES)
        ids = [
            b"" if peer == self._rank else self._native.new_channel_id()
            for peer in range(self._world)
        ]
        return b"".join(each.ljust(_ID_BYTES, bytes(1)) for each in ids)

    def hand_out(self, letters: Sequence[bytes]) -> None:
        pass

    def open(self, letters: Sequence[bytes]) -> None:
        # Each returns when its other end has come: so all ranks must take them in one order.
        for sender, receiver in permutations(range(self._world), 2):
            if self._rank not in (sender, receiver):
                continue
            identity = letters[sender][receiver * _ID_BYTES :][:_ID_BYTES]
            sends = self._rank == sender
            self._native.open_channel(receiver if sends else sender, identity, sends)

    def close(self) -> None:
        pass


def _others(rank: int, letters: Sequence[bytes]) -> Iterator[int]:
    return (peer for peer in range(len(letters)) if peer != rank)


_WAYS: Final[dict[Wire, Callable[[_native.Engine, int, int], _Way]]] = {
    Wire.PEER: _PeerMemory,
    Wire.HOST: _HostMemory,
    Wire.NCCL: _Nccl,
}
_ONE_HOST: Final = (Wire.PEER, Wire.HOST)


def agree(
    native: _native.Engine,
    rank: int,
    members: Sequence[int],
    wanted: Wire,
    *,
    one_host: bool,
    problem: str,
) -> Generator[Collective, None, Wire]:
    """The collectives by which the ranks agree; afterwards `native.wired` is the same on all.

    Returns the way that all of them use.

    `members` are the group's ranks by their numbers in the job, which errors name. `problem` is why
    this rank's GPU cannot serve, if it cannot.
    Unsupported, on all ranks alike, if a rank's GPU cannot serve, or if `wanted` names a way that
    cannot be used.
    """
    why = yield from judged(members, problem)
    if why:
        raise Unsupported(why)
    if wanted in _ONE_HOST and not one_host:
        raise Unsupported(
            f"SEALRING_GPU_WIRE={wanted} needs all ranks on one host, and these are on several: "
            "set it to nccl or links, or leave it to auto"
        )
    world = len(members)
    if world == 1 or wanted is Wire.LINKS:
        return Wire.LINKS
    ways = _candidates(one_host=one_host) if wanted is Wire.AUTO else (wanted,)
    if world > SLOTS:
        ways, why = (), f"an area has {SLOTS} slots, and these are {world} ranks"
    for wire in ways:
        why = yield from _try(native, rank, members, wire)
        if not why:
            return wire
    if wanted is not Wire.AUTO:
        raise Unsupported(
            f"SEALRING_GPU_WIRE={wanted} is not available: {why}. Leave it to auto, which takes "
            "whatever way there is"
        )
    return Wire.LINKS


def share_a_gpu(members: Sequence[int], gpu: str) -> Generator[Collective, None, bool]:
    """Whether two of the ranks are on one GPU, by what each of them says of its own."""
    names = Round(len(members), gpu.encode()[:_GPU_BYTES].ljust(_GPU_BYTES, bytes(1)))
    yield names.collective()
    return len(set(names.letters())) < len(members)


def _candidates(*, one_host: bool) -> Sequence[Wire]:
    """Between hosts the links: NCCL is no faster without RDMA, and who has that asks for it."""
    return _ONE_HOST if one_host else ()


def _try(
    native: _native.Engine, rank: int, members: Sequence[int], wire: Wire
) -> Generator[Collective, None, str]:
    """Returns '' if the way is now used, else the reason of the first rank that cannot use it."""
    way = _WAYS[wire](native, rank, len(members))
    reason, letter = "", b""
    try:
        try:
            letter = way.offer()
        except Exception as problem:  # whatever it is, the others must not wait for an area
            reason = str(problem) or repr(problem)
        why = yield from judged(members, reason)
        if not why:
            offers = Round(len(members), letter)
            yield offers.collective()
            for step in (way.hand_out, way.open):
                try:
                    step(offers.letters())
                except Exception as problem:
                    reason = str(problem) or repr(problem)
                why = yield from judged(members, reason)
                if why:
                    break
    finally:
        way.close()
    if why:
        native.drop_wires()
    else:
        native.use_wires()
    return why
