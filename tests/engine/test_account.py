"""What the engine counts: rekeys, and waiting that ended in a failure."""

from __future__ import annotations

import numpy as np

from sealring.engine.cpu import Collective
from sealring.engine.datatypes import DType, ReduceKind
from sealring.errors import PeerSilent
from sealring.schedule import Algorithm, Operation
from tests.engine.local_world import LocalWorld, slot


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
