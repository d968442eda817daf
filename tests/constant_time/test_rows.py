"""The GPU's code that makes rows of opened bytes, run on the CPU."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from sealring.engine.cuda.chunks import ROW
from sealring.engine.cuda.compiler import ROWS
from tests.constant_time import kernels
from tests.constant_time.ptx import Machine

pytestmark = pytest.mark.skipif(bool(kernels.missing()), reason=kernels.missing() or "-")

_PLAIN, _ROWS, _OUT = 0x1000, 0x8000, 0x10000
CONTENT = bytes(i * 37 + i // 7 & 255 for i in range(4096))


@pytest.fixture(scope="module")
def ptx(tmp_path_factory: pytest.TempPathFactory) -> str:
    return kernels.compiled(tmp_path_factory.mktemp("ptx"), main=ROWS)


Row = tuple[int, int, int, int]


def taken(ptx: str, row: Row, length: int, dtype: str) -> list[int]:
    """The row's numbers, after a look at the bytes behind them."""
    machine, size = Machine(ptx, 1), np.dtype(dtype).itemsize
    table = np.array([row], ROW).tobytes()
    total = length * size
    for at, data in ((_PLAIN, CONTENT), (_ROWS, table), (_OUT, b"\xaa" * (total + 16))):
        machine.memory.bytes[at : at + len(data)] = data
    blocks = -(-length // 4096)
    argument = struct.pack("<QQQQII", _PLAIN, _ROWS, _OUT, length, size, blocks)
    machine.launch("take_rows", argument)
    found = bytes(machine.memory.bytes[_OUT : _OUT + total + 16])
    assert found[total:] == b"\xaa" * 16, "written past the row"
    return [int(number) for number in np.frombuffer(found[:total], dtype)]


def expected(row: Row, length: int, dtype: str) -> list[int]:
    start, size, item, pad = row
    kind = np.dtype(f"<{'i' if item < 0 else 'u'}{abs(item)}")
    numbers = np.frombuffer(CONTENT[start : start + size], kind).astype(dtype)
    return [int(number) for number in numbers] + [pad] * (length - len(numbers))


@pytest.mark.parametrize("item", [1, 2, 4, 8, -1, -2, -4, -8])
@pytest.mark.parametrize("start", [0, 3, 64])
def test_numbers_become_those_of_the_tensor(ptx: str, item: int, start: int) -> None:
    row = (start, 37 * abs(item), item, 0)
    assert taken(ptx, row, 37, "int64") == expected(row, 37, "int64")


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_numbers_of_the_same_size_keep_their_bits(ptx: str, size: int) -> None:
    row = (5, 21 * size, size, 0)
    assert taken(ptx, row, 21, f"uint{8 * size}") == expected(row, 21, f"uint{8 * size}")


def test_a_short_row_is_filled_up(ptx: str) -> None:
    row = (10, 6, 2, -7)
    assert taken(ptx, row, 140, "int64") == expected(row, 140, "int64")
