"""The engine's counts: rekeys, waits that ended in a failure, and the time of each activity."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sealring import _native
from sealring.core.engine.collective import Collective, DType, ReduceKind
from sealring.core.schedule import Algorithm, Operation
from sealring.errors import PeerSilent
from tests.core.engine.local_world import LocalWorld, slot


def all_reduce(array: np.ndarray[tuple[int], np.dtype[np.float32]]) -> Collective:
    return Collective(
        Operation.ALL_REDUCE, Algorithm.DIRECT, [slot(array)], array.nbytes, DType.FLOAT32,
        ReduceKind.SUM,
    )  # fmt: skip


def test_every_record_but_a_keys_first_is_a_rekey_where_one_byte_is_the_limit() -> None:
    arrays = [np.ones(16, np.float32) for _ in range(3)]
    with LocalWorld(3, rekey_bytes=1) as world:
        for _ in range(4):
            assert world.run([all_reduce(array) for array in arrays]) == [None] * 3
        for rank, engine in enumerate(world.engines):
            account = engine.account()
            assert len(account["rekeys"]) == 3
            used = sum(count > 0 for count in account["rekeys"])
            assert used > 0, rank
            assert sum(account["rekeys"]) == account["sealed_records"] - used
            assert engine.sealed_and_opened() == (account["sealed_bytes"], account["opened_bytes"])
            assert account["sealed_bytes"] > 0


def test_the_wait_for_a_silent_peer_is_in_the_account() -> None:
    array = np.ones(16, np.float32)
    with LocalWorld(2) as world:
        (error, _) = world.run([all_reduce(array), None], timeout_s=0.3)
        assert type(error) is PeerSilent
        assert world.engines[0].account()["waited_s"][1] > 0


def test_the_parts_of_a_runs_time_add_up_to_it() -> None:
    arrays = [np.ones(1 << 18, np.float32) for _ in range(2)]
    with LocalWorld(2) as world:
        assert world.run([all_reduce(array) for array in arrays]) == [None] * 2
        for engine in world.engines:
            account: Any = engine.account()
            parts = [
                account[f"{name}_s"] for name in ("seal", "open", "reduce", "transfer", "wait")
            ]
            assert sum(parts) == pytest.approx(account["run_s"], abs=1e-8)
            assert min(parts) >= 0
            assert account["seal_s"] > 0
            assert account["open_s"] > 0
            assert account["reduce_s"] > 0


def test_a_cipher_opens_in_the_order_it_sealed_and_refuses_what_was_changed() -> None:
    plain, sealed, opened = (np.full(size, 7, np.uint8) for size in (100, 232, 100))
    cipher = _native.Cipher(bytes(range(32)))
    first, second = sealed.ctypes.data, sealed.ctypes.data + 116
    cipher.seal(plain.ctypes.data, 100, first)
    cipher.seal(plain.ctypes.data, 100, second)
    assert not np.array_equal(sealed[:100], sealed[116:216])
    assert not cipher.open(second, 100, opened.ctypes.data)
    assert cipher.open(first, 100, opened.ctypes.data)
    assert np.array_equal(opened, plain)
    sealed[120] ^= 1
    assert not cipher.open(second, 100, opened.ctypes.data)
    sealed[120] ^= 1
    assert cipher.open(second, 100, opened.ctypes.data)
