"""The CPU engine: the native core behind the schedule's words."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from sealring import _native, limits
from sealring.engine.datatypes import DType, ReduceKind
from sealring.engine.failures import error_from
from sealring.schedule import Algorithm, Operation, Program, program_for, segment_bytes

FORWARD_BUDGET: Final = 8 << 20
MIN_RECORD_BYTES: Final = 4 << 10


class LinkEnds(Protocol):
    """What the engine takes from a link once the handshake is done (links.Link has it)."""

    @property
    def host(self) -> str: ...
    @property
    def memory_fd(self) -> int | None: ...
    @property
    def dialer(self) -> bool: ...
    @property
    def send_key(self) -> bytes: ...
    @property
    def receive_key(self) -> bytes: ...
    @property
    def peer_group_key(self) -> bytes: ...
    @property
    def socket(self) -> socket.socket: ...


@dataclass(frozen=True, slots=True)
class Collective:
    """One call: which program, on which memory."""

    operation: Operation
    algorithm: Algorithm
    slots: Sequence[tuple[int, int]]
    """(address, bytes) of each slot, in the order the program numbers them."""
    total: int
    """Bytes of the tensor as the user sees it; all ranks must say the same."""
    dtype: DType
    reduction: ReduceKind = ReduceKind.NONE
    factor: float = 1.0
    root: int = 0


class CpuEngine:
    """Runs collectives, one at a time, over sealed links. Ranks are numbered within the group."""

    def __init__(
        self,
        rank: int,
        world: int,
        *,
        context: bytes,
        group_key: bytes,
        links: Iterable[tuple[int, LinkEnds]],
        record_bytes: int = limits.RECORD_BYTES,
        rekey_bytes: int = limits.REKEY_BYTES,
        ring_bytes: int = limits.RING_BYTES,
    ) -> None:
        self._rank = rank
        self._world = world
        self._record_bytes = min(record_bytes, largest_segment(world))
        self._hosts: dict[int, str] = {}
        self._programs: dict[tuple[Operation, Algorithm, int, bool, bool], _native.Program] = {}
        self._native = _native.Engine(rank, world, context, group_key, record_bytes, rekey_bytes)
        for peer, link in links:
            self._hosts[peer] = link.host
            keys = (link.send_key, link.receive_key, link.peer_group_key)
            # The descriptors are the native engine's from here on.
            if link.memory_fd is None:
                self._native.add_tcp_link(peer, link.socket.detach(), *keys)
            else:
                self._native.add_shm_link(
                    peer, link.socket.detach(), link.memory_fd, ring_bytes, link.dialer, *keys
                )
                os.close(link.memory_fd)

    def run(self, number: int, collective: Collective, timeout_s: float) -> None:
        """Runs one collective to its end, without the GIL; raises a GroupError if it fails."""
        longest = max(size for _, size in collective.slots)
        failure = self._native.run(
            self._program(collective),
            collective.slots,
            number,
            collective.total,
            collective.dtype,
            collective.reduction,
            collective.factor,
            segment_bytes(longest, self._record_bytes),
            timeout_s,
        )
        if failure is not None:
            raise error_from(failure, rank=self._rank, hosts=self._hosts)

    def close(self) -> None:
        """Says goodbye to every peer and wipes the keys. A run under way is ended first."""
        self._native.close()

    def interrupt(self) -> None:
        """Ends a run under way in another thread with GroupClosed."""
        self._native.interrupt()

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
        )

    def _program(self, collective: Collective) -> _native.Program:
        average = collective.reduction is ReduceKind.AVG
        premultiply = collective.reduction is ReduceKind.PREMUL_SUM
        key = (collective.operation, collective.algorithm, collective.root, average, premultiply)
        if key not in self._programs:
            self._programs[key] = to_native(self._plan(collective))
        return self._programs[key]


def largest_segment(world: int) -> int:
    """Plaintext per record in a world so large that a ring passes on many records per segment.

    A rank may have to keep world - 2 of them for one link; they must fit into the memory that a
    link may take (native/collective.cpp, kForwardBudget).
    """
    return max(MIN_RECORD_BYTES, FORWARD_BUDGET // max(1, world - 2) // 64 * 64)


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
