"""The engine that runs a group's collectives: the native core, with or without an attached GPU."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Final

from sealring import _native, limits
from sealring.core.engine.collective import Collective, DType, ReduceKind, to_native
from sealring.core.engine.cuda.linked_programs import LinkedPrograms
from sealring.core.engine.cuda.wires import Wire, agree, share_a_gpu
from sealring.core.engine.endpoint import Endpoint
from sealring.core.engine.failures import Names, error_from, failure_of
from sealring.core.engine.lanes import GroupLanes
from sealring.core.engine.link_ends import LinkEnds
from sealring.core.engine.rounds import first_objection
from sealring.core.engine.routes import Routes
from sealring.core.links.exchange import Exchange
from sealring.core.schedule import Algorithm, Operation, Topology, has_few_links
from sealring.errors import GroupError, Unsupported

if TYPE_CHECKING:
    from sealring.core.engine.streams import StreamCaller

MIN_RECORD_BYTES: Final = 4 << 10
_PART_OF_TIMEOUT: Final = 0.5
"""The part of the timeout that GPUs have to connect with each other. A rank that cannot connect
waits for the others meanwhile. The others must give up connecting before that rank's timeout."""


class CollectiveEngine(Endpoint[_native.Engine]):
    """Runs collectives, one at a time, over sealed links."""

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
        hosts: Mapping[int, str] | None = None,
        unlinked: Mapping[int, _native.Secret] | None = None,
        exchange: Exchange | None = None,
        threads: int = 1,
    ) -> None:
        """`first_failure` and `lease` are shared with the group's mailbox, if it has one.

        `unlinked` has the group keys of the members to which `exchange` opens pipes when they are
        needed. `hosts` has the hosts of all members. The keys of both are ranks of the group.
        `threads` is how many threads this rank may use for a large collective.
        """
        links = list(links)
        self.lanes = GroupLanes(rank, world, exchange, threads)
        self._rank = rank
        self._prelaunch_stream = 0
        self.shares_gpu: bool | None = None
        """Whether two ranks of the group use the same GPU; None until the ranks have told."""
        names = Names(rank, tuple(members if members is not None else range(world)))
        self._programs: dict[
            tuple[Operation, Algorithm, int, bool, bool, bool], _native.Program
        ] = {}
        first_failure = first_failure or _native.FirstFailure()
        native = _native.Engine(
            rank,
            world,
            context,
            group_key,
            record_bytes,
            rekey_bytes,
            first_failure,
            names.for_native(),
        )
        for peer, key in (unlinked or {}).items():
            native.add_member(peer, key)
            key.wipe()
        super().__init__(
            native,
            names,
            first_failure,
            links,
            lease,
            purpose="collectives",
            hosts=hosts,
            exchange=exchange,
        )
        self.exchange = exchange
        if exchange is not None:
            weakref.finalize(self, exchange.stop_soon)
        self.on_gpus = LinkedPrograms(native, rank, names.members)
        self.topology = topology_of([self._names.hosts.get(each, host) for each in range(world)])
        self.routes = Routes(
            native,
            rank,
            self.topology,
            record_bytes=min(record_bytes, largest_segment(world)),
            gpu_record_bytes=min(gpu_record_bytes, largest_segment(world)),
        )

    def use_gpu(
        self,
        ordinal: int,
        dtype: DType = DType.BYTES,
        reduction: ReduceKind = ReduceKind.NONE,
        *,
        prelaunch: bool = False,
    ) -> None:
        """Prepares what a collective on this GPU needs; raises Unsupported if that fails.

        With `prelaunch` in the first call, kernels can be launched ahead if the GPU allows it.
        """
        from sealring.core.engine.cuda.attachment import Gpu  # needs torch

        with self._preparing:
            self._require_gpu(ordinal, "tensors")
            if self._gpu is None:
                self._gpu = Gpu(self._native, ordinal, prelaunch=prelaunch)
            assert isinstance(self._gpu, Gpu)
            self._gpu.prepare(dtype, reduction)

    def require_agreement(self, objection: str) -> Generator[Collective, None, None]:
        """Yields collectives that raise Unsupported on all ranks if any rank has an objection.

        `objection` is why this rank cannot take part, or ''.
        """
        if why := (yield from first_objection(self._rank, self._names.members, objection)):
            raise Unsupported(why)

    def agree_on_wire(
        self,
        wanted: Wire,
        problem: str = "",
        gpu: str = "",
        timeout_s: float = 60.0,
    ) -> Generator[Collective, None, None]:
        """Yields the collectives by which ranks agree on the way between their GPUs; once per
        group.

        `problem` says why this rank's GPU cannot be used, or is ''; with a problem on any rank, no
        rank's GPU is used. `gpu` names this rank's GPU. `timeout_s` is the collectives' timeout.
        """
        agreed = yield from agree(
            self._native,
            self._rank,
            self._names.members,
            wanted,
            hosts=self.topology.host_of,
            problem=problem,
            patience_s=timeout_s * _PART_OF_TIMEOUT,
        )
        self.routes.take(agreed)
        self.shares_gpu = yield from share_a_gpu(self._names.members, gpu)
        if self.wired:
            yield from self.link_gpus(self._most_used_on_wires(), timeout_s)

    def _most_used_on_wires(self) -> Collective:
        """The most used program, which is linked at once.

        Later, kernels of other calls may have been launched ahead and be in the way.
        """
        slots = [(0, 0)] * len(self._names.members)
        few = has_few_links(Algorithm.HIERARCHICAL, self.topology)
        algorithm = Algorithm.HIERARCHICAL if few else Algorithm.RING
        return Collective(Operation.ALL_REDUCE, algorithm, slots, 0, DType.BYTES, ready=0)

    def gpus_lack_links(self, collective: Collective) -> bool:
        """Whether `link_gpus` must come before this collective; the same on all ranks."""
        return self.on_gpus.missing_for(collective)

    def link_gpus(
        self, collective: Collective, timeout_s: float
    ) -> Generator[Collective, None, None]:
        """Yields the collectives after which GPUs can run `collective`'s program; once per program.

        `timeout_s` is the timeout of the yielded collectives.
        """
        patience_s = timeout_s * _PART_OF_TIMEOUT
        return self.on_gpus.make(collective, lambda: self._exchanges_with(collective), patience_s)

    def no_launches_ahead(self) -> AbstractContextManager[None]:
        """No kernels are launched ahead within this context. Queue and run `link_gpus` inside
        it."""
        return self.on_gpus.under_way()

    def _exchanges_with(self, collective: Collective) -> set[int]:
        """The ranks with which this rank exchanges the records of a program by NCCL."""
        apart = self.routes.apart
        if apart is None or not self.exchanges or not self.routes.goes_by_wires(collective):
            return set()
        steps = self.routes.program(collective, wired=True).steps
        peers = {peer for step in steps for peer in step.peers}
        return {peer for peer in peers if apart[peer] != apart[self._rank]}

    @property
    def wire(self) -> Wire | None:
        """Which way records take between GPUs; None until the ranks have agreed."""
        return self.routes.wire

    @property
    def wired(self) -> bool:
        """Whether GPU records have a way other than the links. On such a way no rank forwards."""
        return self._native.wired

    @property
    def exchanges(self) -> bool:
        """Whether GPUs exchange records with those of other hosts by NCCL."""
        return self._native.exchanges

    @property
    def prelaunch_stream(self) -> int:
        """The CUDA stream of the kernels that are launched ahead; 0 if none can be."""
        # Kept, because a group that ends may free its device at any time.
        self._prelaunch_stream = self._prelaunch_stream or self._native.prelaunch_stream
        return self._prelaunch_stream

    def submit(
        self, collective: Collective, stream: StreamCaller | None = None
    ) -> _native.Completion:
        """Gives a collective to the core; `run` then runs it.

        With `stream`, kernels are launched ahead, after the work of the caller's stream. The
        completion says whether streams can wait: they cannot if the collective needs too many
        kernels, or if the kernels might block another call. Submit in the order of the runs.
        """
        call, ready = self._call(collective), collective.ready
        if ready is None:
            return self._native.submit(call, None)
        if stream is None or self.on_gpus.making:
            return self._native.submit(call, _native.CallerStream(ready))
        stream.streams.free_old()
        with stream.streams.guard():
            caller = _native.CallerStream(ready, stream.streams.current, streams_wait=True)
            return self._native.submit(call, caller)

    def lacks_lanes(self, collective: Collective) -> bool:
        """Whether ranks must agree on lanes before this collective; the same on all ranks."""
        return self.lanes.missing_for(collective)

    def with_lanes(
        self, collective: Collective, timeout_s: float
    ) -> Generator[Collective, None, None]:
        """Yields the collectives by which ranks agree on their lanes, and then `collective`."""
        self.link_sockets += yield from self.lanes.agree(
            self._native, self._names, collective, self._peers_of, timeout_s
        )
        yield collective

    def _peers_of(self, collective: Collective) -> set[int]:
        """The ranks with which this rank exchanges a collective's records over links."""
        steps = self.routes.program(collective, wired=False).steps
        return {peer for step in steps for peer in step.peers}

    @property
    def threads(self) -> int:
        """How many threads share a large collective, as ranks have agreed. Each has its own
        pipes."""
        return self.lanes.most

    def submit_ahead(
        self,
        collective: Collective,
        stream: StreamCaller,
        queue: Callable[[_native.Completion], None],
    ) -> None:
        """Submits a collective that streams wait for, and launches its kernels. May block.

        `queue` must give the collective to the thread that runs it; it is called before anything
        blocks. The copy of the result follows the kernels, and waiting streams wait for both.
        """
        submitted = self.submit(collective, stream)
        queue(submitted)
        if not submitted.streams_wait:
            return
        with stream.streams.guard():
            self._native.launch_rest()
            try:
                if stream.copy_back is not None:
                    stream.streams.run_on(self.prelaunch_stream, stream.copy_back)
            finally:
                stream.copy_back = None
                self._native.mark_end(submitted)

    def release_streams(self, submitted: _native.Completion) -> None:
        """Releases the streams that wait for a collective whose run has failed.

        Its results are first overwritten with bytes of all ones, which are NaN in every float type.
        """
        self._native.release_streams(submitted)

    def run(
        self,
        number: int,
        collective: Collective,
        timeout_s: float,
        submitted: _native.Completion | None = None,
    ) -> None:
        """Runs one collective to its end, without the GIL; raises a GroupError if it fails.

        `submitted` is the collective's completion if it was submitted before.
        """
        completion = submitted or self.submit(collective)
        failure = completion.wait_on_host(number, timeout_s)
        if failure is not None:
            self._refuse_links(self.error_of(failure))
            raise error_from(failure, self._names, number, collective.operation)

    def close(self) -> None:
        super().close()
        if self.exchange is not None:
            self.exchange.stop()

    def close_links(self, failure: GroupError) -> None:
        """Like `close`, but members that ask for a link are still told how the group failed."""
        super().close()
        self._refuse_links(failure)

    def prepare(self, collective: Collective) -> _native.Call:
        """Makes a call that `run_again` can run many times, each time with memory of this
        length."""
        return self._call(collective)

    def run_again(
        self, number: int, call: _native.Call, address: int, timeout_s: float, operation: Operation
    ) -> None:
        """Runs a call made by `prepare`, with its memory at another address."""
        failure = self._native.run_at(call, address, number, timeout_s)
        if failure is not None:
            self._refuse_links(self.error_of(failure))
            raise error_from(failure, self._names, number, operation)

    def _call(self, collective: Collective) -> _native.Call:
        wired = self.routes.goes_by_wires(collective)
        return _native.Call(
            self._program(collective, wired=wired),
            collective.slots,
            total=collective.total,
            root=collective.root,
            dtype=collective.dtype,
            reduction=collective.reduction,
            factor=collective.factor,
            segment_bytes=self.routes.segment_bytes(collective, wired=wired),
            wired=wired,
            lanes=self.lanes.count_for(collective),
        )

    def interrupt(self) -> None:
        """Ends another thread's `run` with GroupClosed."""
        self._native.interrupt()

    @property
    def runs_here(self) -> bool:
        """Whether this code is a signal handler that interrupted this thread's `run`."""
        return self._native.runs_here

    def settle(self, error: GroupError) -> GroupError:
        """Returns the group's error: `error` if it is the first or equal to it, else the first."""
        failure = failure_of(error)
        first = self.first_failure.settle(failure)
        return error if first == failure else self.error_of(first)

    def name_of(self, rank: int) -> str:
        """Returns e.g. "rank 5", with the rank's number in the job."""
        return f"rank {self._names.number(rank)}"

    def account(self) -> _native.Account:
        return self._native.account()

    def sealed_and_opened(self) -> tuple[int, int]:
        """(sealed_bytes, opened_bytes) of account(), much cheaper than account()."""
        return self._native.sealed_and_opened()

    def sealed_bytes(self, collective: Collective) -> int:
        """The bytes that this rank seals for a collective that succeeds."""
        plan = self.routes.program(collective, wired=self.routes.goes_by_wires(collective))
        return plan.sealed_bytes([size for _, size in collective.slots])

    def _program(self, collective: Collective, *, wired: bool) -> _native.Program:
        average = collective.reduction is ReduceKind.AVG
        premultiply = collective.reduction is ReduceKind.PREMUL_SUM
        key = (
            collective.operation,
            collective.algorithm,
            collective.root,
            average,
            premultiply,
            wired,
        )
        program = self._programs.get(key)
        if program is None:
            plan = self.routes.program(collective, wired=wired)
            if self.late is not None:
                # `both`: the other rank runs its part of this program and wants the link, too.
                peers = {peer for step in plan.steps for peer in step.peers}
                self.late.want(peers, both=True)
            levels = self.routes.levels(collective) if wired and self.exchanges else None
            program = self._programs[key] = to_native(plan, levels)
        return program


def topology_of(hosts: Sequence[str]) -> Topology:
    """Groups the ranks by host, from the host name that each rank gave.

    All ranks compute the same topology: each rank's name came over TLS that proved its identity. A
    rank that gives its peers different names makes the group fail, because the programs do not
    match; it could as well leave the group. Two machines with equal names cost only speed.
    """
    numbers: dict[str, int] = {}
    return Topology(tuple(numbers.setdefault(host, len(numbers)) for host in hosts))


def largest_segment(world: int) -> int:
    """The most plaintext in a record, which is limited in a large world.

    In a ring a rank may have to keep world - 2 records for one link. They must fit into the memory
    that a link may use.
    """
    return max(MIN_RECORD_BYTES, _native.FORWARD_BUDGET_BYTES // max(1, world - 2) // 64 * 64)
