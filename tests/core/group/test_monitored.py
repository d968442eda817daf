"""monitored_barrier names the missing ranks, and the store alone lets no rank pass."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest
import torch.distributed as dist

from sealring.core.group import monitored
from sealring.errors import GroupClosed, PeerLost, PeerSilent
from tests.workers import Workers


def all_but_the_last(rank: int, world: int) -> str:
    dist.monitored_barrier(timeout=timedelta(seconds=60))
    if rank == world - 1:
        return ""
    with pytest.raises(PeerSilent) as caught:
        dist.monitored_barrier(timeout=timedelta(seconds=3))
    return str(caught.value)


def test_rank_0_names_who_is_missing(workers: Workers) -> None:
    texts = workers.run(all_but_the_last, world=3, env={"SEALRING_TRANSPORT": "auto"})
    assert texts[0].startswith("Rank 2 failed to pass monitoredBarrier in 3000 ms.")
    assert texts[1].startswith("Rank 1 successfully reached monitoredBarrier, but received errors")


def test_a_store_that_says_all_are_here_lets_no_rank_pass() -> None:
    store = dist.HashStore()
    arrivals = monitored.Arrivals(store, 0, 2, "0.1")
    store.set("sealring/monitored/0.1/1/1", "here")

    def meet() -> None:
        raise GroupClosed("the sealed barrier did not end")

    with pytest.raises(GroupClosed):
        monitored.pass_barrier(
            arrivals, 0, 5.0, wait_all_ranks=False, meet=meet, give_up=lambda: None
        )


def test_all_missing_ranks_are_named_where_asked() -> None:
    arrivals = monitored.Arrivals(dist.HashStore(), 0, 4, "0.1")
    closed = []
    with pytest.raises(PeerSilent, match="Ranks 1, 2, 3 failed to pass monitoredBarrier"):
        monitored.pass_barrier(
            arrivals,
            0,
            0.05,
            wait_all_ranks=True,
            meet=lambda: pytest.fail("it met no rank"),
            give_up=lambda: closed.append(True),
        )
    assert closed


class SilentStore(dist.HashStore):
    def __init__(self) -> None:
        super().__init__()
        self.ended = threading.Event()

    def wait(self, *_: object) -> None:
        if not self.ended.wait(60):
            raise OSError("the test should have ended")


@pytest.mark.threat("S5")
def test_a_store_that_answers_no_more_is_not_waited_for() -> None:
    """torch's client would wait for it without end, whatever its timeout."""
    store = SilentStore()
    try:
        with pytest.raises(PeerSilent, match="Rank 1 failed to pass monitoredBarrier"):
            monitored.pass_barrier(
                monitored.Arrivals(store, 0, 2, "0.1"),
                0,
                0.5,
                wait_all_ranks=False,
                meet=lambda: pytest.fail("it met no rank"),
                give_up=lambda: None,
            )
        assert not store.ended.is_set()
    finally:
        store.ended.set()


class BrokenStore(dist.HashStore):
    def set(self, *_: object) -> None:
        raise dist.DistNetworkError("Broken pipe")


def test_a_store_that_ended_with_rank_0_does_not_hide_that() -> None:
    def meet() -> None:
        raise PeerLost("the peer closed the connection", peer=0)

    with pytest.raises(PeerSilent, match="waiting for send/recv from rank 0") as caught:
        monitored.pass_barrier(
            monitored.Arrivals(BrokenStore(), 1, 2, "0.1"),
            1,
            5.0,
            wait_all_ranks=False,
            meet=meet,
            give_up=lambda: None,
        )
    assert caught.value.peer == 0
