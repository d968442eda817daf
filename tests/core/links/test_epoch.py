"""All ranks of an attempt get one new epoch, whatever the store still holds from before."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from sealring.core.links import Store, agreed_epoch, epoch
from sealring.core.links.threads import borrow
from sealring.errors import PeerUnreachable
from tests.core.links.worlds import DictStore, SilentStore, busy_threads

MEMBERS = (3, 1, 2)


def attempt(store: Store, members: Sequence[int] = MEMBERS, seconds: float = 20) -> list[str]:
    """Returns the epoch that each member gets; the lowest rank answers until all have the epoch."""
    all_have_it = threading.Barrier(len(members))

    def join(rank: int) -> str:
        with agreed_epoch(store, MEMBERS, rank, time.monotonic() + seconds) as epoch:
            all_have_it.wait(seconds)
        return epoch

    with ThreadPoolExecutor(len(members)) as pool:
        return list(pool.map(join, members))


@pytest.mark.threat("F7")
def test_every_attempt_has_one_epoch_of_its_own_in_the_same_store() -> None:
    store, threads = DictStore(), busy_threads()
    epochs = [attempt(store) for _ in range(3)]
    assert all(len(set(seen)) == 1 for seen in epochs)
    assert len({seen[0] for seen in epochs}) == 3
    assert busy_threads() == threads


def test_a_rank_that_was_not_there_the_last_time_is_not_behind() -> None:
    """Rank 1 was absent before. If ranks counted attempts, its count would now differ."""
    store = DictStore()
    with pytest.raises(PeerUnreachable, match="rank 1 did not appear"):
        attempt(store, members=(2,), seconds=0.05)
    first, *others = attempt(store)
    assert others == [first, first]


@pytest.mark.parametrize(
    "left",
    [
        b"",
        b"\xff\xfe",
        b"x" * 100_000,
        b"0" * 32,
        b"0" * 32 + b" " + b"1" * 32,
        b"../../etc " + b"1" * 32,
    ],
)
def test_what_else_is_in_the_store_does_not_matter(left: bytes) -> None:
    store = DictStore()
    for rank in MEMBERS:
        store.values[f"sealring/epoch/ask/{rank}"] = left
        store.values[f"sealring/epoch/answer/{rank}"] = left
    first, *others = attempt(store)
    assert others == [first, first]
    assert first != "0" * 32


def test_a_rank_that_waits_for_the_lowest_one_is_told_its_name() -> None:
    with pytest.raises(PeerUnreachable, match="rank 1 did not appear") as raised:
        attempt(DictStore(), members=(3,), seconds=0.05)
    assert raised.value.peer == 1


class BrokenStore(DictStore):
    def check(self, keys: list[str]) -> bool:
        raise ConnectionError("the store's host is gone")


def test_a_store_that_breaks_is_named() -> None:
    with pytest.raises(PeerUnreachable, match="the store's host is gone"):
        attempt(BrokenStore(), members=(3,))


class CountingStore(DictStore):
    def __init__(self) -> None:
        super().__init__()
        self.writes: list[str] = []
        self.looks: list[str] = []

    def set(self, key: str, value: str) -> None:
        self.writes.append(key)
        super().set(key, value)

    def check(self, keys: list[str]) -> bool:
        self.looks += keys
        return super().check(keys)


def test_a_rank_that_waits_looks_more_often_than_it_writes() -> None:
    store = CountingStore()
    with pytest.raises(PeerUnreachable, match="rank 1 did not appear"):
        attempt(store, members=(3,), seconds=0.3)
    assert len(store.writes) < len(store.looks) / 2


def test_a_rank_that_was_answered_is_looked_at_less_often_than_one_that_is_missing() -> None:
    store = CountingStore()
    with agreed_epoch(store, MEMBERS, 1, time.monotonic() + 20):
        store.set("sealring/epoch/ask/3", "a" * 32)
        while len(store.looks) < 40:
            time.sleep(0.01)
    assert store.looks.count("sealring/epoch/ask/3") < store.looks.count("sealring/epoch/ask/2")


def test_a_second_token_of_a_rank_is_answered_as_well() -> None:
    """The rank's first token may belong to an attempt that has ended."""
    store = DictStore()
    with agreed_epoch(store, MEMBERS, 1, time.monotonic() + 20) as epoch:
        for token in ("a" * 32, "b" * 32):
            store.set("sealring/epoch/ask/3", token)
            while store.values.get("sealring/epoch/answer/3") != f"{epoch} {token}".encode():
                time.sleep(0.01)


def test_a_rank_that_is_ahead_does_not_take_the_epoch_of_the_attempt_it_has_left() -> None:
    """For example, a rank ends a group and makes the next one before the lowest rank is done."""
    store = DictStore()

    def join(rank: int) -> str:
        with agreed_epoch(store, MEMBERS, rank, time.monotonic() + 20) as epoch:
            return epoch

    with ThreadPoolExecutor(2) as pool:
        with agreed_epoch(store, MEMBERS, 1, time.monotonic() + 20) as first:
            assert join(2) == first
            asked, early = store.values["sealring/epoch/ask/2"], pool.submit(join, 2)
            while (again := store.values["sealring/epoch/ask/2"]) == asked:
                time.sleep(0.01)
            while store.values["sealring/epoch/answer/2"] != first.encode() + b" " + again:
                time.sleep(0.01)
        with agreed_epoch(store, MEMBERS, 1, time.monotonic() + 20) as second:
            assert early.result() == second


@pytest.mark.parametrize("asked_for", ["set", "check", "get"])
@pytest.mark.threat("S5")
def test_a_store_that_answers_no_more_is_not_waited_for(asked_for: str) -> None:
    with SilentStore(asked_for) as store:
        with (
            pytest.raises(PeerUnreachable, match="does not answer"),
            agreed_epoch(store, MEMBERS, 2, time.monotonic() + 0.5),
        ):
            pytest.fail("there is no epoch")
        assert not store.ended.is_set()


@pytest.mark.threat("S5")
def test_the_lowest_rank_leaves_a_store_behind_that_answers_no_more() -> None:
    with SilentStore("check") as store:
        with agreed_epoch(store, MEMBERS, 1, time.monotonic() + 600):
            assert store.asked.wait(20)
        assert not store.ended.is_set()


class OneForAll(DictStore):
    """A store that shows the keys of each run to all runs."""

    def set(self, key: str, value: str) -> None:
        super().set(re.sub("/[0-9a-f]{32}/", "/", key), value)

    def get(self, key: str) -> bytes:
        return super().get(re.sub("/[0-9a-f]{32}/", "/", key))

    def check(self, keys: list[str]) -> bool:
        return super().check([re.sub("/[0-9a-f]{32}/", "/", key) for key in keys])


@pytest.mark.threat("F6")
def test_a_store_that_leads_two_runs_together_gives_them_different_epochs() -> None:
    """The different epochs make the runs refuse each other, because every hello has the epoch."""
    store = OneForAll()

    def join(rank: int, run: str) -> str:
        with agreed_epoch(store, MEMBERS, rank, time.monotonic() + 20, within=run) as epoch:
            if rank == 1:
                have_theirs.wait(20)
        return epoch

    have_theirs = threading.Event()
    with ThreadPoolExecutor(3) as pool:
        lowest = pool.submit(join, 1, "0" * 32)
        own, other = pool.submit(join, 2, "0" * 32), pool.submit(join, 3, "1" * 32)
        assert own.result(20) != other.result(20)
        have_theirs.set()
        assert lowest.result(20) == own.result()


def test_an_interrupt_while_the_lowest_rank_begins_to_answer_ends_that(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise the thread that answers would give this epoch to the ranks of the next attempt."""
    store, threads = DictStore(), busy_threads()

    def interrupted(*arguments: Any) -> None:
        borrow(*arguments)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(epoch, "borrow", interrupted)
        with (
            pytest.raises(KeyboardInterrupt),
            agreed_epoch(store, MEMBERS, 1, time.monotonic() + 20),
        ):
            pytest.fail("it was interrupted")
    end = time.monotonic() + 20
    while busy_threads() > threads:
        assert time.monotonic() < end
        time.sleep(0.01)
    first, *others = attempt(store)
    assert others == [first, first]
