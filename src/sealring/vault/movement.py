"""Which rank sends which elements to which, when a state changes its layout: boxes, and no bytes.

A box is a part of a tensor: offsets and sizes. Every rank says which boxes it holds and which it
wants, and each computes the same plan from that. A rank receives what it wants and does not hold,
each element once; elements that several ranks hold come from the one that has sent least so far.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from sealring.errors import ForeignPart, MissingPart


@dataclass(frozen=True, slots=True)
class Box:
    offsets: list[int]
    sizes: list[int]

    @property
    def elements(self) -> int:
        return math.prod(self.sizes)

    def meet(self, other: Box) -> Box | None:
        """What both have; None if that is nothing."""
        starts = [max(a, b) for a, b in zip(self.offsets, other.offsets, strict=True)]
        ends = [min(a, b) for a, b in zip(self._ends(), other._ends(), strict=True)]
        sizes = [end - start for start, end in zip(starts, ends, strict=True)]
        return Box(starts, sizes) if all(size > 0 for size in sizes) else None

    def lies_in(self, size: Sequence[int]) -> bool:
        """Whether it is a part of a tensor of this size."""
        return len(self.offsets) == len(self.sizes) == len(size) and all(
            offset + length <= whole
            for offset, length, whole in zip(self.offsets, self.sizes, size, strict=True)
        )

    def without(self, inner: Box) -> Iterator[Box]:
        """The rest, as boxes, of which no two overlap. `inner` lies in this one."""
        offsets, sizes = list(self.offsets), list(self.sizes)
        for axis, (start, size) in enumerate(zip(inner.offsets, inner.sizes, strict=True)):
            before = start - offsets[axis]
            behind = offsets[axis] + sizes[axis] - (start + size)
            for first, length in ((offsets[axis], before), (start + size, behind)):
                if length:
                    yield Box(
                        [*offsets[:axis], first, *offsets[axis + 1 :]],
                        [*sizes[:axis], length, *sizes[axis + 1 :]],
                    )
            offsets[axis], sizes[axis] = start, size

    def _ends(self) -> list[int]:
        return [offset + size for offset, size in zip(self.offsets, self.sizes, strict=True)]


@dataclass(frozen=True, slots=True)
class Part:
    """What a rank holds or wants of one entry."""

    dtype: str | None
    """None for an entry that is no tensor: its pickle's bytes."""
    item: int
    """Bytes of an element."""
    size: list[int]
    """Of the whole tensor."""
    box: Box


@dataclass(frozen=True, slots=True)
class Move:
    name: str
    source: int
    target: int
    box: Box
    bytes: int


Layout = Mapping[str, Part]
"""What one rank holds, or wants, by the entries' names."""


LARGEST_ENTRIES: Final = 1 << 30
"""Bytes of all entries of a rank that are no tensors. Their holder says how long they are."""


def check_layout(rank: int, layout: Layout) -> None:
    """Refuses what no rank can hold: another rank said where it lies, and may not be honest."""
    for name, part in layout.items():
        if not part.box.lies_in(part.size):
            raise ForeignPart(f"rank {rank} says that it has elements out of {name!r}")
        if part.dtype is None and part != entry(part.box.elements):
            raise ForeignPart(f"rank {rank} has a part of {name!r}, which has no parts")
    if sum(part.box.elements for part in layout.values() if part.dtype is None) > LARGEST_ENTRIES:
        raise ForeignPart(
            f"rank {rank} says that its entries that are no tensors have more than "
            f"{LARGEST_ENTRIES} bytes: keep large ones as tensors"
        )


def entry(length: int) -> Part:
    """One that is no tensor."""
    return Part(None, 1, [length], Box([0], [length]))


def digest_of(moves: Sequence[Move]) -> bytes:
    """Ranks that have been told different layouts have different plans."""
    return hashlib.sha256(repr(moves).encode()).digest()


def plan(held: Sequence[Layout], wanted: Sequence[Layout]) -> list[Move]:
    """All moves, also those of a rank to itself, in an order that is the same on every rank."""
    sent = [0] * len(held)
    moves: list[Move] = []
    for target, layout in enumerate(wanted):
        for name in sorted(layout):
            part = layout[name]
            holders = [rank for rank, one in enumerate(held) if name in one]
            if part.dtype is None:  # each rank's own may differ
                holders = [target] if target in holders else holders[:1]
            for rank in holders:
                _require_same(name, part, target, held[rank][name], rank)
            for move in _sources(name, part, target, holders, held, sent):
                if move.source != target:
                    sent[move.source] += move.bytes
                moves.append(move)
    return moves


def _sources(
    name: str, part: Part, target: int, holders: Sequence[int],
    held: Sequence[Layout], sent: Sequence[int],
) -> Iterator[Move]:  # fmt: skip
    missing = [part.box] if part.box.elements else []
    # Its own first: what is there does not move. Then those that have sent least.
    for rank in sorted(holders, key=lambda one: (one != target, sent[one], one)):
        left: list[Box] = []
        for one in missing:
            found = one.meet(held[rank][name].box)
            if found is None:
                left.append(one)
            else:
                left += one.without(found)
                yield Move(name, rank, target, found, found.elements * part.item)
        missing = left
    if missing:
        raise MissingPart(
            f"no rank holds {sum(one.elements for one in missing)} elements of {name!r} that rank "
            f"{target} wants: give reshard the whole state of the old layout"
        )


def _require_same(name: str, wanted: Part, target: int, held: Part, rank: int) -> None:
    if (wanted.dtype, wanted.item, wanted.size) != (held.dtype, held.item, held.size):
        raise ForeignPart(
            f"{name!r} is {held.dtype} {held.size} on rank {rank}, and rank {target} wants "
            f"{wanted.dtype} {wanted.size}: a layout changes, types and shapes do not"
        )
