"""Members of a formed group open more lanes, but only lanes that both ends agreed on."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from sealring.core import links
from sealring.core.handshake import dial
from sealring.core.handshake.terms import PipeName
from sealring.core.links import Link
from sealring.core.links.exchange import Exchange
from sealring.errors import GroupClosed, GroupEnded, PeerUnreachable, SealringError, Unsupported
from tests.core.handshake.meeting import soon
from tests.core.links.teams import Team, team

LANES = 4
"""The number of lanes, including the first one."""


@pytest.fixture
def one() -> Iterator[Team]:
    with team(3) as three:
        yield three


def exchange(one: Team, rank: int) -> Exchange:
    found = one.groups[rank].engine.exchange
    assert found is not None
    return found


def opened(one: Team, rank: int, within_s: float = 20.0, count: int = LANES) -> list[Link]:
    others = [each for each in range(one.size) if each != rank]
    names = [PipeName(peer, "collectives", lane) for peer in others for lane in range(1, count)]
    return exchange(one, rank).open_agreed(names, within_s)


def close(links: list[Link]) -> None:
    for link in links:
        link.discard()


def ask(one: Team, rank: int, peer: int, lane: int, **changes: Any) -> None:
    """Asks for a lane as a member does, and receives the peer's answer."""
    name = PipeName(peer, "collectives", lane)
    terms = replace(exchange(one, rank).terms_of(name), **changes)
    address = one.groups[rank].agreed.members[peer].addresses[0]
    worker = one.workers[rank]
    with contextlib.closing(socket.create_connection(address)) as sock:
        dial(sock, worker.credentials, terms, peer, soon(), worker.sessions).receive(soon())


@pytest.mark.parametrize("lower_after_s", [0.0, 5.0])
def test_both_ends_have_the_same_pipes(
    monkeypatch: pytest.MonkeyPatch, one: Team, lower_after_s: float
) -> None:
    """The pipes also agree if both ends dial each other."""
    monkeypatch.setattr(links.exchange, "OTHER_END_SECONDS", lower_after_s)
    found = one.all(lambda rank: opened(one, rank))
    pairs = {(rank, link.peer, link.lane): link for rank in range(3) for link in found[rank]}
    assert set(pairs) == {
        (rank, peer, lane)
        for rank in range(3)
        for peer in range(3)
        for lane in range(1, LANES)
        if rank != peer
    }
    for rank in range(3):
        lanes = [link.lane for link in found[rank]]
        assert lanes == sorted(lanes)
    keys = set()
    for (rank, peer, lane), link in pairs.items():
        other = pairs[peer, rank, lane]
        assert link.send_key == other.receive_key
        keys.add(bytes(link.send_key))
        other.socket.settimeout(5)
        link.socket.send(b"%d%d" % (rank, lane))
        assert other.socket.recv(9) == b"%d%d" % (rank, lane)
    assert len(keys) == len(pairs), "each lane and direction has a key of its own"
    for each in found:
        close(each)


def test_a_rank_that_agrees_later_is_waited_for(one: Team) -> None:
    def call(rank: int) -> list[Link]:
        time.sleep(0.3 if rank == 0 else 0.0)
        return opened(one, rank)

    found = one.all(call)
    assert [len(each) for each in found] == [2 * (LANES - 1)] * 3
    for each in found:
        close(each)


@pytest.mark.threat("N5")
def test_a_rank_that_never_agrees_is_named_in_time(one: Team) -> None:
    open_before = len(os.listdir("/proc/self/fd"))

    def call(rank: int) -> str:
        with pytest.raises(PeerUnreachable) as caught:
            opened(one, rank, 1.0)
        return str(caught.value)

    for why in one.all(call, 0):
        assert "to rank 0 was not opened in time" in why
    until = time.monotonic() + 10
    while len(os.listdir("/proc/self/fd")) > open_before:
        assert time.monotonic() < until
        time.sleep(0.01)


@pytest.mark.threat("N5")
def test_a_rank_that_has_given_up_refuses_for_good(one: Team) -> None:
    """The rank that asks later therefore need not wait for its own timeout."""
    with pytest.raises(PeerUnreachable, match="was not opened in time"):
        opened(one, 0, 0.1)
    began = time.monotonic()
    with pytest.raises(Unsupported, match="was not opened in time"):
        opened(one, 1, 60.0)
    assert time.monotonic() - began < 30


@pytest.mark.parametrize("gone", [0, 1, 2])
def test_a_rank_that_has_ended_is_named_by_all(monkeypatch: pytest.MonkeyPatch, gone: int) -> None:
    """The error is the same whichever end of a pair dials."""
    monkeypatch.setattr(links.exchange, "OTHER_END_SECONDS", 0.2)
    monkeypatch.setattr(links.exchange, "_CLOSED_SECONDS", 0.5)
    with team(3) as one:
        exchange(one, gone).stop()

        def call(rank: int) -> str:
            names = [PipeName(gone, "messages")]
            with pytest.raises(PeerUnreachable, check=lambda error: error.peer == gone) as caught:
                exchange(one, rank).open_agreed(names, 60.0)
            return str(caught.value)

        for why in one.all(call, gone):
            assert f"rank {gone} has ended" in why


def test_a_lower_rank_learns_that_the_higher_one_has_given_up(
    monkeypatch: pytest.MonkeyPatch, one: Team
) -> None:
    """Rank 0 refuses only rank 2, which gives up; rank 1 asks later and learns that."""
    monkeypatch.setattr(links.exchange, "OTHER_END_SECONDS", 0.2)
    with pytest.raises(PeerUnreachable, match="was not opened in time"):
        exchange(one, 0).open_agreed([PipeName(2, "messages")], 0.1)

    for rank, peers in ((2, (0, 1)), (1, (2,))):
        names = [PipeName(peer, "messages") for peer in peers]
        with pytest.raises(Unsupported, match="messages to rank 2 was not opened in time"):
            exchange(one, rank).open_agreed(names, 60.0)


@pytest.mark.threat("N4")
def test_no_lane_is_taken_that_was_not_agreed_on(one: Team) -> None:
    with pytest.raises(
        PeerUnreachable, match="rank 0 has not agreed to lane 1 of collectives to rank 2 yet"
    ):
        ask(one, 2, 0, 1)
    found: list[Any] = []
    with contextlib.ExitStack() as both:
        for rank in (0, 1, 2):
            thread = threading.Thread(target=lambda rank=rank: found.append(opened(one, rank)))
            thread.start()
            both.callback(thread.join)
    with pytest.raises(PeerUnreachable, match="linked already"):
        ask(one, 2, 0, 1)  # asks a second time
    with pytest.raises(PeerUnreachable, match=f"not agreed to lane {LANES} of"):
        ask(one, 2, 0, LANES)
    for each in found:
        close(each)


@pytest.mark.threat("N4")
def test_a_member_that_asks_without_end_leaves_nothing(one: Team) -> None:
    """Asks for lanes that were not agreed on, in another epoch, and for its first lane."""

    def descriptors() -> int:
        until = time.monotonic() + 10
        while exchange(one, 0).listener.connections:
            assert time.monotonic() < until
            time.sleep(0.01)
        return len(os.listdir("/proc/self/fd"))

    before = descriptors()
    for lane in range(63):
        with pytest.raises(PeerUnreachable):
            ask(one, 2, 0, lane)
        with pytest.raises(SealringError):
            ask(one, 2, 0, lane, epoch="9")
    assert descriptors() <= before
    assert {name.lane for name in exchange(one, 0).pipes.by_name} == {0}


def test_a_group_that_ends_ends_the_waiting(one: Team) -> None:
    waiting = threading.Timer(0.3, lambda: exchange(one, 1).refuse_from_now(GroupClosed("it ends")))
    waiting.start()
    with pytest.raises(GroupEnded, match="has failed"):
        opened(one, 1, 60.0)
    waiting.join()


@pytest.mark.parametrize("objector", [0, 1, 2])
def test_an_objection_ends_it_for_all(one: Team, objector: int) -> None:
    """The outcome is the same whichever end of a pair dials."""

    def call(rank: int) -> str:
        objection = "my GPU is old" if rank == objector else ""
        names = [PipeName(peer, "messages") for peer in range(one.size) if peer != rank]
        with pytest.raises(Unsupported) as caught:
            exchange(one, rank).open_agreed(names, 30.0, objection)
        return str(caught.value)

    for why in one.all(call):
        assert "my GPU is old" in why
