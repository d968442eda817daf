"""GPUs that exchange records by NCCL; this CPU plays the driver and NCCL.

All of sealring's own code runs: the rounds, the channels with their communicators and streams.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from sealring.core.engine.collective import ReduceKind
from sealring.core.engine.cuda import ways
from sealring.core.engine.cuda.wires import Wire
from sealring.core.schedule import Algorithm, Operation
from sealring.errors import (
    GroupClosed,
    OutOfStep,
    PeerLost,
    PeerSilent,
    TamperedRecord,
    Unsupported,
)
from sealring.limits import GPU_PAYLOAD_BYTES, HEADER_BYTES, TAG_BYTES
from tests.core.engine.attacker import WIRE_LANE, Tap
from tests.core.engine.cases import Case, each_program, tensors_of
from tests.core.engine.cuda.test_by_the_driver import HOW, driven, poisoned
from tests.core.engine.cuda.test_on_a_device import all_on_devices, check, check_sizes
from tests.core.engine.local_world import LocalWorld
from tests.core.engine.test_attacks import assert_all

NCCL_ID_BYTES = 128
SUM = Case(Operation.ALL_REDUCE, Algorithm.HIERARCHICAL, 999, kind=ReduceKind.SUM)
each_how = pytest.mark.parametrize("how", HOW)


def exchanging(how: Any, world: int, **more: Any) -> LocalWorld:
    local = driven(how, world, **more)
    assert local.wire(Wire.NCCL) == [None] * world
    assert all(engine.exchanges for engine in local.engines)
    return local


@each_how
def test_sixteen_ranks(how: str) -> None:
    with exchanging(how, 16) as local:
        for elements in (0, 5, 999, 60_000):
            check(local, replace(SUM, elements=elements))
        check(local, Case(Operation.ALL_TO_ALL, Algorithm.DIRECT, 100))


@each_how
@pytest.mark.parametrize("algorithm", [Algorithm.DIRECT, Algorithm.HIERARCHICAL])
def test_many_rounds_of_runs_of_records(how: str, algorithm: Algorithm) -> None:
    with exchanging(how, 3, rekey_bytes=3 * GPU_PAYLOAD_BYTES) as local:
        for elements in (GPU_PAYLOAD_BYTES // 4 + 3, 5 * GPU_PAYLOAD_BYTES):
            check(local, replace(SUM, algorithm=algorithm, elements=elements))


@each_how
def test_one_collective_after_the_other(how: str) -> None:
    """The numbers of exchanges continue from one collective to the next."""
    with exchanging(how, 2) as local:
        for turn in range(5):
            check(local, replace(SUM, elements=1 + 3000 * turn), seed=turn)


@each_how
@pytest.mark.parametrize("algorithm", [Algorithm.RING, Algorithm.TREE])
def test_what_ranks_pass_on_is_exchanged_too(how: str, algorithm: Algorithm) -> None:
    """It is sealed again for the next rank, and only a header goes over the link."""
    tap = Tap()
    with exchanging(how, 5, middle={(0, 1): tap}) as local:
        tap.stream.clear()
        for elements in (0, 999, 60_000):
            check(local, replace(SUM, algorithm=algorithm, elements=elements))
        data = [record for record in tap.records() if record.is_data]
    assert data
    assert {record.fields["lane"] for record in data} == {WIRE_LANE}
    assert {len(record.raw) for record in data} == {HEADER_BYTES + TAG_BYTES}


# ---- channels -----------------------------------------------------------------------------------


@each_how
@pytest.mark.parametrize(("world", "channels"), [(2, 2), (3, 6), (4, 6), (5, 6), (8, 6)])
def test_a_channel_for_each_peer_and_direction_up_to_six(
    how: str, world: int, channels: int
) -> None:
    """Nonces and numbers are right on all of them, over several rounds and collectives."""
    with exchanging(how, world, rekey_bytes=3 * GPU_PAYLOAD_BYTES) as local:
        assert len(local.engines[0]._native.new_meeting_id()) // NCCL_ID_BYTES == channels
        for elements in (0, 7, 3 * GPU_PAYLOAD_BYTES):
            check(local, replace(SUM, algorithm=Algorithm.DIRECT, elements=elements))
        check(local, Case(Operation.BROADCAST, Algorithm.DIRECT, 5000, root=world - 1))
        check(local, Case(Operation.ALL_TO_ALL, Algorithm.DIRECT, 5000))


@each_how
def test_in_a_small_group_what_leaves_does_not_wait_for_what_comes(how: str) -> None:
    """The other rank does not come, so no header of its record arrives."""
    from sealring import _stand_ins

    with exchanging(how, 2) as local, ThreadPoolExecutor(1) as pool:
        before = _stand_ins.messages_exchanged()
        one = tensors_of(replace(SUM, algorithm=Algorithm.DIRECT), 2)[0]
        running = pool.submit(local.run, [one.collective(), None], 60.0)
        while _stand_ins.messages_exchanged() == before:  # pytest's timeout ends it
            assert not running.done()
            time.sleep(0.01)
        local.engines[0].interrupt()
        assert isinstance(running.result()[0], GroupClosed)


def test_in_a_larger_group_an_exchange_waits_for_all_its_headers() -> None:
    """Only rank 2 makes the call. Its records to 0 and 4 share no channel with records to rank 2;
    its records to 1 and 3 do."""
    from sealring import _stand_ins

    with exchanging("launched", 5) as local:
        before = _stand_ins.messages_exchanged()
        one = tensors_of(replace(SUM, algorithm=Algorithm.DIRECT), 5)[2]
        alone = [None, None, one.collective(), None, None]
        assert isinstance(local.run(alone, 0.7)[2], PeerSilent)
        assert _stand_ins.messages_exchanged() - before == 2


@each_how
def test_a_link_whose_payload_goes_by_nccl_has_no_commitment(how: str) -> None:
    """The host does not see the tags. Both ends of a link report that there is no commitment."""
    with exchanging(how, 2) as local:
        check(local, SUM)
        for engine in local.engines:
            assert [(link.sent, link.received) for link in engine.commitments()] == [(None, None)]


# ---- inside a host by memory, between hosts by exchanges ----------------------------------------


MIXED = [
    (how, hosts, wire)
    for how in HOW
    for hosts, wire in (
        ("0011", Wire.NCCL), ("01021", Wire.NCCL), ("02102", Wire.NCCL), ("0011", Wire.AUTO)
    )
]  # fmt: skip


@pytest.fixture(scope="module", params=MIXED, ids=str)
def two_hosts(request: pytest.FixtureRequest) -> Iterator[LocalWorld]:
    """With `auto`, the links carry the records between hosts. Keys are replaced all the time."""
    how, hosts, wire = request.param
    with LocalWorld(
        len(hosts), hosts=[int(each) for each in hosts], devices=all_on_devices(len(hosts)),
        driver=how, record_bytes=256, rekey_bytes=20_000,
    ) as local:  # fmt: skip
        assert local.wire(wire) == [None] * len(hosts)
        assert all(engine.wired for engine in local.engines)
        assert all(engine.exchanges == (wire is Wire.NCCL) for engine in local.engines)
        yield local


@each_program
def test_every_program_between_hosts(
    two_hosts: LocalWorld, operation: Operation, algorithm: Algorithm
) -> None:
    check_sizes(two_hosts, operation, algorithm)


@each_how
@pytest.mark.parametrize("wire", [Wire.NCCL, Wire.AUTO])
def test_long_tensors_between_hosts(how: Any, wire: Wire) -> None:
    with LocalWorld(4, hosts=[0, 0, 1, 1], devices=all_on_devices(4), driver=how) as local:
        assert local.wire(wire) == [None] * 4
        for elements in (3 * GPU_PAYLOAD_BYTES, GPU_PAYLOAD_BYTES + 1):
            check(local, replace(SUM, elements=elements))
        assert local.engines[0].routes.goes_by_wires(
            replace(tensors_of(SUM, 4)[0].collective(), ready=0)
        )


@each_how
def test_areas_of_a_large_group_hold_less(how: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two slots for each rank, so one segment at a time: every program still takes the wires."""
    monkeypatch.setattr(ways, "_AREA_BYTES", GPU_PAYLOAD_BYTES)
    with LocalWorld(4, hosts=[0, 0, 1, 1], devices=all_on_devices(4), driver=how) as local:
        assert local.wire(Wire.AUTO) == [None] * 4
        assert [engine._native.wire_slots for engine in local.engines] == [8] * 4
        for elements in (3 * GPU_PAYLOAD_BYTES, 5):
            for algorithm in (Algorithm.HIERARCHICAL, Algorithm.DIRECT):
                case = replace(SUM, algorithm=algorithm, elements=elements)
                check(local, case)
                collective = replace(tensors_of(case, 4)[0].collective(), ready=0)
                assert local.engines[0].routes.goes_by_wires(collective)


def test_the_area_of_256_ranks_takes_134_million_bytes() -> None:
    asked = []

    class Native:
        def offer_gpu_wires(self, slots: int, payload: int) -> bytes:
            asked.append((slots, payload))
            return b""

        def mark_mixed(self) -> None: ...

    for world in (16, 256, 1024):
        hosts = tuple(rank // 8 for rank in range(world))
        ways.InsideHosts(Native(), 0, ways.Meeting(hosts, 1.0)).offer()  # type: ignore[arg-type]
    assert asked == [
        (192, 2 * GPU_PAYLOAD_BYTES),
        (512, GPU_PAYLOAD_BYTES),
        (2048, GPU_PAYLOAD_BYTES),
    ]


def test_without_memory_that_others_can_read_all_ranks_exchange(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("CUDA failed in cuIpcGetMemHandle: error 801")

    monkeypatch.setattr(ways.Hierarchical, "open", refuse)
    with LocalWorld(4, hosts=[0, 0, 1, 1], devices=all_on_devices(4), driver="launched") as local:
        assert local.wire(Wire.NCCL) == [None] * 4
        assert local.engines[0].routes.apart == (0, 1, 2, 3)
        check(local, SUM)


UNEVEN = [(2, 0, 3, 0, 1), (2, 3, 3, 0, 3, 1)]


@pytest.mark.parametrize("hosts", UNEVEN, ids=str)
def test_nothing_is_awaited_that_comes_after_what_waits(
    hosts: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank adds a part that needs two exchanges before a part that could come with the first."""

    def refuse(*_: object) -> None:
        raise RuntimeError("CUDA failed in cuIpcGetMemHandle: error 801")

    monkeypatch.setattr(ways.Hierarchical, "open", refuse)
    world = len(hosts)
    with LocalWorld(
        world, hosts=list(hosts), devices=all_on_devices(world), driver="launched"
    ) as local:
        assert local.wire(Wire.NCCL) == [None] * world
        for algorithm in (Algorithm.HIERARCHICAL, Algorithm.TREE):
            for operation in (Operation.ALL_REDUCE, Operation.REDUCE):
                check(local, replace(SUM, operation=operation, algorithm=algorithm))


# ---- a peer that does not come, or goes ---------------------------------------------------------


@each_how
@pytest.mark.threat("C7")
def test_a_peer_that_dies_while_the_communicator_is_made(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agreement ends at once, because the links report it, and all others name the lost
    rank."""
    with driven(how, 3) as local:
        dead = local.engines[1]

        class Dying:
            """The engine of rank 1, which goes instead of coming to the meeting."""

            def __getattr__(self, name: str) -> Any:
                return getattr(native, name)

            def meet(self, *_: object) -> None:
                native.close()
                raise RuntimeError("it is gone")

        native = dead._native
        monkeypatch.setattr(dead, "_native", Dying())
        began = time.monotonic()
        errors = local.wire(Wire.NCCL, timeout_s=60)
        assert time.monotonic() - began < 30
        for rank in (0, 2):
            error = errors[rank]
            assert isinstance(error, PeerLost)
            assert error.peer == 1


@pytest.mark.threat("C7")
def test_a_peer_that_hangs_while_the_communicator_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks learn which rank did not finish, and the links still work."""
    with driven("launched", 3) as local:
        engine = local.engines[1]
        native = engine._native

        class Late:
            def __getattr__(self, name: str) -> Any:
                return getattr(native, name)

            def meet(self, *_: object) -> None:
                raise RuntimeError("it did not come")

        with monkeypatch.context() as patched:
            patched.setattr(engine, "_native", Late())
            for error in local.wire(Wire.NCCL, timeout_s=2):
                assert isinstance(error, Unsupported)
                assert "rank 0: the ranks' GPUs did not all meet within" in str(error)
        assert not any(engine.wired for engine in local.engines)
        check(local, replace(SUM, algorithm=Algorithm.RING))


@each_how
@pytest.mark.threat("C8")
def test_a_peer_that_leaves_between_two_exchanges(how: str) -> None:
    with exchanging(how, 3) as local:
        check(local, SUM)
        tensors = tensors_of(SUM, 3)
        leaving = threading.Timer(0.3, local.engines[1].close)
        leaving.start()
        errors = local.run([tensors[0].collective(), None, tensors[2].collective()], timeout_s=20)
        leaving.join()
        for rank in (0, 2):
            error = errors[rank]
            assert isinstance(error, PeerLost)
            assert error.peer == 1


@each_how
@pytest.mark.threat("C8")
def test_a_peer_that_does_not_come_is_named(how: str) -> None:
    with exchanging(how, 2) as local:
        tensors = tensors_of(SUM, 2)
        errors = local.run([tensors[0].collective(), None], timeout_s=0.7)
        assert isinstance(errors[0], PeerSilent)
        assert errors[0].peer == 1
        if how == "prelaunched":
            assert poisoned(tensors[0])


@each_how
def test_ranks_that_disagree_never_get_to_an_exchange(how: str) -> None:
    """NCCL would wait for ever, or fail, if ranks came with different lengths."""
    with exchanging(how, 2) as local:
        one, other = tensors_of(SUM, 2)[0], tensors_of(replace(SUM, elements=7777), 2)[1]
        errors = local.run([one.collective(), other.collective()], timeout_s=20)
        assert all(isinstance(error, OutOfStep) for error in errors)


# ---- what NCCL brings is not trusted ------------------------------------------------------------


@each_how
@pytest.mark.threat("C1")
def test_a_byte_changed_on_the_way_is_seen(how: str) -> None:
    from sealring import _stand_ins

    with exchanging(how, 2) as local:
        tensors = tensors_of(SUM, 2)
        _stand_ins.change_next_exchange(1)  # what comes to rank 1
        errors = local.run([each.collective() for each in tensors], timeout_s=20)
        assert_all(errors, TamperedRecord, seen_by=1, about=0, first=local.number)
        if how == "prelaunched":
            assert all(poisoned(each) for each in tensors)
