"""A GPU as the engine drives it, on a machine without a GPU: this CPU plays the driver.

"launched": the GPU gets a kernel per piece of work, while the host waits. "prelaunched": its
kernels are launched ahead, and read their instructions from memory, so a stream can wait for them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from sealring.core.engine.collective import DType, ReduceKind, supported_kinds
from sealring.core.engine.cuda.wires import Wire
from sealring.core.engine.streams import StreamCaller
from sealring.core.schedule import Algorithm, Operation
from sealring.errors import GroupClosed, OutOfStep, PeerSilent, TamperedRecord
from sealring.limits import GPU_PAYLOAD_BYTES, HEADER_BYTES, TAG_BYTES
from tests.core.engine.attacker import Flip
from tests.core.engine.cases import Case, each_program, tensors_of
from tests.core.engine.cuda.test_on_a_device import all_on_devices, check, check_sizes
from tests.core.engine.host_streams import HostStreams
from tests.core.engine.local_world import LocalWorld
from tests.core.engine.test_attacks import SUM, assert_all

HOW = ("launched", "prelaunched")
RECORD_BYTES = 256


def driven(how: Any, world: int, **more: Any) -> LocalWorld:
    devices = all_on_devices(world)
    return LocalWorld(world, hosts=[0] * world, devices=devices, driver=how, **more)


@pytest.fixture(
    scope="module", params=[(how, wire) for how in HOW for wire in ("links", "peer", "nccl")]
)
def four(request: pytest.FixtureRequest) -> Iterator[LocalWorld]:
    """Keys are replaced all the time."""
    how, wire = request.param
    with driven(how, 4, record_bytes=RECORD_BYTES, rekey_bytes=20_000) as local:
        assert local.wire(Wire(wire)) == [None] * 4
        assert all(engine.wired == (wire != "links") for engine in local.engines)
        yield local


@each_program
def test_every_program(four: LocalWorld, operation: Operation, algorithm: Algorithm) -> None:
    check_sizes(four, operation, algorithm)


@pytest.mark.parametrize("dtype", [DType.BFLOAT16, DType.INT32, DType.COMPLEX64])
def test_every_reduction(four: LocalWorld, dtype: DType) -> None:
    for kind in sorted(supported_kinds(dtype)):
        check(four, Case(Operation.ALL_REDUCE, Algorithm.RING, 130, dtype, kind))


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("wire", ["links", "host", "peer", "nccl"])
def test_runs_of_several_records_and_more_than_a_queue_holds(how: str, wire: str) -> None:
    with driven(how, 2, record_bytes=GPU_PAYLOAD_BYTES if wire != "links" else 1024) as local:
        assert local.wire(Wire(wire)) == [None] * 2
        elements = GPU_PAYLOAD_BYTES if wire != "links" else 70_000
        check(local, replace(SUM, algorithm=Algorithm.DIRECT, elements=elements))


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("rekey_bytes", [1, 300, 1000, 5000])
def test_whenever_keys_are_replaced(how: str, rekey_bytes: int) -> None:
    with driven(how, 3, record_bytes=RECORD_BYTES, rekey_bytes=rekey_bytes) as local:
        for turn in range(6):
            check(local, replace(SUM, elements=50 + 90 * turn, kind=ReduceKind.AVG))


@pytest.mark.parametrize("how", HOW)
def test_one_rank_alone(how: str) -> None:
    with driven(how, 1) as local:
        for kind in (ReduceKind.SUM, ReduceKind.AVG):
            check(local, replace(SUM, elements=100, kind=kind))


def poisoned(tensors: Any) -> bool:
    return set(b"".join(tensors.bits())) == {0xFF}


def test_a_forged_record_leaves_no_result() -> None:
    """Streams go on, and find values that no caller mistakes for a result."""
    with driven("prelaunched", 2, middle={(0, 1): Flip(HEADER_BYTES + TAG_BYTES + 5, 1)}) as local:
        tensors = tensors_of(SUM, 2)
        errors = local.run([each.collective() for each in tensors])
        assert_all(errors, TamperedRecord, seen_by=1, about=0)
        assert all(poisoned(each) for each in tensors)
        again = tensors_of(SUM, 2)
        errors = local.run([each.collective() for each in again])
        assert_all(errors, TamperedRecord, seen_by=1, about=0)
        assert all(poisoned(each) for each in again)


def test_one_that_is_not_run_ends_the_group() -> None:
    """Its results and the keys on the GPU are lost, so nothing may be sealed after that."""
    with driven("prelaunched", 2) as local:
        tensors, again = tensors_of(SUM, 2), tensors_of(SUM, 2)
        before = tensors[1].bits()
        engine = local.engines[0]
        launched = engine.submit(
            replace(tensors[0].collective(), ready=0),
            StreamCaller(HostStreams(engine.prelaunch_stream)),
        )
        assert launched.streams_wait
        engine.release_streams(launched)
        assert poisoned(tensors[0])
        assert tensors[1].bits() == before
        errors = local.run([each.collective() for each in again], timeout_s=10)
        for error in errors:
            assert isinstance(error, GroupClosed)
            assert "a collective on rank 0 was not run" in str(error)


def test_ranks_that_disagree_and_one_that_does_not_come() -> None:
    with driven("prelaunched", 2) as local:
        one, other = tensors_of(SUM, 2)[0], tensors_of(replace(SUM, elements=77), 2)[1]
        errors = local.run([one.collective(), other.collective()])
        assert all(isinstance(error, OutOfStep) for error in errors)
        assert poisoned(one)
        assert poisoned(other)
    with driven("prelaunched", 2) as local:
        alone = tensors_of(SUM, 2)[0]
        (error, _) = local.run([alone.collective(), None], timeout_s=0.5)
        assert isinstance(error, PeerSilent)
        assert poisoned(alone)


def test_the_devices_own_memory_is_counted() -> None:
    """The memory it opens records in, and the memory through which the driver instructs it."""
    held = {}
    for how in (None, *HOW):
        with driven(how, 2) as local:
            check(local, SUM)
            held[how] = local.engines[0].account()["memory_bytes"]
    assert held["launched"] > held[None] + 16 * GPU_PAYLOAD_BYTES
    assert held["prelaunched"] > held["launched"]
