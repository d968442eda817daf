"""Errors contain the words that scripts and tools look for in Gloo's."""

from __future__ import annotations

import pytest

from sealring._native import Failure, FailureCode
from sealring.core.engine.collective import DType, ReduceKind
from sealring.core.engine.failures import ERROR_BY_CODE, Names, error_from
from sealring.core.schedule import Algorithm, Operation
from sealring.errors import GroupError, OutOfStep, PeerLost, PeerSilent
from tests.core.engine.cases import Case, Tensors, tensors_of
from tests.core.engine.local_world import Last, LocalWorld

SUM = Case(Operation.ALL_REDUCE, Algorithm.DIRECT, 12, DType.FLOAT32, ReduceKind.SUM)
VIEW = "(all_reduce sum of 48 bytes of float32, direct)"


def cut(data: bytes) -> bytes:
    return Last(data[:100])


def test_every_code_has_an_error() -> None:
    assert set(ERROR_BY_CODE) == set(FailureCode)


def test_a_rank_that_does_not_come_is_timed_out() -> None:
    with LocalWorld(2) as local:
        (error, _) = local.run([tensors_of(SUM, 2)[0].collective(), None], timeout_s=0.25)
    assert type(error) is PeerSilent
    assert str(error).startswith(
        "Timed out waiting 250ms: nothing came from the peer for 0.25 s; rank 1 was last seen "
        "before its first collective (rank 1 on host-1; all_reduce, collective 1). The group"
    )


def test_a_link_that_is_cut_is_a_connection_closed() -> None:
    with LocalWorld(3, middle={(1, 0): cut}) as local:
        for _ in range(2):  # a rank may be done with the first before the link is cut
            errors = local.run([each.collective() for each in tensors_of(SUM, 3)])
    texts = [str(error) for error in errors if type(error) is PeerLost]
    assert len(texts) == 3
    said = "Connection closed by peer: the peer closed the connection in the middle of a record"
    assert any(text.startswith(said) for text in texts)
    assert any(f"rank 0 reported: {said}" in text for text in texts)


def test_ranks_that_disagree_are_a_mismatch() -> None:
    larger = Case(Operation.BROADCAST, Algorithm.DIRECT, 12, DType.FLOAT32)
    with LocalWorld(2) as local:
        calls = [Tensors(SUM, 2, 0).collective(), Tensors(larger, 2, 1).collective()]
        error, _ = local.run(calls)
    assert type(error) is OutOfStep
    other = "(broadcast at root 0 of 48 bytes of float32, direct)"
    lines = str(error).split("\n")
    assert lines[0] in (
        f"Detected mismatch between collectives on ranks: rank 1 is in collective 1 {other}, "
        f"rank 0 is in collective 1 {VIEW}",
        f"rank 1 reported: Detected mismatch between collectives on ranks: rank 0 is in "
        f"collective 1 {VIEW}, rank 1 is in collective 1 {other}",
    )
    assert lines[1] == f"  rank 0: collective 1 {VIEW}"
    assert lines[2].startswith(f"  rank 1: collective 1 {other}")


@pytest.mark.parametrize(
    ("failure", "kind", "begins"),
    [
        (
            Failure(FailureCode.PEER_LOST, "the peer closed the connection", 1, 2, 2),
            PeerLost,
            "rank 7 reported: the peer closed the connection (rank 5; collective 2). The group",
        ),
        (
            Failure(FailureCode.PEER_LOST, "the peer closed the connection", 1, 2, 2, 1),
            PeerLost,
            "rank 5 says that rank 7 reported: the peer closed the connection (rank 5; collective",
        ),
        (
            Failure(FailureCode.OUT_OF_STEP, "rank 1 cuts the tensor differently", 1, 2),
            OutOfStep,
            "rank 1 cuts the tensor differently (collective 2). The group is closed.",
        ),
    ],
)
def test_a_text_is_shown_as_it_came(failure: Failure, kind: type[GroupError], begins: str) -> None:
    """The rank that wrote it has named ranks already; a number in it is not taken for a rank."""
    error = error_from(failure, Names(0, (3, 5, 7)))
    assert type(error) is kind
    assert str(error).startswith(begins)
    assert error.peer == 5


def test_a_group_of_some_ranks_names_them_by_their_numbers_in_the_job() -> None:
    assert Names(0, (3, 5, 7)).for_native().rank(1) == "rank 5"
    assert Names(0, (3, 5, 7)).for_native().rank(9) == "rank 9"
