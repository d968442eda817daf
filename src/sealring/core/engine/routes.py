"""Decides which way a collective's records take, and so its program and its segment length."""

from __future__ import annotations

from sealring import _native, limits
from sealring.core.engine.collective import Collective, ReduceKind
from sealring.core.engine.cuda.wires import Agreed, Wire, is_mixed
from sealring.core.schedule import (
    CALLED,
    Algorithm,
    Levels,
    Operation,
    Program,
    Topology,
    exchanged_bytes,
    levels_for,
    passes_records_on,
    program_for,
    relayed,
    segment_bytes,
)


class Routes:
    """The routes of one rank's collectives. Links carry everything until ranks agree on a wire."""

    def __init__(
        self,
        native: _native.Engine,
        rank: int,
        topology: Topology,
        *,
        record_bytes: int,
        gpu_record_bytes: int,
    ) -> None:
        self._native, self._rank, self._topology = native, rank, topology
        self._world = len(topology.host_of)
        self._mixed = is_mixed(topology.host_of)
        self._passing: dict[tuple[Operation, Algorithm], bool] = {}
        """Whether ranks forward records in a program. Cached, as the lookup hashes the topology."""
        self._record_bytes, self._gpu_record_bytes = record_bytes, gpu_record_bytes
        self.wire: Wire | None = None
        """None until the ranks have agreed."""
        self.apart: tuple[int, ...] | None = None
        """A number for each rank: GPUs of ranks with equal numbers read each other's memory. None
        where all GPUs read each other's memory, or none does."""

    def take(self, agreed: Agreed) -> None:
        self.wire, self.apart = agreed.wire, agreed.hosts

    def goes_by_wires(self, collective: Collective) -> bool:
        if collective.ready is None or not self._native.wired:
            return False
        if collective.operation not in CALLED:  # a group's own collectives are short
            return False
        if self._relays(collective) and (levels := self.levels(collective)):
            window = _native.exchange_window(levels.count)
            if not self._native.exchanges:
                window = self._native.wire_slots // (2 * self._world)
            return levels.most_lent * window <= self._native.wire_slots
        return not self._passes_records_on(collective)

    def segment_bytes(self, collective: Collective, *, wired: bool) -> int:
        # All ranks must cut a slot into the same segments, so by a length that they all know.
        known_to_all = collective.total is not None
        longest = max([size for _, size in collective.slots]) if known_to_all else None
        if not wired:
            on_gpu = collective.ready is not None
            return segment_bytes(longest, self._gpu_record_bytes if on_gpu else self._record_bytes)
        largest = self._native.largest_segment
        if self._native.exchanges and (levels := self.levels(collective)):
            most = min(limits.EXCHANGE_PAYLOAD_BYTES, largest)
            room = exchanged_bytes(levels.most_records, limits.EXCHANGE_BYTES, most)
            return segment_bytes(longest, room)
        return segment_bytes(longest, min(limits.WIRE_PAYLOAD_BYTES, largest))

    def program(self, collective: Collective, *, wired: bool) -> Program:
        program = program_for(
            collective.operation,
            collective.algorithm,
            self._world,
            self._rank,
            root=collective.root,
            average=collective.reduction is ReduceKind.AVG,
            premultiply=collective.reduction is ReduceKind.PREMUL_SUM,
            topology=self._topology,
        )
        return relayed(program) if wired and self._relays(collective) else program

    def levels(self, collective: Collective) -> Levels | None:
        """The exchanges of a collective; None where all GPUs read each other's memory, or none
        does."""
        if self.apart is None:
            return None
        return levels_for(
            collective.operation,
            collective.algorithm,
            self.apart,
            self._rank,
            root=collective.root,
            average=collective.reduction is ReduceKind.AVG,
            premultiply=collective.reduction is ReduceKind.PREMUL_SUM,
            topology=self._topology,
            relays=self._relays(collective),
        )

    def _relays(self, collective: Collective) -> bool:
        """Whether no record can reach all ranks unchanged, so that each is sealed for one receiver.

        That is so if some ranks read each other's memory and others do not, and if ranks exchange
        by NCCL the records that a rank would otherwise forward.
        """
        if self.apart is None:
            return False
        return self._mixed or self._passes_records_on(collective)

    def _passes_records_on(self, collective: Collective) -> bool:
        operation, algorithm = collective.operation, collective.algorithm
        found = self._passing.get((operation, algorithm))
        if found is None:
            found = passes_records_on(operation, algorithm, self._world, self._topology)
            self._passing[operation, algorithm] = found
        return found
