"""Which unproven connection is closed when there are too many."""

from __future__ import annotations

import resource
import socket

import pytest

from sealring.core.links import arrivals
from sealring.core.links.arrivals import LEAST_SECONDS, Arrival, UnprovenConnections, source_of

LATER = 1.0 + LEAST_SECONDS


def connection(source: str = "10.0.0.1", at: float = 0.0) -> Arrival:
    return Arrival(socket.socket(), source, 1, source, at)


def stage(*members: Arrival, most: int) -> UnprovenConnections:
    one = UnprovenConnections(most)
    for member in members:
        one.add(member, member.accepted)
        member.sock.close()
    return one


def test_the_one_that_keeps_us_waiting_longest_gives_way() -> None:
    first, second = connection(at=0.0), connection(at=0.5)
    full = stage(first, second, most=4)
    assert not full.has_room("10.0.0.1"), "half of the room is the most for one source"
    assert full.has_room("10.0.0.2")
    assert full.to_give_way("10.0.0.1", LATER) is first
    full.wait_for(first, 1.0)  # the first peer has answered
    assert full.to_give_way("10.0.0.1", LATER) is second


def test_one_that_is_being_served_does_not_give_way() -> None:
    first, second = connection(at=0.0), connection(at=0.5)
    full = stage(first, second, most=4)
    full.serve(first)
    assert full.to_give_way("10.0.0.1", LATER) is second
    full.serve(second)
    assert full.to_give_way("10.0.0.1", LATER) is None


def test_one_that_has_just_come_does_not_give_way() -> None:
    full = stage(connection(at=1.0), connection(at=1.0), most=4)
    assert full.to_give_way("10.0.0.1", 1.0 + LEAST_SECONDS / 2) is None
    assert full.to_give_way("10.0.0.1", LATER) is not None


@pytest.mark.threat("S7")
def test_a_flood_from_one_source_does_not_displace_another() -> None:
    worker = connection("10.0.0.9", at=0.0)
    flood = [connection("10.0.0.1", at=0.5) for _ in range(2)]
    third = connection("10.0.0.2", at=0.6)
    full = stage(worker, *flood, third, most=4)
    assert not full.has_room("10.0.0.3")
    assert full.to_give_way("10.0.0.3", LATER) is flood[0], "though the worker is older"
    full.remove(flood[0])
    assert full.has_room("10.0.0.3")


@pytest.mark.threat("S7")
def test_a_busy_source_that_answers_at_once_does_not_keep_newcomers_out() -> None:
    """An attacker with many addresses keeps two connections from one address busy."""
    silent = [connection(f"10.0.0.{host}", at=0.1) for host in range(2, 8)]
    busy = [connection("10.0.0.1", at=0.0) for _ in range(2)]
    full = stage(*busy, *silent, most=8)
    for one in busy:
        full.wait_for(one, LATER)
    assert full.to_give_way("10.0.0.9", LATER) is silent[0]
    assert full.to_give_way("10.0.0.1", LATER) is None, "the others have fewer than that source"


def test_of_sources_with_as_many_connections_the_one_gives_way_that_waited_for_longest() -> None:
    """The worker connected first, but others have waited for longer since."""
    worker = connection("10.0.0.9", at=0.0)
    silent = [connection(f"10.0.0.{host}", at=0.1) for host in range(1, 4)]
    full = stage(worker, *silent, most=4)
    full.wait_for(worker, 0.2)  # the worker has answered
    assert full.to_give_way("10.0.0.5", LATER) is silent[0]


def test_an_ipv6_network_is_one_source() -> None:
    assert source_of("2001:db8::1") == source_of("2001:db8::ffff:1") != source_of("2001:db8:1::1")
    assert source_of("10.0.0.1") != source_of("10.0.0.2")


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (1024, (256, 128)),
        (1 << 20, (arrivals.MOST_SILENT, arrivals.MOST_GREETING)),
        (resource.RLIM_INFINITY, (arrivals.MOST_SILENT, arrivals.MOST_GREETING)),
    ],
)
def test_they_leave_descriptors_to_the_worker(
    files: int, expected: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (files, files))
    assert arrivals.limits() == expected


@pytest.mark.threat("J20")
def test_several_listeners_share_what_one_may_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 1024))
    silent, greeting = arrivals.limits()
    for listeners in range(2, 9):
        assert arrivals.limits(listeners) == (silent, greeting), "the others hold none"
        shares = arrivals.limits(listeners, silent, greeting)
        assert shares[0] * listeners <= silent
        assert shares[1] * listeners <= greeting
        assert arrivals.limits(listeners, silent - 200, greeting - 100) == (200, 100)


def test_a_lower_limit_makes_those_give_way_that_waited_longest() -> None:
    stage = UnprovenConnections(8)
    waiting = [connection(at=float(at)) for at in range(6)]
    for at, one in enumerate(waiting):
        stage.add(one, float(at))
    stage.serve(waiting[0])
    stage.limit_to(4)
    assert stage.too_many() == waiting[1:3]
    for one in waiting:
        one.sock.close()


@pytest.mark.parametrize("refused", [False, True])
def test_a_peer_has_some_seconds(refused: bool) -> None:
    one = connection(at=0.0)
    one.waiting_since = 0.0
    if refused:
        one.refused = 0.0
    limit = arrivals.REFUSAL_SECONDS if refused else arrivals.SILENT_SECONDS
    assert not one.overdue(limit - 0.1)
    assert one.overdue(limit + 0.1)
    if not refused:  # a peer that sends a byte now and then
        one.waiting_since = arrivals.PROOF_SECONDS
        assert one.overdue(arrivals.PROOF_SECONDS + 0.1)
    one.waiting_since = None  # the connection is being served
    assert not one.overdue(100.0)
    one.sock.close()
