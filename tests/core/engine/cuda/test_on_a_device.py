"""Collectives on a device: the engine's whole path for GPUs, with this CPU as the device.

It runs the GPU's own arithmetic on ordinary memory and answers late, as a GPU does. The tests check
the work given to a device, the records that leave it, and that a forged record is refused. The
kernels themselves are tested on a GPU (tests/gpu).
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from sealring import _native, _stand_ins
from sealring.core.engine.collective import DType, ReduceKind, supported_kinds
from sealring.core.schedule import REDUCING, Action, Algorithm, Operation, program_for
from sealring.errors import GroupClosed, OutOfStep, TamperedRecord
from sealring.limits import HEADER_BYTES, TAG_BYTES
from tests.core.engine.attacker import Flip, Tap
from tests.core.engine.cases import PROGRAMS, Case, each_program, expected, tensors_of
from tests.core.engine.local_world import LocalWorld
from tests.core.engine.test_attacks import SUM, assert_all, attack

RECORD_BYTES = 256
GPU_LANE = 1


def all_on_devices(world: int, lag: int = 3) -> dict[int, int]:
    return {rank: lag + rank for rank in range(world)}


def check(local: LocalWorld, case: Case, seed: int = 0) -> None:
    tensors = tensors_of(case, local.world, seed)
    errors = local.run([each.collective() for each in tensors], timeout_s=30)
    assert errors == [None] * local.world
    right = expected(case, local.world, seed, local.record_bytes, local.engines[0].topology)
    for rank, each in enumerate(tensors):
        assert each.bits() == right[rank], f"{case} on rank {rank}"


def check_sizes(local: LocalWorld, operation: Operation, algorithm: Algorithm) -> None:
    """Checks sizes: 0, fewer elements than ranks, one segment, and many."""
    kind = ReduceKind.SUM if operation in REDUCING else ReduceKind.NONE
    for elements in (0, 1, 3, 65, 2000):
        check(local, Case(operation, algorithm, elements, DType.FLOAT32, kind), seed=elements)


@pytest.fixture(scope="module", params=[("tcp", 0), ("shm", 5)])
def four(request: pytest.FixtureRequest) -> Iterator[LocalWorld]:
    transport, lag = request.param
    with LocalWorld(
        4, transport, RECORD_BYTES, rekey_bytes=5_000, hosts=[0, 0, 1, 1],
        devices=all_on_devices(4, lag),
    ) as local:  # fmt: skip
        yield local


@each_program
def test_every_program(four: LocalWorld, operation: Operation, algorithm: Algorithm) -> None:
    """Results equal the reference's bit for bit, over many segments and generations of keys."""
    check_sizes(four, operation, algorithm)


@pytest.mark.parametrize("dtype", [DType.FLOAT16, DType.BFLOAT16, DType.INT32, DType.COMPLEX64])
def test_every_reduction(four: LocalWorld, dtype: DType) -> None:
    for kind in sorted(supported_kinds(dtype)):
        check(four, Case(Operation.ALL_REDUCE, Algorithm.RING, 130, dtype, kind))


# ---- what a device is given to do ---------------------------------------------------------------

WORK = {
    Action.SEND: "seal",
    Action.PUBLISH: "seal",
    Action.RECEIVE: "open",
    Action.RECEIVE_REDUCE: "open_reduce",
    Action.COPY: "copy",
    Action.REDUCE: "reduce",
    Action.AVERAGE: "average",
    Action.PREMULTIPLY: "premultiply",
}


@pytest.mark.parametrize("kind", [ReduceKind.SUM, ReduceKind.AVG, ReduceKind.PREMUL_SUM])
@pytest.mark.parametrize(
    ("operation", "algorithm"),
    [each for each in PROGRAMS if each[0] in REDUCING],
    ids=str,
)
def test_a_device_gets_one_piece_of_work_per_step(
    operation: Operation, algorithm: Algorithm, kind: ReduceKind
) -> None:
    """With one segment, a forward costs the device nothing; any other step is one kernel or
    copy."""
    with LocalWorld(4, devices=all_on_devices(4)) as local:
        check(local, Case(operation, algorithm, 64, DType.FLOAT32, kind))
        for rank, engine in enumerate(local.engines):
            program = program_for(
                operation,
                algorithm,
                4,
                rank,
                average=kind is ReduceKind.AVG,
                premultiply=kind is ReduceKind.PREMUL_SUM,
                topology=engine.topology,
            )
            must_be = [WORK[step.action] for step in program.steps if step.action in WORK]
            done = [line.split()[0] for line in local.probes[rank].log]
            assert sorted(done) == sorted(must_be)


# ---- what leaves it -----------------------------------------------------------------------------


@pytest.mark.threat("C18")
def test_records_are_the_gpus_own() -> None:
    """They are in lane 1, sealed by ChaCha20-Poly1305 under their own key, and counted without a
    gap."""
    tap = Tap()
    with LocalWorld(2, middle={(0, 1): tap}, devices=all_on_devices(2)) as local:
        check(local, SUM)
        key = _native.gpu_key(bytes(local.key("pair", 0, 1)))
        records = [record for record in tap.data_records() if record.fields["kind"] == 1]
        assert [record.fields["lane"] for record in records] == [GPU_LANE] * len(records)
        assert [record.fields["count"] for record in records] == list(range(len(records)))
        first = records[0]
        header = first.raw[:HEADER_BYTES]
        nonce = GPU_LANE.to_bytes(4, "little") + bytes(8)
        payload = first.raw[HEADER_BYTES + TAG_BYTES :]
        plain = _stand_ins.gpu_aead_open(key, nonce, header + local.context, payload)
        assert plain is not None
        assert len(plain) == first.fields["length"]


# ---- forgeries ----------------------------------------------------------------------------------

LENGTH_OF_A_RECORD = HEADER_BYTES + 2 * TAG_BYTES + 24  # SUM's chunks are 24 bytes in a world of 2


@pytest.mark.parametrize("at", [0, 3, 5, 17, 63, 64, 79, 80, 90, 103, 104, 119])
@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.threat("C1")
def test_a_changed_byte_is_seen(which: int, at: int) -> None:
    """The byte is in a pair's record or in a published one. Neither record is used."""
    errors = attack(
        2,
        {(0, 1): Flip(which * LENGTH_OF_A_RECORD + at, 0x40)},
        timeout_s=20.0,
        devices=all_on_devices(2),
    )
    assert_all(errors, TamperedRecord, seen_by=1, about=0)


@pytest.mark.threat("C2")
def test_nothing_made_of_a_forged_record_leaves_the_rank() -> None:
    """A sum without the forged part would be authentic, and wrong: it must not be sent on."""
    tap = Tap()
    payload = HEADER_BYTES + TAG_BYTES
    errors = attack(
        3,
        {(0, 1): Flip(payload, 1), (1, 2): tap},
        rounds=1,
        timeout_s=20.0,
        devices=all_on_devices(3, lag=50),
    )
    assert_all(errors, TamperedRecord, seen_by=1, about=0)
    # Rank 1 sends its own chunk first; what it would send next has rank 0's forged part in it.
    assert len([record for record in tap.data_records() if record.fields["kind"] == 1]) == 1


def test_a_device_that_fails_ends_the_group_everywhere() -> None:
    """The ranks that wait for it learn of the failure."""
    with LocalWorld(3, devices=all_on_devices(3)) as local:
        tensors = tensors_of(SUM, 3)
        collectives = [each.collective() for each in tensors]
        local.probes[1].fail()
        errors = local.run(collectives, timeout_s=20)
        for error in errors:
            assert isinstance(error, GroupClosed), errors
            assert "the GPU of rank 1 failed" in str(error)


# ---- not everybody has one ----------------------------------------------------------------------


@pytest.mark.parametrize("on_gpu", [0, 1])
def test_tensors_on_different_kinds_of_device(on_gpu: int) -> None:
    with LocalWorld(2, devices={on_gpu: 1}) as local:
        tensors = tensors_of(SUM, 2)
        errors = local.run([each.collective() for each in tensors], timeout_s=10)
        for error in errors:
            assert isinstance(error, OutOfStep)
            assert f"rank {on_gpu} has its tensor on a GPU" in str(error) or (
                f"rank {on_gpu} on a GPU" in str(error)
            )


def test_both_kinds_of_device_in_turns() -> None:
    """A group serves CPU tensors and a device's, call by call, under keys of their own."""
    with LocalWorld(3, devices=all_on_devices(3)) as local:
        for turn in range(4):
            devices, local.devices = local.devices, {} if turn % 2 else all_on_devices(3)
            check(local, SUM, seed=turn)
            local.devices = devices or all_on_devices(3)
