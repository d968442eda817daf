"""What the other members get if a member dies, refuses or falls silent while they agree."""

from __future__ import annotations

import re
import threading
import time
from collections import Counter
from typing import Any

import numpy as np
import pytest

from sealring.core.links import settling, tree
from sealring.core.links.mesh import MeshAttempt
from sealring.core.schedule import Algorithm
from sealring.errors import PeerUnreachable
from sealring.lab.bench.forming import LightGroup
from tests.core.links.teams import SIZE, Team, team
from tests.core.links.worlds import world

UP, AGREED = 1, 3


class Death(BaseException):
    """Kills a member in a test: it sends nothing more and its connections are cut."""


def dying(monkeypatch: pytest.MonkeyPatch, dead: int, way: int, receiver: int) -> None:
    """Makes a member die after it has sent its message of the last round to this neighbour.

    If the neighbour is its parent, the member dies only after the root has agreed, because an
    earlier death would end the attempt.
    """
    make, abort, ready = tree.TreeExchange.__init__, MeshAttempt.abort, settling.Settling.say_ready
    agreed = threading.Event()

    def say_ready(self: Any, links: Any) -> None:
        if self._terms.rank == 0:
            agreed.set()
        ready(self, links)

    def patched(self: Any, members: Any, rank: int, conversation: Any, send: Any) -> None:
        sent: Counter[tuple[int, int]] = Counter()

        def until_death(to: int, message: bytearray) -> None:
            kind = message[0]
            send(to, message)
            sent[kind, to] += 1
            if (kind, to, sent[kind, to]) == (way, receiver, 3 if way == UP else 1):
                assert way == AGREED or agreed.wait(20.0)
                raise Death

        make(self, members, rank, conversation, until_death if rank == dead else send)

    def cut(self: MeshAttempt, error: BaseException) -> None:
        if not isinstance(error, Death):
            abort(self, error)
            return
        for link in self._waiting.take_all(PeerUnreachable("dead")):
            link.channel.socket.close()
        self._stop()

    monkeypatch.setattr(tree.TreeExchange, "__init__", patched)
    monkeypatch.setattr(MeshAttempt, "abort", cut)
    monkeypatch.setattr(settling.Settling, "say_ready", say_ready)


def formed(one: Team, dead: int) -> tuple[list[int], set[str]]:
    """Returns which other members have the group, and the errors of the rest; keeps the groups."""

    def form(rank: int) -> Any:
        try:
            return one.workers[rank].form("default", range(SIZE), timeout_s=20.0)
        except Death:
            return None

    made = one.all(form)
    one.groups = [each for each in made if isinstance(each, LightGroup)]
    ranks = [rank for rank, each in enumerate(made) if isinstance(each, LightGroup)]
    return ranks, {each[0] for each in made if isinstance(each, tuple)}


@pytest.mark.parametrize(
    ("dead", "way", "receiver", "without"),
    [
        (4, UP, 0, {5, 6, 7}),
        (0, AGREED, 8, set()),
        (4, AGREED, 5, {6, 7}),
    ],
    ids=["after its confirmation", "a root that passed all on", "between two that are below it"],
)
@pytest.mark.threat("J9")
def test_a_death_in_the_last_round_is_a_lost_member_of_a_group_that_exists(
    monkeypatch: pytest.MonkeyPatch, dead: int, way: int, receiver: int, without: set[int]
) -> None:
    """This includes members that were linked with the dead one and waited for its "ready"."""
    dying(monkeypatch, dead, way, receiver)
    with team(formed=False) as one:
        ranks, errors = formed(one, dead)
        assert set(ranks) == set(range(SIZE)) - {dead} - without
        assert errors <= {"handshake.peer_unreachable"}

        def call(rank: int) -> None:
            values = np.ones(1000, dtype=np.float32)
            one.groups[ranks.index(rank)].all_reduce(values, Algorithm.RING, timeout_s=20.0)

        assert set(one.all(call, dead, *without)) == {("group.peer_lost", dead)}


def test_what_a_member_outside_the_tree_said_is_heard_after_the_agreement(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Rank 2 of 3 hears from rank 1 by way of rank 0 before it reads their own link."""
    hear = settling.Settling.hear

    def later(self: Any, link: Any) -> None:
        if (self._terms.rank, link.rank) != (2, 1):
            hear(self, link)

    monkeypatch.setattr(settling.Settling, "hear", later)
    with world(3) as one:
        one.start_all()
        one.join()
        assert [len(one.links(rank)) for rank in range(3)] == [2, 2, 2]
    assert "was lost" not in caplog.text


@pytest.mark.parametrize(("mute", "size"), [(7, 12), (0, 12), (3, 4)])
@pytest.mark.threat("J11")
def test_a_member_that_says_nothing_is_named_by_all(
    monkeypatch: pytest.MonkeyPatch, mute: int, size: int
) -> None:
    """The member next to the silent one names it first, and the others pass that on."""
    plain = settling.Settling.say_linked

    def say_linked(self: Any, links: Any) -> None:
        if self._terms.rank == mute:
            time.sleep(5.0)
            raise PeerUnreachable("it was mute")
        plain(self, links)

    monkeypatch.setattr(settling.Settling, "say_linked", say_linked)
    with world(size, timeout=2.0) as mesh:
        mesh.start_all()
        mesh.join()
        for rank in set(range(size)) - {mute}:
            error = mesh.outcomes[rank]
            assert isinstance(error, PeerUnreachable)
            assert f"rank {mute} did not finish" in str(error)
            assert error.peer == mute
            assert not error.proven


@pytest.mark.threat("J11")
def test_half_a_word_of_one_member_loses_no_other(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Rank 1 of 4 sends half of its "ready"; the others' come while rank 0 waits for it."""
    say, hear = settling.Settling.say_ready, settling.Settling.hear_ready
    waits = threading.Event()

    def say_ready(self: Any, links: Any) -> None:
        if self._terms.rank == 1:
            for link in links:
                link.channel.connection.send(bytes(2))  # half of a length
        elif self._terms.rank == 0 or waits.wait(20.0):
            say(self, links)

    def hear_ready(self: Any, link: Any) -> None:
        if (self._terms.rank, link.rank) == (0, 1):
            waits.set()
        hear(self, link)

    monkeypatch.setattr(settling.Settling, "say_ready", say_ready)
    monkeypatch.setattr(settling.Settling, "hear_ready", hear_ready)
    with world(4, timeout=3.0) as one:
        one.start_all()
        one.join()
    assert set(re.findall(r"rank (\d+) was lost", caplog.text)) == {"1"}
