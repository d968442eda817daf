"""Large groups whose tensors are on GPUs link only the pairs that their programs need.

This CPU stands in for the driver of the GPUs; sessions, links and the code that makes them are
real.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest

from sealring import _native
from sealring.core.engine.collective import Collective, DType, ReduceKind
from sealring.core.engine.cuda.wires import Wire
from sealring.core.schedule import (
    ALGORITHMS,
    CALLED,
    Algorithm,
    Operation,
    Topology,
    program_for,
    relayed,
)
from sealring.errors import Unsupported
from tests.core.engine.stand_ins import attach_host_driver, attach_host_driver_to_mailbox
from tests.core.links.teams import SIZE, Team, team
from tests.core.links.test_late import handshakes
from tests.core.links.test_late_failures import give_up_after

ELEMENTS = 5000
ALL_PAIRS = SIZE * (SIZE - 1) // 2
TREE_AND_RING = {frozenset((rank, (rank + 1) % SIZE)) for rank in range(SIZE)} | {
    frozenset((rank, rank & (rank - 1))) for rank in range(1, SIZE)
}


def run_all(team: Team, rank: int, collectives: Iterable[Collective], timeout_s: float) -> None:
    for each in collectives:
        team.groups[rank]._run(each, timeout_s)


def sum_on_gpus(team: Team, algorithm: Algorithm, *but: int, timeout_s: float = 60.0) -> list[Any]:
    """All-reduces on stand-in GPUs as a waiting caller does; returns each rank's value."""

    def one(rank: int) -> float:
        values = np.full(ELEMENTS, rank, dtype=np.float32)
        collective = all_reduce_of(values, algorithm)
        engine = team.groups[rank].engine
        if engine.gpus_lack_links(collective):
            run_all(team, rank, engine.link_gpus(collective, timeout_s), timeout_s)
        team.groups[rank]._run(collective, timeout_s)
        return float(values[-1])

    return team.all(one, *but)


def all_reduce_of(values: np.ndarray[Any, Any], algorithm: Algorithm) -> Collective:
    start, cut = values.ctypes.data, values.nbytes // SIZE // 4 * 4
    slots = [(start, values.nbytes)]
    if algorithm in (Algorithm.RING, Algorithm.HIERARCHICAL):
        slots = [(start + part * cut, cut) for part in range(SIZE - 1)]
        slots.append((start + (SIZE - 1) * cut, values.nbytes - (SIZE - 1) * cut))
    return Collective(
        Operation.ALL_REDUCE,
        algorithm,
        slots,
        values.nbytes,
        DType.FLOAT32,
        ReduceKind.SUM,
        ready=0,
    )


def agree(team: Team, wire: Wire, *, prelaunch: bool = False) -> list[Any]:
    def one(rank: int) -> None:
        engine = team.groups[rank].engine
        attach_host_driver(engine._native, prelaunch=prelaunch)
        exchanges = engine.agree_on_wire(wire, gpu=f"GPU {rank}", timeout_s=30.0)
        run_all(team, rank, exchanges, 30.0)

    return team.all(one)


SUM = [float(sum(range(SIZE)))] * SIZE


@pytest.mark.parametrize("prelaunch", [False, True])
def test_a_gpu_needs_the_links_of_its_programs_alone(prelaunch: bool) -> None:
    with team() as one:
        assert agree(one, Wire.LINKS, prelaunch=prelaunch) == [None] * SIZE
        assert handshakes(one) == len(TREE_AND_RING), "over which the ranks agreed"
        for _ in range(2):
            assert sum_on_gpus(one, Algorithm.RING) == SUM
            assert sum_on_gpus(one, Algorithm.TREE) == SUM
        assert handshakes(one) == len(TREE_AND_RING)
        assert sum_on_gpus(one, Algorithm.DIRECT) == SUM
        assert handshakes(one) == ALL_PAIRS


def test_nccl_is_connected_when_a_program_first_needs_it() -> None:
    hosts = [rank // 4 for rank in range(SIZE)]
    with team(hosts=hosts) as one:
        assert agree(one, Wire.NCCL) == [None] * SIZE
        assert [group.engine.wire for group in one.groups] == [Wire.NCCL] * SIZE
        opposite = [{(rank + 4) % SIZE, (rank + 8) % SIZE} for rank in range(SIZE)]
        for _ in range(2):
            assert sum_on_gpus(one, Algorithm.HIERARCHICAL) == SUM
        assert [group.engine.on_gpus.connected for group in one.groups] == opposite
        assert handshakes(one) < ALL_PAIRS
        assert sum_on_gpus(one, Algorithm.DIRECT) == SUM
        assert [group.engine.on_gpus.connected for group in one.groups] == [
            {peer for peer in range(SIZE) if hosts[peer] != hosts[rank]} for rank in range(SIZE)
        ]


def test_a_program_that_was_not_prepared_is_refused() -> None:
    """A GPU must not find out that it lacks a link's keys while streams already wait."""
    with team() as one:
        attach_host_driver(one.groups[0].engine._native, prelaunch=False)
        collective = all_reduce_of(np.zeros(ELEMENTS, np.float32), Algorithm.DIRECT)
        with pytest.raises(ValueError, match="needs a link that is not there"):
            one.groups[0]._run(collective, 5.0)


class Full:
    """An engine whose GPU has no room for a key."""

    def put_late_keys(self) -> None:
        raise RuntimeError("cuMemcpyHtoDAsync: out of memory")


def test_a_gpu_that_cannot_take_a_key_is_everybodys_error() -> None:
    with team() as one:
        assert agree(one, Wire.LINKS) == [None] * SIZE
        one.groups[7].engine.on_gpus._native = Full()  # type: ignore[assignment]
        texts = []

        def call(rank: int) -> None:
            collective = all_reduce_of(np.zeros(ELEMENTS, np.float32), Algorithm.DIRECT)
            with pytest.raises(Unsupported) as refused:
                run_all(one, rank, one.groups[rank].engine.link_gpus(collective, 20.0), 20.0)
            texts.append(str(refused.value))

        one.all(call)
        assert set(texts) == {
            "GPUs cannot run all_reduce: rank 7: cuMemcpyHtoDAsync: out of memory"
        }


def test_a_gpu_that_cannot_take_a_key_holds_no_rank_up_in_nccl() -> None:
    """Otherwise the others would wait for its connection, and that rank for their messages."""
    with team(hosts=[rank // 4 for rank in range(SIZE)]) as one:
        assert agree(one, Wire.NCCL) == [None] * SIZE
        full = one.groups[7].engine.on_gpus
        whole, full._native = full._native, Full()  # type: ignore[assignment]
        assert set(sum_on_gpus(one, Algorithm.DIRECT, timeout_s=3.0)) == {
            ("configuration.unsupported", None)
        }
        full._native = whole
        del full, whole
        assert sum_on_gpus(one, Algorithm.HIERARCHICAL) == SUM, "nothing was given up"
        assert sum_on_gpus(one, Algorithm.DIRECT) == SUM


class Unconnected:
    """An engine whose GPU cannot be connected with those of other ranks."""

    exchanges = True

    def __init__(self, native: _native.Engine) -> None:
        self.put_late_keys = native.put_late_keys

    def connect(self, *_: object) -> None:
        raise RuntimeError("ncclSystemError: unhandled system error")


@pytest.mark.parametrize("prelaunch", [False, True])
def test_nccl_that_is_not_connected_is_the_same_error_on_all_ranks_from_then_on(
    prelaunch: bool,
) -> None:
    """Some ranks have given up connections that all programs need, and others have not."""
    with team(hosts=[rank // 4 for rank in range(SIZE)]) as one:
        assert agree(one, Wire.NCCL, prelaunch=prelaunch) == [None] * SIZE
        assert sum_on_gpus(one, Algorithm.HIERARCHICAL) == SUM
        broken = one.groups[7].engine
        broken.on_gpus._native = Unconnected(broken._native)  # type: ignore[assignment]
        del broken
        # The collectives have the same timeout, so a rank that fails at once waits for the others.
        assert set(sum_on_gpus(one, Algorithm.DIRECT, timeout_s=3.0)) == {
            ("configuration.unsupported", None)
        }
        for algorithm in (Algorithm.HIERARCHICAL, Algorithm.DIRECT, Algorithm.HIERARCHICAL):
            assert set(sum_on_gpus(one, algorithm, timeout_s=3.0)) == {
                ("configuration.unsupported", None)
            }
        for rank in range(SIZE):
            assert one.groups[rank].engine.on_gpus.connected == {
                (rank + 4) % SIZE,
                (rank + 8) % SIZE,
            }, "as many as both ends know"
        one.all(lambda rank: one.groups[rank].all_reduce(np.ones(9, np.float32), Algorithm.RING))


def test_a_rank_that_does_not_come_is_named_by_all() -> None:
    with team() as one:
        assert agree(one, Wire.LINKS) == [None] * SIZE
        found = sum_on_gpus(one, Algorithm.DIRECT, 7, timeout_s=4.0)
        assert set(found) <= {("group.peer_silent", 7), ("group.peer_lost", 7)}


def test_a_rank_that_has_left_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    give_up_after(monkeypatch, 0.5)
    with team() as one:
        assert agree(one, Wire.LINKS) == [None] * SIZE
        one.groups[7].close()
        assert set(sum_on_gpus(one, Algorithm.DIRECT, 7, timeout_s=20.0)) == {
            ("group.peer_lost", 7)
        }


@pytest.mark.parametrize("operation", CALLED)
def test_a_relayed_program_needs_no_other_links(operation: Operation) -> None:
    """A relayed program uses the links that the CPUs' program made."""
    hosts = Topology((0, 0, 1, 1, 1, 2, 2, 2, 2))
    for algorithm in ALGORITHMS[operation]:
        for rank in range(9):
            plain = program_for(operation, algorithm, 9, rank, topology=hosts)
            peers = {peer for step in plain.steps for peer in step.peers}
            assert {peer for step in relayed(plain).steps for peer in step.peers} <= peers


# ---- messages ------------------------------------------------------------------------------------


@pytest.mark.parametrize("streams_wait", [False, True])
def test_messages_of_gpus_between_ranks_without_a_link(streams_wait: bool) -> None:
    """A link is made while a kernel serves messages for which streams wait."""
    with team() as one:

        def call(rank: int) -> list[float]:
            box = one.groups[rank].mailbox
            stream = attach_host_driver_to_mailbox(box._native)
            got = []
            for shift in (1, 5):
                there, here = (rank + shift) % SIZE, (rank - shift) % SIZE
                sent, received = np.full(70_000, float(rank)), np.zeros(70_000)
                messages = [
                    box.submit(
                        _native.Message(sends, peer, shift, (at.ctypes.data, at.nbytes), 60.0),
                        _native.CallerStream(0, stream, streams_wait=streams_wait),
                    )
                    for sends, peer, at in ((True, there, sent), (False, here, received))
                ]
                for message in messages:
                    box.wait(message)
                got.append(float(received[-1]))
            return got

        assert one.all(call) == [
            [float((rank - 1) % SIZE), float((rank - 5) % SIZE)] for rank in range(SIZE)
        ]
        assert handshakes(one) < ALL_PAIRS
