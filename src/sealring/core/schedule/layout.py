"""Cuts a tensor into chunks for the ranks, and chunks into segments of one record each.

It uses only integers, so that every rank computes the same cuts from the same sizes.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final

from sealring import _native
from sealring.errors import Unsupported

CACHE_LINE_BYTES: Final = 64
"""A multiple of every element's size, so that no element is cut in two."""
MIN_SEGMENT_BYTES: Final = 16 << 10
"""Below this size, a record's fixed cost (header, tag, system call) exceeds the gain of overlap."""
MIN_SEGMENTS: Final = 4
"""With at least this many records, unless they get too small, sealing and sending overlap."""


def chunks(
    elements: int, world: int, itemsize: int, align_bytes: int = CACHE_LINE_BYTES
) -> list[tuple[int, int]]:
    """(offset, length) in bytes of each rank's chunk, nearly equal; some may be empty.

    Chunks start at multiples of `align_bytes` unless the tensor is too small to give every rank
    that much; then they are cut between elements.
    """
    aligned = align_bytes % itemsize == 0 and elements * itemsize >= world * align_bytes
    quantum = align_bytes if aligned else itemsize
    total = elements * itemsize
    quanta, longer = divmod(-(-total // quantum), world)
    starts = [min(total, (rank * quanta + min(rank, longer)) * quantum) for rank in range(world)]
    ends = [*starts[1:], total]
    return [(start, end - start) for start, end in zip(starts, ends, strict=True)]


@lru_cache(maxsize=256)
def exchanged_bytes(most_records: int, half_bytes: int, longest: int) -> int:
    """The most plaintext per record, up to `longest`, so that all records fit into half the memory.

    Raises Unsupported if they cannot.
    """
    payload = min(longest, half_bytes // most_records)
    while _native.wire_area_bytes(most_records, payload) > half_bytes:
        payload -= CACHE_LINE_BYTES
    if payload < CACHE_LINE_BYTES:
        raise Unsupported(f"{most_records} records do not fit into {half_bytes} bytes")
    return payload // CACHE_LINE_BYTES * CACHE_LINE_BYTES


@lru_cache(maxsize=256)  # called in every collective, mostly with the same values
def segment_bytes(longest_slot_bytes: int | None, record_bytes: int) -> int:
    """Plaintext per record for a collective whose longest slot has `longest_slot_bytes` bytes.

    Segments get equal lengths, so that the last one is not a short rest. If ranks do not know each
    other's longest slot, it is None, and a segment is as long as a record may be.
    """
    largest = record_bytes // CACHE_LINE_BYTES * CACHE_LINE_BYTES
    if largest == 0:
        raise ValueError(f"a record of {record_bytes} bytes holds no {CACHE_LINE_BYTES}-byte line")
    if longest_slot_bytes is None:
        return largest
    segments = max(MIN_SEGMENTS, -(-longest_slot_bytes // largest))
    lines = -(-longest_slot_bytes // (segments * CACHE_LINE_BYTES))
    return min(largest, max(MIN_SEGMENT_BYTES, lines * CACHE_LINE_BYTES))
