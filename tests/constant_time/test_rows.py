"""The GPU's code that makes rows of opened bytes, run on the CPU."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from sealring.core.engine.cuda.chunks import ROW
from sealring.core.engine.cuda.compiler import ROWS
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


def test_a_sample_of_more_numbers_than_the_row_is_cut(ptx: str) -> None:
    assert taken(ptx, (0, 40, 2, 0), 3, "int64") == expected((0, 6, 2, 0), 3, "int64")


@pytest.mark.parametrize("dtype", ["uint8", "int16", "int64"])
def test_long_rows_have_several_blocks(ptx: str, dtype: str) -> None:
    """The last block of each row is not full, and the last row ends with the tensor."""
    length, size = 4096 + 5, np.dtype(dtype).itemsize
    rows: list[Row] = [(1, 4001, 1, 9), (3, 0, 1, -1)]
    machine = Machine(ptx, 2 * len(rows))
    table, total = np.array(rows, ROW).tobytes(), len(rows) * length * size
    for at, data in ((_PLAIN, CONTENT), (_ROWS, table), (_OUT, b"\xaa" * (total + 16))):
        machine.memory.bytes[at : at + len(data)] = data
    machine.launch("take_rows", struct.pack("<QQQQII", _PLAIN, _ROWS, _OUT, length, size, 2))
    found = bytes(machine.memory.bytes[_OUT : _OUT + total + 16])
    assert found[total:] == b"\xaa" * 16, "written past the last row"
    wanted = [number for row in rows for number in expected(row, length, "int64")]
    made = np.frombuffer(found[:total], dtype)
    assert made.tolist() == np.array(wanted, np.int64).astype(dtype).tolist()
