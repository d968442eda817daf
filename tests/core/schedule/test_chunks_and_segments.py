from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sealring.core.schedule import chunks, segment_bytes

itemsizes = st.sampled_from([1, 2, 4, 8, 16])


@given(st.integers(0, 10**7), st.integers(1, 300), itemsizes)
def test_chunks_tile_the_tensor_on_element_boundaries(elements, world, itemsize) -> None:
    pieces = chunks(elements, world, itemsize)
    assert len(pieces) == world
    end = 0
    for offset, length in pieces:
        assert offset == end
        assert offset % itemsize == length % itemsize == 0
        end = offset + length
    assert end == elements * itemsize


@given(st.integers(0, 10**7), st.integers(1, 300), itemsizes)
def test_chunks_are_aligned_and_nearly_equal_where_there_is_enough(
    elements, world, itemsize
) -> None:
    pieces = chunks(elements, world, itemsize)
    equal_share = elements * itemsize / world
    slack = 64 if equal_share >= 64 else itemsize
    assert all(offset % slack == 0 or offset == elements * itemsize for offset, _ in pieces)
    assert max(length for _, length in pieces) < equal_share + 2 * slack


def test_small_tensors_leave_some_ranks_without_a_chunk() -> None:
    assert chunks(3, 5, 4) == [(0, 4), (4, 4), (8, 4), (12, 0), (12, 0)]
    assert chunks(0, 2, 8) == [(0, 0), (0, 0)]


@given(st.integers(0, 10**10), st.integers(64, 1 << 20))
def test_segments_fit_records_and_whole_cache_lines(longest, record_bytes) -> None:
    size = segment_bytes(longest, record_bytes)
    assert size % 64 == 0
    assert 0 < size <= record_bytes
    assert size >= min(16 << 10, record_bytes // 64 * 64)


@pytest.mark.parametrize(
    ("longest", "size"),
    [
        (0, 16 << 10),
        (40 << 10, 16 << 10),
        (64 << 10, 16 << 10),
        (256 << 10, 64 << 10),
        ((512 << 10) + 4, 104896),  # five equal segments, instead of four and a small rest
        (64 << 20, 128 << 10),
    ],
)
def test_small_slots_are_cut_finer_so_that_they_still_overlap(longest, size) -> None:
    assert segment_bytes(longest, 128 << 10) == size


def test_a_record_must_hold_a_cache_line() -> None:
    with pytest.raises(ValueError, match=r"^a record of 63 bytes holds no 64-byte line$"):
        segment_bytes(1000, 63)
