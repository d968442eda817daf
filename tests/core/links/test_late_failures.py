"""Failures while a group makes links on demand: which end the group, and which do not."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import threading
import time
from typing import Any

import numpy as np
import pytest

from sealring import _native
from sealring.core import handshake
from sealring.core.engine import link_ends
from sealring.core.engine.endpoint import Endpoint
from sealring.core.engine.mailbox import ANYONE
from sealring.core.handshake import peers
from sealring.core.handshake.terms import PipeName
from sealring.core.links import agreement, dialer, exchange, link, threads
from sealring.core.links.arrivals import Arrival
from sealring.core.links.dialer import Dialer
from sealring.core.links.listener import Listener
from sealring.core.schedule import Algorithm
from sealring.errors import PeerSilent, PeerUnreachable, SealringError
from tests.core.handshake.meeting import soon
from tests.core.links.teams import SIZE, Team, team


def but(*ranks: int) -> list[int]:
    return [rank for rank in range(SIZE) if rank not in ranks]


def receive(one: Team, rank: int, peer: int, timeout_s: float) -> int:
    """Returns the rank from which a message came."""
    box, there = one.groups[rank].mailbox, np.zeros(10)
    memory = (there.ctypes.data, there.nbytes)
    return box.wait(box.submit(_native.Message(False, peer, 1, memory, timeout_s)))


def send(one: Team, rank: int, peer: int, timeout_s: float) -> int:
    box, there = one.groups[rank].mailbox, np.ones(10)
    memory = (there.ctypes.data, there.nbytes)
    return box.wait(box.submit(_native.Message(True, peer, 1, memory, timeout_s)))


def give_up_after(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    monkeypatch.setattr(exchange, "_CLOSED_SECONDS", seconds)


@pytest.mark.threat("J22")
def test_a_member_that_runs_no_python_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stopped member's kernel accepts connections, and the message has a longer timeout."""
    give_up_after(monkeypatch, 0.5)
    monkeypatch.setattr(peers, "_ANSWER_SECONDS", 0.2)
    plain, back, held = Listener.advance_soon, threading.Event(), threading.Event()
    with team() as one:
        late = one.groups[8].engine.exchange
        assert late is not None
        stopped = late.listener
        del late

        def advance(self: Listener, one: Arrival) -> None:
            if self is stopped:
                held.set()
                back.wait(20.0)
            plain(self, one)

        monkeypatch.setattr(Listener, "advance_soon", advance)

        def call(rank: int) -> int:
            if rank == 3:
                return send(one, 3, 8, 30.0)
            assert held.wait(20.0)
            time.sleep(2.0)
            back.set()
            return receive(one, 8, 3, 30.0)

        assert one.all(call, *but(3, 8)) == [8, 3]


@pytest.mark.threat("J22")
def test_members_that_do_not_answer_hold_up_no_other() -> None:
    """More members are silent than there are threads that dial."""
    reached = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()

        class Book:
            def lookup(self, rank: int) -> tuple[tuple[str, int], ...]:
                return (address,)

        def attempt(sock: socket.socket, pipe: PipeName) -> Any:
            if pipe.peer < 20:
                raise PeerUnreachable("no answer", peer=pipe.peer)
            sock.close()
            return reached.set

        failures: list[SealringError] = []
        reaching = Dialer(Book(), attempt, lambda _, error: failures.append(error))
        for rank in range(21):
            reaching.dial(PipeName(rank))
        try:
            assert reached.wait(10.0)
            assert not failures
        finally:
            reaching.stop()


@pytest.mark.threat("J22")
def test_members_that_do_not_answer_keep_no_sender_from_a_receive_from_anyone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rank 11 dials all members and waits for the first ones, before rank 7 has its turn."""
    monkeypatch.setattr(dialer, "_THREADS", 2)
    plain = Listener.take_turn
    with team() as one:
        lates = [one.groups[rank].engine.exchange for rank in range(6)]
        stopped = [late.listener for late in lates if late is not None]
        del lates

        def turn(self: Listener) -> float | None:
            if self not in stopped:
                return plain(self)
            time.sleep(0.005)  # unread bytes stay there, so the next turn comes at once
            return None

        monkeypatch.setattr(Listener, "take_turn", turn)

        def call(rank: int) -> int:
            if rank == 11:
                return receive(one, 11, ANYONE, 30.0)
            time.sleep(0.5)
            return send(one, 7, 11, 6.0)

        assert one.all(call, *but(7, 11)) == [11, 7]
        stopped.clear()


def test_members_that_do_not_answer_for_messages_hold_up_no_collective(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As many members accept connections and stay silent as there are dialing threads."""
    monkeypatch.setattr(dialer, "_THREADS", 2)
    with team() as one, socket.create_server(("127.0.0.1", 0)) as silent:
        late = one.groups[11].engine.exchange
        assert late is not None
        members = late.agreed.members
        assert isinstance(members, dict)
        nowhere = json.dumps([silent.getsockname()]).encode()
        for rank in range(6):
            members[rank] = members[rank]._replace(stated_addresses=nowhere)
        late.want("messages", range(6))
        late.want("collectives", [7])
        until = time.monotonic() + 5  # each silent member is waited for twice as long
        while not late.pipes.by_name[PipeName(7, "collectives")].open:
            assert time.monotonic() < until
            time.sleep(0.01)
        del late, members


def test_a_pipe_that_could_not_be_taken_is_dialed_though_the_dialer_had_seen_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rank 3's connection takes the pipe's place just before rank 8 dials, and then fails."""
    plain, failed = agreement.settle_as_acceptor, threading.Event()

    def settle(channel: Any, transport: Any, reserve: Any) -> Any:
        if failed.is_set():
            return (yield from plain(channel, transport, reserve))
        failed.set()
        reserve()
        time.sleep(1.0)  # meanwhile rank 8's turn to dial comes
        raise PeerUnreachable("not now")

    with team() as one:
        late = one.groups[8].engine.exchange
        assert late is not None
        monkeypatch.setattr(exchange, "settle_as_acceptor", settle)
        late.want("messages", [3], after=0.5)
        name, worker = PipeName(8, "messages"), one.workers[3]
        other = one.groups[3].engine.exchange
        assert other is not None
        terms = other.terms_of(name)
        with contextlib.closing(
            socket.create_connection(late.agreed.members[8].addresses[0])
        ) as sock:
            channel = handshake.dial(sock, worker.credentials, terms, 8, soon(), worker.sessions)
            with pytest.raises(PeerUnreachable, match="not now"):
                channel.receive(soon())
        until = time.monotonic() + 20
        while not late.pipes.by_name[PipeName(3, "messages")].open:
            assert time.monotonic() < until
            time.sleep(0.01)
        del late, other, channel


def test_a_receive_from_anyone_does_not_need_a_member_that_has_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    give_up_after(monkeypatch, 0.5)
    with team() as one:
        one.groups[5].close()

        def call(rank: int) -> int:
            if rank == 0:
                return receive(one, 0, ANYONE, 30.0)
            time.sleep(2.0)
            return send(one, 11, 0, 30.0)

        assert one.all(call, *but(0, 11)) == [11, 0]


def test_a_member_that_left_before_a_receive_from_anyone_ends_a_message_to_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    give_up_after(monkeypatch, 0.5)
    with team() as one:
        one.groups[5].close()

        def call(rank: int) -> int:
            if rank == 11:
                time.sleep(2.0)
                return send(one, 11, 0, 30.0)
            return receive(one, 0, ANYONE, 30.0)

        assert one.all(call, *but(0, 11)) == [11, 0]
        assert "a link cannot be made" not in caplog.text
        assert one.all(lambda rank: send(one, rank, 5, 30.0), *but(0)) == [("group.peer_lost", 5)]


def test_a_receive_from_anyone_learns_how_the_group_had_failed() -> None:
    """Rank 3 has failed before rank 8 calls, and rank 8 has no link at all."""
    with team() as one:
        assert one.all(lambda rank: receive(one, rank, 5, 1.0), *but(3)) == [
            ("group.peer_silent", 5)
        ]
        assert one.all(lambda rank: receive(one, rank, ANYONE, 60.0), *but(8)) == [
            ("group.peer_silent", 5)
        ]


def test_a_receive_from_anyone_learns_how_the_group_fails() -> None:
    """Rank 3 fails while rank 8 waits."""
    with team() as one:

        def call(rank: int) -> int:
            return receive(one, 3, 5, 4.0) if rank == 3 else receive(one, 8, ANYONE, 60.0)

        assert one.all(call, *but(3, 8)) == [("group.peer_silent", 5)] * 2


@pytest.mark.threat("J23")
def test_a_member_without_a_link_learns_how_the_group_has_failed() -> None:
    """Rank 3's receive from rank 5 ends the group there; later rank 8 asks rank 3."""
    with team() as one:
        assert one.all(lambda rank: receive(one, rank, 5, 1.0), *but(3)) == [
            ("group.peer_silent", 5)
        ]
        assert one.all(lambda rank: receive(one, rank, 3, 60.0), *but(8)) == [
            ("group.peer_silent", 5)
        ]
        assert one.all(lambda rank: send(one, rank, 3, 60.0), *but(10)) == [
            ("group.peer_silent", 5)
        ]


@pytest.mark.threat("J23")
def test_a_member_that_waits_to_be_dialed_learns_how_the_group_has_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rank 4, which should dial rank 3 for the ring, has failed; rank 3's link works."""
    monkeypatch.setattr(link_ends, "OTHER_END_SECONDS", 0.5)
    with team() as one:
        assert one.all(lambda rank: receive(one, rank, 5, 1.0), *but(4)) == [
            ("group.peer_silent", 5)
        ]

        def call(rank: int) -> None:
            values = np.ones(5000, dtype=np.float32)
            one.groups[rank].all_reduce(values, Algorithm.RING, timeout_s=20.0)

        assert one.all(call, *but(3)) == [("group.peer_silent", 5)]


@pytest.mark.threat("J23")
def test_a_member_that_has_left_is_named_by_ranks_that_are_linked_with_others_alone() -> None:
    """Rank 5 sees at once that its only linked member has left."""
    with team() as one:
        one.groups[4].close()

        def call(rank: int) -> None:
            values = np.ones(5000, dtype=np.float32)
            one.groups[rank].all_reduce(values, Algorithm.RING, timeout_s=60.0)

        assert set(one.all(call, 4)) == {("group.peer_lost", 4)}


def hold(
    monkeypatch: pytest.MonkeyPatch, owner: type, name: str, rank: int
) -> tuple[threading.Event, threading.Event]:
    """Stops this rank's next link at this method until the second event is set."""
    plain, held, goes_on = getattr(owner, name), threading.Event(), threading.Event()

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        own = self._names.rank if isinstance(self, Endpoint) else int(self._own_host[5:])
        if own == rank and not held.is_set():
            held.set()
            assert goes_on.wait(20.0)
        return plain(self, *args, **kwargs)

    monkeypatch.setattr(owner, name, method)
    return held, goes_on


@pytest.mark.parametrize(
    ("owner", "name"), [(Endpoint, "add_late_link"), (agreement.DialersMemory, "settle")]
)
def test_a_link_that_comes_after_the_failure_carries_it(
    monkeypatch: pytest.MonkeyPatch, owner: type, name: str
) -> None:
    """Rank 8 believes that the link exists. Rank 3 fails before its own end reaches its group."""
    with team() as one:
        held, goes_on = hold(monkeypatch, owner, name, 3)

        def call(rank: int) -> int:
            if rank == 8:
                assert held.wait(20.0)
                return receive(one, 8, 3, 20.0)
            with contextlib.suppress(PeerSilent):
                receive(one, 3, 8, 1.0)
            goes_on.set()
            return 0

        assert one.all(call, *but(3, 8)) == [0, ("group.peer_silent", 8)]


def test_a_link_that_comes_after_a_rank_has_left_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 8 receives from anyone, so it does not need the rank that left."""
    with team() as one:
        held, goes_on = hold(monkeypatch, Endpoint, "add_late_link", 3)

        def call(rank: int) -> int:
            if rank == 8:
                assert held.wait(20.0)
                return receive(one, 8, ANYONE, 20.0)
            if rank == 11:
                assert goes_on.wait(20.0)
                time.sleep(1.0)
                return send(one, 11, 8, 20.0)
            one.groups[3].mailbox.want(8)
            assert held.wait(20.0)
            one.groups[3].mailbox.close()
            goes_on.set()
            return 3

        assert one.all(call, *but(3, 8, 11)) == [3, 11, 8]


@pytest.mark.threat("J18")
def test_to_dismiss_a_link_holds_up_no_other_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 3 reads nothing that rank 8 sends; here one thread serves all listeners."""
    plain, held, goes_on = Endpoint.add_late_link, threading.Event(), threading.Event()

    def rest() -> None:
        held.set()
        goes_on.wait(20.0)

    def add(self: Any, peer: int, link: Any) -> Any:
        plain(self, peer, link)
        return rest if self._names.rank == 8 else None

    monkeypatch.setattr(Endpoint, "add_late_link", add)
    with team() as one:
        one.groups[3].mailbox.want(8)
        assert held.wait(20.0)

        def call(rank: int) -> int:
            return send(one, 5, 7, 10.0) if rank == 5 else receive(one, 7, 5, 10.0)

        assert one.all(call, *but(5, 7)) == [7, 5]
        goes_on.set()


@pytest.mark.threat("J18")
def test_a_group_that_ends_slowly_holds_up_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 5 reads neither more of a message nor rank 3's alert, while rank 8 links with rank 3."""
    turns: list[float] = []
    plain = Listener.take_turn

    def turn(self: Listener) -> float | None:
        began = time.monotonic()
        try:
            return plain(self)
        finally:
            turns.append(time.monotonic() - began)

    with team() as one:
        sent, there = np.zeros(1 << 30, np.uint8), np.zeros(1 << 30, np.uint8)
        memory = ((sent.ctypes.data, sent.nbytes), (there.ctypes.data, there.nbytes))

        def brief(rank: int) -> int:
            return send(one, 7, 5, 20.0) if rank == 7 else receive(one, 5, 7, 20.0)

        assert one.all(brief, *but(5, 7)) == [7, 5]
        taking = one.groups[5].mailbox.submit(_native.Message(False, 3, 2, memory[1], 60.0))

        def fail() -> None:
            box = one.groups[3].mailbox
            with pytest.raises(PeerSilent):
                box.wait(box.submit(_native.Message(True, 5, 2, memory[0], 1.0)))
            ended.append(time.monotonic())

        ended: list[float] = []
        failing = threading.Thread(target=fail)
        failing.start()
        while one.groups[3].mailbox.account()["sealed_bytes"] < 1 << 20:
            assert one.all(brief, *but(5, 7)) == [7, 5]
            stalled = time.monotonic()
        monkeypatch.setattr(Listener, "take_turn", turn)
        time.sleep(1.4)
        assert one.all(lambda rank: receive(one, rank, 3, 20.0), *but(8)) == [
            ("group.peer_silent", 5)
        ]
        failing.join()
        assert ended[0] - stalled > 2.5  # the end did take long
        assert max(turns) < 0.5
        del taking, failing, fail


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.threat("J21")
def test_the_kernel_lacks_memory_when_a_link_is_made(
    monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    """The peer has not been told that the link exists, so both ends try again."""
    plain, lacks = link.prepare_socket, iter(range(times))

    def prepare(sock: socket.socket) -> None:
        if next(lacks, None) is not None:
            raise OSError(errno.ENOBUFS, os.strerror(errno.ENOBUFS))
        plain(sock)

    with team() as one:
        monkeypatch.setattr(exchange, "prepare_socket", prepare)

        def call(rank: int) -> int:
            return send(one, 3, 8, 8.0) if rank == 3 else receive(one, 8, 3, 8.0)

        assert one.all(call, *but(3, 8)) == [8, 3]
        assert next(lacks, None) is None


@pytest.mark.parametrize("victim", [3, 8])
@pytest.mark.threat("J21")
def test_a_link_that_an_end_cannot_take_ends_the_group_at_both(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, victim: int
) -> None:
    """The peer believes that the link exists. Rank 3 dials, and rank 8 is dialed."""
    plain = Endpoint.add_late_link

    def add(self: Any, peer: int, link: Any) -> None:
        if self._names.rank == victim:
            raise MemoryError
        plain(self, peer, link)

    monkeypatch.setattr(Endpoint, "add_late_link", add)
    with team() as one:

        def call(rank: int) -> int:
            if rank == 3:
                return send(one, 3, 8, 20.0)
            time.sleep(1.0)
            return receive(one, 8, 3, 20.0)

        outcome = one.all(call, *but(3, 8))
        # A short message may be sent before the peer's failure is known.
        assert set(outcome) <= {("group.peer_lost", victim), 8}
        assert ("group.peer_lost", victim) in outcome
        assert "MemoryError" in caplog.text


def test_no_thread_left_to_dial(monkeypatch: pytest.MonkeyPatch) -> None:
    """The group ends with a named error at both ends, and closes as usual."""
    plain = threading.Thread.start

    def start(self: threading.Thread) -> None:
        if self.name == "sealring-dial":
            raise RuntimeError("can't start new thread")
        plain(self)

    with team() as one:
        monkeypatch.setattr(threads, "idle", [])
        monkeypatch.setattr(threading.Thread, "start", start)
        assert one.all(lambda rank: send(one, rank, 8, 20.0), *but(3)) == [("group.peer_lost", 3)]
        monkeypatch.undo()
        assert one.all(lambda rank: receive(one, rank, 3, 20.0), *but(8)) == [
            ("group.peer_lost", 3)
        ]
