"""A worker's rank in a job of torchft comes from how it was started, not from a quorum."""

from __future__ import annotations

import pytest

from sealring.errors import ConfigurationError, DuplicateRank, WrongPeer
from sealring.train.integrations.replica_ranks import check_members, rank_in_job
from tests.codes import coded


@pytest.mark.parametrize(
    ("replica_id", "group_rank", "group_size", "rank"),
    [("gpt_0", 0, 1, 0), ("gpt_3", 0, 1, 3), ("gpt_3", 1, 4, 13), ("12", 0, 1, 12)],
)
def test_the_rank_follows_from_the_replica_group_s_number(
    replica_id: str, group_rank: int, group_size: int, rank: int
) -> None:
    assert rank_in_job(replica_id, group_rank, group_size) == rank


@pytest.mark.parametrize("replica_id", [None, "", "gpt", "gpt_3:", "gpt_٣"])
def test_a_replica_group_without_a_number_is_refused(replica_id: str | None) -> None:
    with pytest.raises(ConfigurationError, match="end it with this replica group's number"):
        rank_in_job(replica_id, 0, 1)


def test_a_quorum_that_lists_this_worker_where_it_is_passes() -> None:
    check_members([6, 2, 4], position=1, own=2, size=8)


@pytest.mark.parametrize(("members", "position"), [([6, 2], 0), ([6], 1), ([6, 2], -1), ([], 0)])
def test_a_quorum_cannot_give_a_worker_another_rank(members: list[int], position: int) -> None:
    with pytest.raises(
        WrongPeer, match="and it is rank 2", check=coded("handshake.wrong_rank")
    ) as refused:
        check_members(members, position, own=2, size=8)
    assert refused.value.peer == 2


def test_a_quorum_with_one_rank_twice_is_refused() -> None:
    with pytest.raises(DuplicateRank, match="lists a rank twice \\(2, 2\\)"):
        check_members([2, 2], position=0, own=2, size=8)


def test_a_replica_group_beyond_the_job_s_room_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="rank 8 of a job of 8"):
        check_members([8], position=0, own=8, size=8)
