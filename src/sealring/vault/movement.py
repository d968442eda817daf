"""Plans which rank sends which elements to which rank when a state changes its layout.

A plan consists of boxes and touches no data. A box is a part of a tensor, given by offsets and
sizes. Every rank says which boxes it holds and which it wants, and computes the same plan from all
answers. A rank receives each element once that it wants and does not hold. If several ranks hold an
element, the one that has sent least so far sends it.
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
        """The box of the elements that both boxes have; None if there are none."""
        starts = [max(a, b) for a, b in zip(self.offsets, other.offsets, strict=True)]
        ends = [min(a, b) for a, b in zip(self._ends(), other._ends(), strict=True)]
        sizes = [end - start for start, end in zip(starts, ends, strict=True)]
        return Box(starts, sizes) if all(size > 0 for size in sizes) else None

    def lies_in(self, size: Sequence[int]) -> bool:
        """Whether the box lies inside a tensor of this size."""
        return len(self.offsets) == len(self.sizes) == len(size) and all(
            offset + length <= whole
            for offset, length, whole in zip(self.offsets, self.sizes, size, strict=True)
        )

    def without(self, inner: Box) -> Iterator[Box]:
        """This box without `inner`, as boxes that do not overlap. `inner` lies in this box."""
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
    """The part of one entry that a rank holds or wants."""

    dtype: str | None
    """None for an entry that is not a tensor; its elements are then the bytes of its pickle."""
    item: int
    """The bytes of one element."""
    size: list[int]
    """The shape of the whole tensor."""
    box: Box


@dataclass(frozen=True, slots=True)
class Move:
    name: str
    source: int
    target: int
    box: Box
    bytes: int


Layout = Mapping[str, Part]
"""All parts that one rank holds, or all that it wants, by the names of their entries."""


LARGEST_ENTRIES: Final = 1 << 30
"""The most bytes of all of a rank's entries that are not tensors. Their holder says how long they
are, and may lie."""


def check_layout(rank: int, layout: Layout) -> None:
    """Raises ForeignPart for a layout that no rank can have: another rank sent it and may lie."""
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
    """The part for a whole entry that is not a tensor, with a pickle of this length."""
    return Part(None, 1, [length], Box([0], [length]))


def digest_of(moves: Sequence[Move]) -> bytes:
    """The digest of a plan. It differs between ranks that were told different layouts."""
    return hashlib.sha256(repr(moves).encode()).digest()


def plan(held: Sequence[Layout], wanted: Sequence[Layout]) -> list[Move]:
    """All moves, in the same order on every rank. A rank's moves to itself are included."""
    sent = [0] * len(held)
    moves: list[Move] = []
    for target, layout in enumerate(wanted):
        for name in sorted(layout):
            part = layout[name]
            holders = [rank for rank, one in enumerate(held) if name in one]
            if part.dtype is None:  # ranks may hold different values: one rank sends all of it
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
    # First the target's own elements, which need no transfer; then ranks that have sent least.
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
