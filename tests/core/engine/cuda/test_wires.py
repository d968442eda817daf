"""Wires, the ways between devices besides the links: their records, attacks on them, agreement.

The devices are played by this CPU, as in test_on_a_device.py; their areas are real memory that a
test can write to, as the host of a real job could.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pytest

from sealring import _native
from sealring.core.engine.collective import DType, ReduceKind
from sealring.core.engine.cuda import ways, wires
from sealring.core.engine.cuda.wires import Wire
from sealring.core.schedule import ALGORITHMS, CALLED, Action, Algorithm, Operation, program_for
from sealring.errors import OutOfStep, PeerLost, PeerSilent, TamperedRecord, Unsupported
from sealring.limits import GPU_PAYLOAD_BYTES, HEADER_BYTES, TAG_BYTES, WIRE_PAYLOAD_BYTES
from tests.core.engine.attacker import WIRE_LANE, Tap, split
from tests.core.engine.cases import Case, each_program, tensors_of
from tests.core.engine.cuda.test_on_a_device import all_on_devices, check, check_sizes
from tests.core.engine.local_world import LocalWorld
from tests.core.engine.test_attacks import SUM, assert_all

FIRST = 5
"""The number of the first collective after an introduction."""
SLOT_BYTES = _native.wire_area_bytes(2, WIRE_PAYLOAD_BYTES) - _native.wire_area_bytes(
    1, WIRE_PAYLOAD_BYTES
)
RUN = 3 * GPU_PAYLOAD_BYTES // 4 + 100
"""The number of float32 elements that a slot holds as a run of several records."""


def wired(world: int, wire: Wire = Wire.PEER, **more: object) -> LocalWorld:
    local = LocalWorld(world, hosts=[0] * world, devices=all_on_devices(world), **more)  # type: ignore[arg-type]
    assert local.wire(wire) == [None] * world
    assert all(engine.wired for engine in local.engines)
    return local


@pytest.fixture(scope="module", params=[Wire.PEER, Wire.HOST, Wire.NCCL])
def four(request: pytest.FixtureRequest) -> Iterator[LocalWorld]:
    with wired(4, request.param, rekey_bytes=200_000) as local:
        yield local


@each_program
def test_every_program(four: LocalWorld, operation: Operation, algorithm: Algorithm) -> None:
    """Results equal the reference's bit for bit. With memory, programs that forward use the
    links."""
    check_sizes(four, operation, algorithm)


@pytest.mark.parametrize("algorithm", [Algorithm.DIRECT, Algorithm.HIERARCHICAL])
def test_runs_of_records(algorithm: Algorithm) -> None:
    with wired(3) as local:
        for elements in (RUN, 8 * RUN, 6 * GPU_PAYLOAD_BYTES):
            check(
                local,
                Case(Operation.ALL_REDUCE, algorithm, elements, DType.FLOAT32, ReduceKind.SUM),
            )


def test_eight_ranks() -> None:
    """Each has three keys with every peer; a device has room for them all."""
    with wired(8) as local:
        check(local, Case(Operation.ALL_REDUCE, Algorithm.HIERARCHICAL, 999, kind=ReduceKind.SUM))


def test_some_way_without_forwards_leads_everywhere() -> None:
    """A group chooses such a way once its GPUs are wired (Selection.without_forwards)."""
    for operation in CALLED:
        assert any(
            all(
                step.action is not Action.FORWARD
                for rank in range(4)
                for step in program_for(operation, algorithm, 4, rank).steps
            )
            for algorithm in ALGORITHMS[operation]
        ), operation


# ---- what travels where -------------------------------------------------------------------------


def test_over_the_link_goes_a_header_alone() -> None:
    tap = Tap()
    case = Case(Operation.ALL_REDUCE, Algorithm.HIERARCHICAL, 8 * RUN, kind=ReduceKind.SUM)
    with wired(2, middle={(0, 1): tap}) as local:
        tap.stream.clear()
        check(local, case)
        records = tap.records()
    data = [record for record in records if record.is_data]
    assert data
    assert all(record.fields["lane"] >= WIRE_LANE for record in data)
    assert all(len(record.raw) == HEADER_BYTES + TAG_BYTES for record in data)
    # A run's header names its first record; the next one of that key counts on from its last.
    for kind in (1, 2):
        counts = [record.fields["count"] for record in data if record.fields["kind"] == kind]
        assert counts == sorted(set(counts))


class Host:
    """Sees each header pass from rank 0 to rank 1, and may write to the slot that it names."""

    def __init__(self, change: Callable[[int], None] | None = None) -> None:
        self.change = change
        self.area = 0
        self.armed = False

    def __call__(self, data: bytes) -> bytes:
        if self.armed:
            for record in split(data):
                if record.is_data and self.change is not None:
                    slot = record.fields["lane"] - WIRE_LANE
                    self.change(self.area + slot * SLOT_BYTES)
                    self.armed = False
                    break
        return data


FIRST_PAYLOAD = HEADER_BYTES + TAG_BYTES
SECOND_RECORD = HEADER_BYTES + 2 * TAG_BYTES + GPU_PAYLOAD_BYTES


@pytest.mark.parametrize(
    "at",
    [
        0, 7, 63, 64, 79, FIRST_PAYLOAD, FIRST_PAYLOAD + GPU_PAYLOAD_BYTES - 1, SECOND_RECORD - 1,
        SECOND_RECORD, SECOND_RECORD + 66, SECOND_RECORD + FIRST_PAYLOAD + 5,
    ],
)  # fmt: skip
@pytest.mark.threat("C1", "C11")
def test_a_byte_changed_where_it_lies_is_seen(areas: dict[int, int], at: int) -> None:
    """The byte is in the header, tag or payload of the run's first record or of a later one."""

    def flip(slot: int) -> None:
        byte = ctypes.c_uint8.from_address(slot + at)
        byte.value ^= 0x40

    host = Host(flip)
    case = Case(Operation.ALL_REDUCE, Algorithm.HIERARCHICAL, 8 * RUN, kind=ReduceKind.SUM)
    with wired(2, middle={(0, 1): host}) as local:
        host.area = areas[id(local.engines[0]._native)]
        host.armed = True
        tensors = tensors_of(case, 2)
        errors = local.run([each.collective() for each in tensors], timeout_s=20)
    assert_all(errors, TamperedRecord, seen_by=1, about=0, first=FIRST)


@pytest.mark.threat("C9")
def test_what_was_fetched_can_be_changed_afterwards(areas: dict[int, int]) -> None:
    """The receiver reads a slot once: what the host writes there later has no effect."""
    with wired(2) as local:
        for seed in range(3):
            check(local, replace(SUM, algorithm=Algorithm.HIERARCHICAL), seed)
            for area in areas.values():
                ctypes.memset(area, seed, 4 * SLOT_BYTES)


@pytest.mark.threat("C10")
def test_a_header_that_names_no_slot() -> None:
    """A header's lane is authenticated: if a host changes it, the error comes before any slot is
    read."""

    def bend(data: bytes) -> bytes:
        for record in split(data):
            if record.is_data and record.fields["lane"] >= WIRE_LANE:
                at = data.index(record.raw) + 16
                return data[:at] + bytes([0xFF]) + data[at + 1 :]
        return data

    with wired(2, middle={(0, 1): bend}) as local:
        case = replace(SUM, algorithm=Algorithm.HIERARCHICAL)
        tensors = tensors_of(case, 2)
        errors = local.run([each.collective() for each in tensors], timeout_s=20)
    assert_all(errors, TamperedRecord, seen_by=1, about=0, first=FIRST)


# ---- who agrees ---------------------------------------------------------------------------------


def test_a_way_that_one_rank_lacks_is_taken_by_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """`auto` takes the next way. A way that was demanded is refused by all ranks, with the
    reason."""
    broken: list[object] = []
    real = ways.PeerMemory.open

    def open_areas(way: ways.PeerMemory, letters: Sequence[bytes]) -> None:
        if way._native is broken[0]:
            raise RuntimeError("CUDA failed in cuIpcOpenMemHandle: error 201")
        real(way, letters)

    monkeypatch.setattr(ways.PeerMemory, "open", open_areas)
    with LocalWorld(3, hosts=[0] * 3, devices=all_on_devices(3)) as local:
        broken.append(local.engines[1]._native)
        assert local.wire(Wire.AUTO) == [None] * 3
        assert [engine.wired for engine in local.engines] == [True] * 3
        check(local, replace(SUM, algorithm=Algorithm.HIERARCHICAL))
    with LocalWorld(3, hosts=[0] * 3, devices=all_on_devices(3)) as local:
        broken[0] = local.engines[1]._native
        for error in local.wire(Wire.PEER):
            assert isinstance(error, Unsupported)
            assert "SEALRING_GPU_WIRE=peer is not available: rank 1: CUDA failed in cuIpc" in str(
                error
            )
        check(local, SUM)  # the links are as good as before


def test_a_gpu_that_cannot_serve_is_everybodys_error() -> None:
    with LocalWorld(3, hosts=[0] * 3, devices={0: 1, 2: 1}) as local:
        problems = ["", "cuda:0 has compute capability 8.0", ""]
        exchanges = [
            engine.agree_on_wire(Wire.AUTO, problem)
            for engine, problem in zip(local.engines, problems, strict=True)
        ]
        local.devices = {}
        for _ in ("whether one objects", "why"):
            assert local.run([next(each) for each in exchanges]) == [None] * 3
        for each in exchanges:
            with pytest.raises(Unsupported, match=r"^rank 1: cuda:0 has compute capability 8\.0$"):
                next(each)


@pytest.mark.parametrize(("gpus", "shared"), [("abc", False), ("aba", True), ("aaa", True)])
def test_ranks_know_whether_they_share_a_gpu(gpus: str, shared: bool) -> None:
    with LocalWorld(3, hosts=[0] * 3, devices=all_on_devices(3)) as local:
        assert local.wire(Wire.AUTO, gpus) == [None] * 3
        assert [engine.shares_gpu for engine in local.engines] == [shared] * 3


def test_ranks_on_hosts_of_their_own() -> None:
    with LocalWorld(3, hosts=[0, 1, 2], devices=all_on_devices(3)) as local:
        assert local.wire(Wire.AUTO) == [None] * 3
        assert not any(engine.wired for engine in local.engines)
        check(local, SUM)


def test_ranks_on_several_hosts() -> None:
    with LocalWorld(3, hosts=[0, 0, 1], devices=all_on_devices(3)) as local:
        for error in local.wire(Wire.HOST):
            assert isinstance(error, Unsupported)
            assert "needs all ranks on one host" in str(error)
        assert local.wire(Wire.NCCL) == [None] * 3
        assert all(engine.wired for engine in local.engines)
        check(local, SUM)


def test_areas_have_a_slot_for_every_rank_and_exchanges_need_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(wires, "SLOTS", 8)
    with LocalWorld(9, hosts=[0] * 9, devices=all_on_devices(9)) as local:
        for error in local.wire(Wire.PEER):
            assert isinstance(error, Unsupported)
            assert "an area has 8 slots, and these are 9 ranks" in str(error)
        assert local.wire(Wire.NCCL) == [None] * 9
        check(local, Case(Operation.ALL_REDUCE, Algorithm.HIERARCHICAL, 999, kind=ReduceKind.SUM))


def test_a_rank_whose_tensor_is_on_the_cpu() -> None:
    """It is in its collective while the others introduce their GPUs: all learn which rank uses
    what."""
    with LocalWorld(2, hosts=[0, 0], devices={0: 1}) as local:
        exchanges = local.engines[0].agree_on_wire(Wire.AUTO)
        introduction = next(exchanges)
        local.devices = {}
        tensors = tensors_of(SUM, 2)
        errors = local.run([introduction, tensors[1].collective()], timeout_s=10)
        for error in errors:
            assert isinstance(error, OutOfStep)
            assert "introduction" in str(error)
            assert "all_reduce" in str(error)
            assert "has its tensor on a GPU" in str(error)


@pytest.mark.threat("C13")
def test_a_peer_that_leaves_without_fetching() -> None:
    """The peer says goodbye properly, but never frees the slots that the sender has filled."""
    with wired(2) as local:
        case = Case(Operation.BROADCAST, Algorithm.DIRECT, 64)
        tensors = tensors_of(case, 2)
        leaving = threading.Timer(0.3, local.engines[1].close)
        leaving.start()
        errors = local.run([tensors[0].collective(), None], timeout_s=20)
        leaving.join()
        assert isinstance(errors[0], PeerLost)
        assert errors[0].peer == 1


def test_out_of_step_shows_all_views_over_wires() -> None:
    """Behind several runs that no receiver takes, the alert still says what its rank saw."""
    large = Case(Operation.ALL_REDUCE, Algorithm.HIERARCHICAL, 8 * RUN, kind=ReduceKind.SUM)
    other = replace(large, kind=ReduceKind.MAX)
    with wired(3) as local:
        tensors = [tensors_of(case, 3)[rank] for rank, case in enumerate((large, large, other))]
        errors = local.run([each.collective() for each in tensors], timeout_s=20)
        for error in errors:
            assert isinstance(error, OutOfStep)
            for rank in range(3):
                assert f"rank {rank}: collective" in str(error), str(error)


@pytest.mark.threat("C13")
def test_a_peer_that_fetches_nothing_is_named() -> None:
    """The sender waits for free slots, and the error names the peer."""
    with wired(2) as local:
        case = Case(Operation.BROADCAST, Algorithm.DIRECT, 64)
        tensors = tensors_of(case, 2)
        errors = local.run([tensors[0].collective(), None], timeout_s=1)
        assert isinstance(errors[0], PeerSilent)
        assert "the peer takes nothing" in str(errors[0])
        assert errors[0].peer == 1
