"""The reference engine: all ranks in one process, on NumPy, with nothing sealed.

It runs the very programs that the native engine runs, segment by segment, and defines what must
come out. `arithmetic` says what a single reduction computes.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np

from sealring.engine.arithmetic import (
    Array,
    divide_by_world,
    multiply_by,
    reduce_into,
    require_supported,
)
from sealring.engine.datatypes import DType, ReduceKind
from sealring.errors import Unsupported
from sealring.limits import RECORD_BYTES
from sealring.schedule.execution import Execution
from sealring.schedule.program import Action, Program, Step

_UNWRITTEN = 0xA5
"""Scratch starts as this, so that a program that reads it too early fails alike every time."""


def run_reference(
    programs: Sequence[Program],
    slots_per_rank: Sequence[Sequence[Array]],
    op: ReduceKind,
    *,
    dtype: DType | None = None,
    segment_bytes: int = RECORD_BYTES,
    factor: float | None = None,
    window: int = 4,
    link_records: int | None = None,
    shuffle: random.Random | None = None,
) -> None:
    """Runs one collective and leaves its results in the arrays, as the native engine would.

    slots_per_rank[r] are the arrays that rank r's caller provides. `dtype` is needed where NumPy
    does not know the type: BFLOAT16, given as its bits in uint16 arrays. `factor` is PREMUL_SUM's.
    `window`, `link_records` and `shuffle` change the order of steps (see Execution) and must never
    change what comes out.
    """
    dtype = dtype or _dtype_of(slots_per_rank)
    require_supported(dtype, op)
    if op is ReduceKind.PREMUL_SUM and factor is None:
        raise Unsupported("PREMUL_SUM needs a factor")
    if segment_bytes <= 0 or segment_bytes % dtype.itemsize:
        raise Unsupported(f"segments of {segment_bytes} bytes would cut {dtype.name} elements")
    ranks = [
        _Rank(program, slots, op, dtype, segment_bytes // dtype.itemsize, factor)
        for program, slots in zip(programs, slots_per_rank, strict=True)
    ]
    execution = Execution(
        programs,
        segments=[rank.segments() for rank in ranks],
        window=window,
        link_records=link_records,
        shuffle=shuffle,
    )
    records = _Records()
    for turn in execution.turns():
        ranks[turn.rank].run(turn.step, turn.segment, records)


class _Records:
    """What has been sealed. A record keeps its name when it is forwarded, so one entry does."""

    def __init__(self) -> None:
        self._payloads: dict[tuple[int, int, int, int], Array] = {}

    def seal(self, sealer: int, receiver: int, message: int, segment: int, payload: Array) -> None:
        """`receiver` is -1 for a published record, which is for all."""
        self._payloads[sealer, receiver, message, segment] = payload.copy()

    def open(self, sealer: int, receiver: int, message: int, segment: int) -> Array:
        return self._payloads[sealer, receiver, message, segment]


class _Rank:
    def __init__(
        self,
        program: Program,
        provided: Sequence[Array],
        op: ReduceKind,
        dtype: DType,
        segment_elements: int,
        factor: float | None,
    ) -> None:
        if len(provided) != program.slots:
            raise Unsupported(
                f"rank {program.rank}'s program has {program.slots} slots, {len(provided)} given"
            )
        for number, slot in enumerate(provided):
            if slot.ndim != 1 or not slot.flags.c_contiguous or slot.itemsize != dtype.itemsize:
                raise Unsupported(
                    f"slot {number} of rank {program.rank} is not a contiguous, one-dimensional "
                    f"array of {dtype.name}"
                )
        self._program = program
        self._slots = [*provided, *(_unwritten_like(provided[i]) for i in program.scratch)]
        self._op = op
        self._dtype = dtype
        self._segment_elements = segment_elements
        self._factor = factor

    def segments(self) -> list[int]:
        """In how many segments each step exists: the first, and where its slot has bytes."""
        return [
            max(1, -(-self._slots[step.slot].size // self._segment_elements))
            for step in self._program.steps
        ]

    def run(self, index: int, segment: int, records: _Records) -> None:
        step = self._program.steps[index]
        here = self._program.rank
        piece = self._piece(step.slot, segment)
        match step.action:
            case Action.SEND:
                records.seal(here, step.peers[0], step.message, segment, piece)
            case Action.PUBLISH:
                records.seal(here, -1, step.message, segment, piece)
            case Action.FORWARD:
                pass  # the record goes on as it is; the execution moves it
            case Action.RECEIVE:
                piece[:] = self._opened(step, segment, records)
            case Action.RECEIVE_REDUCE:
                reduce_into(piece, self._opened(step, segment, records), self._dtype, self._op)
            case Action.COPY:
                piece[:] = self._piece(step.source, segment)
            case Action.REDUCE:
                reduce_into(piece, self._piece(step.source, segment), self._dtype, self._op)
            case Action.AVERAGE:
                divide_by_world(piece, self._program.world, self._dtype)
            case Action.PREMULTIPLY:
                if self._factor is None:
                    raise Unsupported("the program multiplies by a factor, and none was given")
                multiply_by(piece, self._factor, self._dtype)

    def _piece(self, slot: int, segment: int) -> Array:
        start = segment * self._segment_elements
        return self._slots[slot][start : start + self._segment_elements]

    def _opened(self, step: Step, segment: int, records: _Records) -> Array:
        if step.origin >= 0:
            return records.open(step.origin, -1, step.message, segment)
        return records.open(step.peers[0], self._program.rank, step.message, segment)


def _unwritten_like(slot: Array) -> Array:
    scratch = np.empty_like(slot)
    scratch.view(np.uint8).fill(_UNWRITTEN)
    return scratch


def _dtype_of(slots_per_rank: Sequence[Sequence[Array]]) -> DType:
    names = {slot.dtype.name for slots in slots_per_rank for slot in slots}
    if len(names) != 1:
        raise Unsupported(f"all arrays must have one dtype, these have {sorted(names)}")
    name = names.pop().upper()
    if name not in DType.__members__:
        raise Unsupported(f"NumPy's {name.lower()} is not an element type of sealring")
    return DType[name]
