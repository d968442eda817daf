"""Which way records take from GPU to GPU, agreed by all ranks of a group.

host   shared memory of the host, which the GPUs read and write by themselves
peer   another process's GPU memory, by CUDA's inter-process handles: NVLink, or the same GPU
nccl   NCCL's sends and receives between hosts, for clusters with RDMA; peer inside each host
links  the group's links, by way of pinned memory and a CPU that copies: any two GPUs

What travels is the same on all of them: sealed records. First each rank tells whether it has a GPU
that serves. For all ways but `links` each rank makes an area for its records and tells the others
how to reach it, or how to meet; each tries, and tells whether it could. All come to the same
conclusion. The rounds are small collectives of the group itself, so what they tell is sealed.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from sealring import _native
from sealring.core.engine.collective import Collective
from sealring.core.engine.cuda.ways import (
    Hierarchical,
    HostMemory,
    InsideHosts,
    Meeting,
    Nccl,
    PeerMemory,
    Way,
)
from sealring.core.engine.rounds import all_gather_bytes, first_objection, tried
from sealring.errors import Unsupported
from sealring.limits import WIRE_SLOTS as SLOTS

_GPU_BYTES: Final = 64


class Wire(StrEnum):
    AUTO = "auto"
    LINKS = "links"
    HOST = "host"
    PEER = "peer"
    NCCL = "nccl"


_Maker = Callable[[_native.Engine, int, Meeting], Way]
_ONE_HOST: Final[dict[Wire, _Maker]] = {Wire.PEER: PeerMemory, Wire.HOST: HostMemory}


@dataclass(frozen=True, slots=True)
class Agreed:
    """What all ranks of a group have come to."""

    wire: Wire
    hosts: tuple[int, ...] | None = None
    """Where not all GPUs read each other's memory: a number by rank. Those of one number do."""


def agree(
    native: _native.Engine,
    rank: int,
    members: Sequence[int],
    wanted: Wire,
    *,
    hosts: tuple[int, ...],
    problem: str,
    patience_s: float,
) -> Generator[Collective, None, Agreed]:
    """The collectives by which the ranks agree; afterwards `native.wired` is the same on all.

    `members` are the group's ranks by their numbers in the job, which errors name; `hosts` has a
    number for the host of each. `problem` is why this rank's GPU cannot serve, if it cannot.
    Unsupported, on all ranks alike, if a rank's GPU cannot serve, or if `wanted` names a way that
    cannot be used.
    """
    why = yield from first_objection(rank, members, problem)
    if why:
        raise Unsupported(why)
    one_host = len(set(hosts)) == 1
    if wanted in _ONE_HOST and not one_host:
        raise Unsupported(
            f"SEALRING_GPU_WIRE={wanted} needs all ranks on one host, and these are on several: "
            "set it to nccl or links, or leave it to auto"
        )
    world = len(members)
    if world == 1 or wanted is Wire.LINKS:
        return Agreed(Wire.LINKS)
    for make, agreed in _candidates(wanted, hosts):
        why = f"an area has {SLOTS} slots, and these are {world} ranks"
        if one_host and agreed.wire in _ONE_HOST and world > SLOTS:
            continue
        way = make(native, rank, Meeting(agreed.hosts or hosts, patience_s))
        why = yield from _try(native, rank, members, way)
        if not why:
            return agreed
    if wanted is not Wire.AUTO:
        raise Unsupported(
            f"SEALRING_GPU_WIRE={wanted} is not available: {why}. Leave it to auto, which takes "
            "whatever way there is"
        )
    return Agreed(Wire.LINKS)


def _candidates(wanted: Wire, hosts: tuple[int, ...]) -> Iterator[tuple[_Maker, Agreed]]:
    """In the order in which they are tried.

    Without a wish the links between hosts: NCCL is no faster without RDMA, and who has that asks
    for it.
    """
    if wanted is Wire.AUTO and is_mixed(hosts):
        yield InsideHosts, Agreed(Wire.PEER, hosts)
    if wanted is Wire.NCCL:
        if is_mixed(hosts):
            yield Hierarchical, Agreed(Wire.NCCL, hosts)
        yield Nccl, Agreed(Wire.NCCL, tuple(range(len(hosts))))
    elif len(set(hosts)) == 1:
        for wire, make in _ONE_HOST.items():
            if wanted in (Wire.AUTO, wire):
                yield make, Agreed(wire)


def is_mixed(hosts: tuple[int, ...]) -> bool:
    """Several hosts, and several ranks on one of them."""
    return 1 < len(set(hosts)) < len(hosts)


def share_a_gpu(members: Sequence[int], gpu: str) -> Generator[Collective, None, bool]:
    """Whether two of the ranks are on one GPU, by what each of them says of its own."""
    own = gpu.encode()[:_GPU_BYTES].ljust(_GPU_BYTES, bytes(1))
    names = yield from all_gather_bytes(len(members), own)
    return len(set(names)) < len(members)


def _try(
    native: _native.Engine, rank: int, members: Sequence[int], way: Way
) -> Generator[Collective, None, str]:
    """Returns '' if the way is now used, else the reason of the first rank that cannot use it."""
    own: list[bytes] = []
    try:
        why = yield from tried(rank, members, lambda: own.append(way.offer()))
        if not why:
            offers = yield from all_gather_bytes(len(members), own[0])
            why = yield from tried(rank, members, lambda: way.hand_out(offers))
            why = why or (yield from tried(rank, members, lambda: way.open(offers)))
    finally:
        way.close()
    if why:
        native.drop_wires()
    else:
        native.use_wires()
    return why
