"""All ranks of a group agree here on the way that records take from GPU to GPU.

host   shared memory of the host, which the GPUs read and write directly
peer   another process's GPU memory, by CUDA's inter-process handles: NVLink, or the same GPU
nccl   NCCL's sends and receives between hosts, for clusters with RDMA; peer inside each host
links  the group's links: the CPU copies records through pinned memory; works for any two GPUs

Every way carries the same sealed records. First each rank says whether its GPU can be used. For
all ways except `links`, each rank then makes an area for its records and tells the others how to
reach it (for NCCL: how to meet). Each rank tries to reach the others and reports the result, so
all ranks reach the same conclusion. All this is sent in small collectives of the group, so it is
sealed.
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
    """The way that all ranks of a group have agreed on."""

    wire: Wire
    hosts: tuple[int, ...] | None = None
    """A number for each rank; the GPUs of ranks with equal numbers read each other's memory. None
    where all GPUs read each other's memory, or none does."""


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
    """Yields the collectives by which the ranks agree. Then `native.wired` is equal on all ranks.

    `members` has each rank's number in the job, which errors name; `hosts` has a number for each
    rank's host. `problem` says why this rank's GPU cannot be used, or is ''. Raises Unsupported on
    all ranks if a rank's GPU cannot be used, or if `wanted` names a way that cannot be used.
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
    """The ways other than `links`, in the order in which they are tried.

    AUTO uses links between hosts: NCCL is faster only with RDMA, and users who have RDMA can set
    SEALRING_GPU_WIRE=nccl.
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
    """Whether there are several hosts, and several ranks on at least one of them."""
    return 1 < len(set(hosts)) < len(hosts)


def share_a_gpu(members: Sequence[int], gpu: str) -> Generator[Collective, None, bool]:
    """Yields a collective; returns whether two ranks named the same GPU in `gpu`."""
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
