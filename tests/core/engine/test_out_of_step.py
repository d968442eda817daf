"""Ranks that make different calls, by the script's mistake: every rank gets the same message."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from sealring.core.engine.collective import DType, ReduceKind
from sealring.core.schedule import ALGORITHMS, Algorithm, Operation
from sealring.errors import GroupError, MissingRecord, OutOfStep, PeerSilent
from tests.core.engine.cases import Case, Tensors, tensors_of
from tests.core.engine.local_world import LocalWorld

RING, DIRECT = Algorithm.RING, Algorithm.DIRECT
SUM = Case(Operation.ALL_REDUCE, RING, 24, DType.FLOAT32, ReduceKind.SUM)
GATHER = Case(Operation.ALL_GATHER, RING, 24)
SCATTER = Case(Operation.REDUCE_SCATTER, DIRECT, 24, kind=ReduceKind.SUM)
BROADCAST = Case(Operation.BROADCAST, DIRECT, 24)
ALL_TO_ALL = Case(Operation.ALL_TO_ALL, DIRECT, 24)
BARRIER = Case(Operation.BARRIER, DIRECT)

VIEWS = re.compile(
    r"rank (\d) is in collective (\d+) \(([^)]*)\), rank (\d) is in collective (\d+) \(([^)]*)\)"
)

DISAGREEMENTS = {
    "operation": (SUM, GATHER),
    "operation, other half": (GATHER, SCATTER),
    "operation, nothing to receive": (SUM, BROADCAST),
    "barrier": (SUM, BARRIER),
    "dtype": (SUM, replace(SUM, dtype=DType.INT32)),
    "dtype moved": (GATHER, replace(GATHER, dtype=DType.UINT32)),
    "dtype of a broadcast": (BROADCAST, replace(BROADCAST, dtype=DType.INT32)),
    "size": (SUM, replace(SUM, elements=25)),
    "size, much larger": (SUM, replace(SUM, elements=100_000)),
    "size, nothing": (SUM, replace(SUM, elements=0)),
    "size of a gather": (GATHER, replace(GATHER, elements=23)),
    "size of a broadcast": (BROADCAST, replace(BROADCAST, elements=1)),
    "reduction": (SUM, replace(SUM, kind=ReduceKind.MAX)),
    "average": (SUM, replace(SUM, kind=ReduceKind.AVG)),
    "algorithm": (SUM, replace(SUM, algorithm=DIRECT)),
    "algorithm of a gather": (GATHER, replace(GATHER, algorithm=DIRECT)),
    "split of an all-to-all": (ALL_TO_ALL, replace(ALL_TO_ALL, elements=26)),
    "dtype of an all-to-all": (ALL_TO_ALL, replace(ALL_TO_ALL, dtype=DType.INT32)),
    "tree": (replace(SUM, algorithm=Algorithm.TREE), SUM),
    "parameter server": (replace(SUM, algorithm=Algorithm.PARAMETER_SERVER), SUM),
    "hierarchical": (replace(SUM, algorithm=Algorithm.HIERARCHICAL), SUM),
}


def run_both(
    local: LocalWorld,
    usual: Case,
    unusual: Case,
    odd: int,
    numbers: list[int] | None = None,
    timeout_s: float = 10.0,
) -> list[BaseException | None]:
    """Rank `odd` calls `unusual`, all others `usual`. Then all meet in a barrier.

    A rank that needs nothing from the others may leave its collective before they disagree; by the
    end of the barrier every rank must have the error.
    """
    world = local.world
    first = [Tensors(unusual if rank == odd else usual, world, rank) for rank in range(world)]
    calls = [
        [each.collective(), meet.collective()]
        for each, meet in zip(first, tensors_of(BARRIER, world), strict=True)
    ]
    return local.run_one_after_another(calls, timeout_s, numbers)


def assert_out_of_step(errors: list[BaseException | None]) -> list[GroupError]:
    for error in errors:
        assert type(error) is OutOfStep, [str(error) for error in errors]
    return errors  # type: ignore[return-value]


@pytest.mark.parametrize("transport", ["tcp", "shm"])
@pytest.mark.parametrize("disagreement", DISAGREEMENTS)
@pytest.mark.threat("F10")
def test_both_views_are_told(disagreement: str, transport: str) -> None:
    usual, unusual = DISAGREEMENTS[disagreement]
    for world in (2, 3):
        for odd in range(world):
            with LocalWorld(world, transport) as local:
                errors = assert_out_of_step(run_both(local, usual, unusual, odd))
            for error in errors:
                told = VIEWS.search(str(error))
                assert told is not None, str(error)
                one, number, view, other, other_number, other_view = told.groups()
                assert one != other
                assert (number, view) != (other_number, other_view)
                assert "All ranks must call the same collectives" in str(error)


@pytest.mark.parametrize("transport", ["tcp", "shm"])
@pytest.mark.parametrize("case", [SUM, GATHER, SCATTER, BARRIER], ids=str)
@pytest.mark.parametrize("numbers", [[1, 2], [2, 1], [1, 1, 2], [2, 2, 1], [1, 3, 3]], ids=str)
@pytest.mark.threat("F10")
def test_rank_ahead_or_behind(numbers: list[int], case: Case, transport: str) -> None:
    """The calls look the same, but a rank has left one out or made one too many."""
    with LocalWorld(len(numbers), transport) as local:
        errors = assert_out_of_step(run_both(local, case, case, 0, numbers))
    for error in errors:
        told = VIEWS.search(str(error))
        assert told is not None, str(error)
        assert told.group(2) != told.group(5)
        assert told.group(3) == told.group(6)


@pytest.mark.parametrize("transport", ["tcp", "shm"])
@pytest.mark.parametrize("algorithm", ALGORITHMS[Operation.BROADCAST])
@pytest.mark.parametrize(
    ("world", "odd", "root"),
    [(w, odd, root) for w in (2, 3, 4) for odd in range(1, w) for root in range(1, w)],
)
@pytest.mark.threat("F11")
def test_roots_differ(
    world: int, odd: int, root: int, algorithm: Algorithm, transport: str
) -> None:
    """Rank `odd` takes another rank than 0 to be the broadcast's root."""
    usual = replace(BROADCAST, algorithm=algorithm)
    with LocalWorld(world, transport) as local:
        errors = run_both(local, usual, replace(usual, root=root), odd)
    assert_out_of_step_or_a_gap(errors)


@pytest.mark.parametrize("transport", ["tcp", "shm"])
@pytest.mark.parametrize(("world", "odd"), [(w, odd) for w in (2, 3, 4) for odd in range(w)])
def test_algorithms_of_a_broadcast_differ(world: int, odd: int, transport: str) -> None:
    with LocalWorld(world, transport) as local:
        errors = run_both(local, BROADCAST, replace(BROADCAST, algorithm=RING), odd)
    assert_out_of_step_or_a_gap(errors)


def assert_out_of_step_or_a_gap(errors: list[BaseException | None]) -> None:
    """If ranks disagree on the path of a published record, a rank that does not get it sees a gap
    in its sender's numbers. The record may have been dropped, so MissingRecord is allowed.
    """
    for error in errors:
        if type(error) is not MissingRecord:
            assert type(error) is OutOfStep, [str(error) for error in errors]
            assert VIEWS.search(str(error)) or "they disagree on the way it takes" in str(error)


@pytest.mark.parametrize("algorithm", ALGORITHMS[Operation.BROADCAST])
@pytest.mark.threat("F11")
def test_no_rank_takes_itself_to_be_the_root(algorithm: Algorithm) -> None:
    """No rank sends, so no rank can learn why."""
    usual = replace(BROADCAST, algorithm=algorithm)
    with LocalWorld(3) as local:
        errors = run_both(local, usual, replace(usual, root=1), odd=0, timeout_s=0.2)
    assert {type(error) for error in errors} == {PeerSilent}
