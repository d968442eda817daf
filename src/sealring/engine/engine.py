"""The engine that runs a group's collectives: the native core, with a GPU attached or without."""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from sealring import _native, limits
from sealring.engine.collective import Collective
from sealring.engine.cuda.wires import Wire, agree, share_a_gpu
from sealring.engine.datatypes import DType, ReduceKind
from sealring.engine.failures import Names, error_from, failure_of
from sealring.engine.link_ends import LinkEnds, hand_over
from sealring.errors import GroupError, Unsupported
from sealring.schedule import (
    Algorithm,
    Operation,
    Program,
    Topology,
    passes_records_on,
    program_for,
    segment_bytes,
)

if TYPE_CHECKING:
    from sealring.engine.cuda.attachment import Gpu

MIN_RECORD_BYTES: Final = 4 << 10


class CollectiveEngine:
    """Runs collectives, one at a time, over sealed links.

    Ranks are numbered within the group; `members` are their numbers in the job, which errors name.
    """

    def __init__(
        self,
        rank: int,
        world: int,
        *,
        context: bytes,
        group_key: _native.Secret,
        links: Iterable[tuple[int, LinkEnds]],
        host: str = "",
        members: Sequence[int] | None = None,
        record_bytes: int = limits.RECORD_BYTES,
        rekey_bytes: int = limits.REKEY_BYTES,
        gpu_record_bytes: int = limits.GPU_PAYLOAD_BYTES,
        first_failure: _native.FirstFailure | None = None,
        lease: _native.Lease | None = None,
    ) -> None:
        """`first_failure` and `lease` are shared with the group's mailbox, if it has one."""
        self._rank = rank
        self._world = world
        self._record_bytes = min(record_bytes, largest_segment(world))
        self._gpu_record_bytes = min(gpu_record_bytes, largest_segment(world))
        self._gpu: Gpu | None = None
        self.shares_gpu: bool | None = None
        """Two of the group's ranks are on one GPU; None until the ranks have said."""
        self._preparing = threading.Lock()
        """The script's thread and its backward pass's may both come with a first tensor."""
        self._names = Names(rank, tuple(members if members is not None else range(world)))
        self._programs: dict[tuple[Operation, Algorithm, int, bool, bool], _native.Program] = {}
        self._first_failure = first_failure or _native.FirstFailure()
        self._native = _native.Engine(
            rank,
            world,
            context,
            group_key,
            record_bytes,
            rekey_bytes,
            self._first_failure,
            self._names.for_native(),
        )
        if lease is not None:
            self._native.use_lease(lease)
        for peer, link in links:
            self._names.hosts[peer] = link.host
            hand_over(self._native, peer, link, link.peer_group_key)
        self.topology = topology_of([self._names.hosts.get(each, host) for each in range(world)])

    def use_gpu(
        self,
        ordinal: int,
        dtype: DType = DType.BYTES,
        reduction: ReduceKind = ReduceKind.NONE,
        *,
        prelaunch: bool = False,
    ) -> None:
        """Makes ready what a collective on this GPU needs; raises Unsupported if it cannot be.

        With `prelaunch` in the first call, kernels can be launched ahead, where the GPU allows it.
        """
        from sealring.engine.cuda.attachment import Gpu  # needs torch

        with self._preparing:
            if self._gpu is None:
                self._gpu = Gpu(self._native, ordinal, prelaunch=prelaunch)
            if self._gpu.ordinal != ordinal:
                raise Unsupported(
                    f"this group's tensors have been on cuda:{self._gpu.ordinal}, this one is on "
                    f"cuda:{ordinal}: a rank uses one GPU per group"
                )
            if not self._gpu.has(dtype, reduction):
                self._gpu.prepare(dtype, reduction)

    def agree_on_wire(
        self,
        wanted: Wire,
        problem: str = "",
        gpu: str = "",
    ) -> Generator[Collective, None, None]:
        """The collectives by which ranks agree on the way between their GPUs, once per group.

        `problem` is why this rank's cannot serve; then no rank's does. `gpu` names it.
        """
        one_host = len(set(self.topology.host_of)) == 1
        yield from agree(
            self._native,
            self._rank,
            self._names.members,
            wanted,
            one_host=one_host,
            problem=problem,
        )
        self.shares_gpu = yield from share_a_gpu(self._names.members, gpu)

    @property
    def wired(self) -> bool:
        """Records of GPUs have a way of their own, on which none is passed on."""
        return self._native.wired

    @property
    def channelled(self) -> bool:
        """That way is NCCL's, which has to be called for every record."""
        return self._native.channelled

    @property
    def prelaunch_stream(self) -> int:
        """The CUDA stream of the kernels that are launched ahead; 0 where none can be."""
        return self._native.prelaunch_stream

    def prelaunch(self, collective: Collective, stream: int = 0) -> Collective | None:
        """Launches kernels for a collective, after the work of the caller's stream.

        Returns the collective that must then be run, or None where it needs too many kernels.
        Called in the order in which the collectives will be run.
        """
        call = self._call(collective)
        return replace(collective, prepared=call) if self._native.prepare(call, stream) else None

    def launch_rest(self) -> None:
        """Launches the remaining kernels of the last prelaunched collective. May block."""
        self._native.launch_rest()

    def mark_end(self) -> int:
        """Marks the end of the last prelaunched collective; returns the number to wait for."""
        return self._native.mark_end()

    def is_done(self, end: int) -> bool:
        return self._native.is_done(end)

    def make_stream_wait(self, stream: int, end: int) -> None:
        """Later work of the stream waits until the collective is done."""
        self._native.make_stream_wait(stream, end)

    def poison_results(self, collective: Collective) -> None:
        """Releases the streams that wait for a prelaunched collective whose run has failed.

        Its results are first overwritten with ones, which are NaN in every float type.
        """
        if collective.prepared is not None:
            self._native.poison_results(collective.prepared)

    def run(self, number: int, collective: Collective, timeout_s: float) -> None:
        """Runs one collective to its end, without the GIL; raises a GroupError if it fails."""
        call = collective.prepared or self._call(collective)
        failure = self._native.run(call, number, timeout_s)
        if failure is not None:
            raise error_from(failure, self._names, number, collective.operation)

    def _call(self, collective: Collective) -> _native.Call:
        return _native.Call(
            self._program(collective),
            collective.slots,
            total=collective.total,
            root=collective.root,
            dtype=collective.dtype,
            reduction=collective.reduction,
            factor=collective.factor,
            segment_bytes=self._segment_bytes(collective),
            ready=collective.ready,
            wired=self._goes_by_wires(collective),
        )

    def _segment_bytes(self, collective: Collective) -> int:
        # What is cut must be cut alike by all who touch it, so by a length that they all know.
        known_to_all = collective.total is not None
        longest = max(size for _, size in collective.slots) if known_to_all else None
        if self._goes_by_wires(collective):
            return segment_bytes(longest, limits.WIRE_PAYLOAD_BYTES)
        on_gpu = collective.ready is not None
        return segment_bytes(longest, self._gpu_record_bytes if on_gpu else self._record_bytes)

    def _goes_by_wires(self, collective: Collective) -> bool:
        if collective.ready is None or not self.wired:
            return False
        return not passes_records_on(
            collective.operation, collective.algorithm, self._world, self.topology
        )

    def close(self) -> None:
        """Says goodbye to every peer and wipes the keys. A run under way is ended first."""
        self._native.close()

    def release_gpu(self) -> None:
        """Gives back what a closed group has of the GPU, without the GIL.

        CUDA may wait until the GPU is idle, and other groups' threads must go on meanwhile.
        """
        self._native.release_gpu()

    def interrupt(self) -> None:
        """Ends a run under way in another thread with GroupClosed."""
        self._native.interrupt()

    def fail(self, failure: _native.Failure) -> None:
        """End with a failure that the group saw elsewhere, and tell the other ranks."""
        self._native.fail(failure)

    def settle(self, error: GroupError) -> GroupError:
        """The group's error: this one if it is the first or says the same, else the first."""
        failure = failure_of(error)
        first = self._first_failure.settle(failure)
        return error if first == failure else self.error_of(first)

    def name_of(self, rank: int) -> str:
        """ "rank 5", by its number in the job."""
        return f"rank {self._names.number(rank)}"

    def error_of(self, failure: _native.Failure) -> GroupError:
        return error_from(failure, self._names)

    def account(self) -> _native.Account:
        return self._native.account()

    def sealed_and_opened(self) -> tuple[int, int]:
        """(sealed_bytes, opened_bytes) of account(), for a small part of its price."""
        return self._native.sealed_and_opened()

    def sealed_bytes(self, collective: Collective) -> int:
        """What this rank will seal for it, if it goes well."""
        return self._plan(collective).sealed_bytes([size for _, size in collective.slots])

    def _plan(self, collective: Collective) -> Program:
        return program_for(
            collective.operation,
            collective.algorithm,
            self._world,
            self._rank,
            root=collective.root,
            average=collective.reduction is ReduceKind.AVG,
            premultiply=collective.reduction is ReduceKind.PREMUL_SUM,
            topology=self.topology,
        )

    def _program(self, collective: Collective) -> _native.Program:
        average = collective.reduction is ReduceKind.AVG
        premultiply = collective.reduction is ReduceKind.PREMUL_SUM
        key = (collective.operation, collective.algorithm, collective.root, average, premultiply)
        if key not in self._programs:
            self._programs[key] = to_native(self._plan(collective))
        return self._programs[key]


def topology_of(hosts: Sequence[str]) -> Topology:
    """Who shares a host with whom, by the names that ranks gave of their hosts.

    All ranks compute the same: every name came from its own rank, over TLS that proved who it is.
    A rank that told its peers different names would fail the group (the programs would not fit),
    which it could do by simply leaving, too. Equal names of different machines cost only time.
    """
    numbers: dict[str, int] = {}
    return Topology(tuple(numbers.setdefault(host, len(numbers)) for host in hosts))


def largest_segment(world: int) -> int:
    """Plaintext per record in a world so large that a ring passes on many records per segment.

    A rank may have to keep world - 2 of them for one link; they must fit into the memory that a
    link may take.
    """
    return max(MIN_RECORD_BYTES, _native.FORWARD_BUDGET_BYTES // max(1, world - 2) // 64 * 64)


def to_native(program: Program) -> _native.Program:
    return _native.Program(
        program.operation,
        program.algorithm,
        program.rank,
        program.world,
        program.slots,
        program.scratch,
        [
            (
                step.action,
                step.slot,
                step.peers,
                step.message,
                step.origin,
                step.source,
                step.after,
            )
            for step in program.steps
        ],
    )
