"""Links of a large group: a tree at first; others when a program or a message needs them."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from sealring import _native
from sealring._native import Failure, FailureCode
from sealring.attest.evidence.admission import key_digest
from sealring.core.engine.collective import Collective, DType
from sealring.core.engine.link_ends import LateEnds
from sealring.core.handshake import dial
from sealring.core.handshake.statements import Statements, wrong_signer
from sealring.core.handshake.terms import PipeName
from sealring.core.identity import load_credentials, verification
from sealring.core.links import agreement, connections, forming, listener
from sealring.core.links.exchange import Exchange
from sealring.core.links.threads import ListeningThread
from sealring.core.schedule import Algorithm, Operation, Selection
from sealring.errors import (
    BrokerRefusal,
    DuplicateRank,
    PeerNotAdmitted,
    PeerUnreachable,
    SealringError,
)
from tests.codes import coded
from tests.core.handshake.meeting import soon
from tests.core.handshake.test_statements import fields_of
from tests.core.links.teams import SIZE, Team, team
from tests.core.links.worlds import ISSUER


def sum_of(team: Team, algorithm: Algorithm, elements: int = 5000) -> None:
    def one(rank: int) -> float:
        values = np.full(elements, rank, dtype=np.float32)
        team.groups[rank].all_reduce(values, algorithm)
        return float(values[-1])

    assert team.all(one) == [sum(range(team.size))] * team.size


def handshakes(team: Team) -> int:
    return sum(worker.sessions.handshakes for worker in team.workers) // 2


def open_inodes() -> set[int]:
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the listing's own descriptor is closed by now
            found.add(os.fstat(int(fd)).st_ino)
    return found


def test_programs_get_the_links_that_they_need_and_no_others() -> None:
    with team() as one:
        assert handshakes(one) == SIZE - 1, "a tree"
        sum_of(one, Algorithm.TREE)
        assert handshakes(one) == SIZE - 1, "and the tree's program is served by it"
        sum_of(one, Algorithm.RING)
        ring = {frozenset((rank, (rank + 1) % SIZE)) for rank in range(SIZE)}
        tree = {frozenset((rank, rank & (rank - 1))) for rank in range(1, SIZE)}
        assert handshakes(one) == len(ring | tree)
        sum_of(one, Algorithm.DIRECT)
        sum_of(one, Algorithm.RING)
        assert handshakes(one) == SIZE * (SIZE - 1) // 2


def meet(team: Team, rank: int, timeout_s: float = 60.0) -> None:
    """Runs a barrier, as dist.barrier() does."""
    group = team.groups[rank]
    algorithm = Selection(group.engine.topology)(Operation.BARRIER, 0)
    barrier = Collective(Operation.BARRIER, algorithm, [(0, 0)], 0, DType.BYTES)
    group._run(barrier, timeout_s)


def test_a_barrier_needs_no_further_link() -> None:
    with team() as one:
        for _ in range(2):
            assert one.all(lambda rank: meet(one, rank)) == [None] * SIZE
        assert handshakes(one) == SIZE - 1
        assert {len(group.engine.link_sockets) for group in one.groups} <= {1, 2, 3, 4}


@pytest.mark.parametrize("absent", [0, 7, 8])
def test_a_barrier_names_the_rank_that_does_not_come(absent: int) -> None:
    with team() as one:
        assert set(one.all(lambda rank: meet(one, rank, 4.0), absent)) == {
            ("group.peer_silent", absent)
        }


def swap(team: Team, rank: int) -> float:
    """Exchanges a value with the opposite rank; returns what this rank got."""
    other = SIZE - 1 - rank
    box = team.groups[rank].mailbox
    sent, received = np.full(10, float(rank)), np.zeros(10)
    messages = [
        box.submit(_native.Message(sends, other, 1, (there.ctypes.data, there.nbytes), 60.0))
        for sends, there in ((True, sent), (False, received))
    ]
    for message in messages:
        box.wait(message)
    return float(received[0])


def test_messages_between_ranks_without_a_link() -> None:
    with team() as one:
        assert one.all(lambda rank: swap(one, rank)) == [SIZE - 1.0 - rank for rank in range(SIZE)]


@pytest.mark.threat("J14")
def test_a_last_message_that_comes_after_the_acceptor_has_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    held: list[int] = []
    plain = agreement.DialersMemory.offer

    def offer(self: Any, peer: Any, hello: Any) -> Any:
        if not held:
            held.append(peer.rank)
            time.sleep(1.5)
        return plain(self, peer, hello)

    with team() as one:
        monkeypatch.setattr(connections, "_ACCEPT_SECONDS", 0.5)
        monkeypatch.setattr(agreement.DialersMemory, "offer", offer)
        others = [rank for rank in range(SIZE) if rank not in (3, 8)]
        assert one.all(lambda rank: swap(one, rank), *others) == [8.0, 3.0]
        assert held


@pytest.mark.threat("J24")
def test_two_that_dial_each_other_use_one_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each acceptor waits until both dial, and uses the link that it accepted first."""
    both = threading.Barrier(2)
    dialed = threading.Event()
    take, add = Exchange.take, Exchange.add

    def slow_take(self: Any, name: Any, channel: Any) -> Any:
        dialed.set()
        with contextlib.suppress(threading.BrokenBarrierError):
            both.wait(1.0)
        return take(self, name, channel)

    def slow_add(self: Any, channel: Any, memory: Any, *, dialer: bool) -> None:
        if not dialer:
            time.sleep(0.3)
        add(self, channel, memory, dialer=dialer)

    # Each end gets its own thread, as in two processes; one shared thread would delay one of them.
    monkeypatch.setattr(listener, "listening_thread", ListeningThread)
    monkeypatch.setattr(Exchange, "take", slow_take)
    monkeypatch.setattr(Exchange, "add", slow_add)
    with team() as one:

        def call(rank: int) -> float:
            if rank == 8:
                dialed.wait(10.0)  # rank 3's connection is admitted but not settled
            return swap(one, rank)

        others = [rank for rank in range(SIZE) if rank not in (3, 8)]
        assert one.all(call, *others) == [8.0, 3.0]


@pytest.mark.parametrize("algorithm", [Algorithm.RING, Algorithm.DIRECT])
@pytest.mark.threat("F1")
def test_a_rank_that_does_not_come_is_named_by_all(algorithm: Algorithm) -> None:
    """The silent rank is in the group but calls nothing; lower ranks wait for it to dial."""
    with team() as one:

        def call(rank: int) -> None:
            values = np.ones(5000, dtype=np.float32)
            one.groups[rank].all_reduce(values, algorithm, timeout_s=4.0)

        assert set(one.all(call, 7)) == {("group.peer_silent", 7)}


def test_a_forked_child_has_no_link_that_waits_for_its_first_collective() -> None:
    """A child with a copy of the link would keep the peer from seeing that its parent is gone."""
    with team() as one:
        early, late = one.groups[3].engine, one.groups[8].engine.late
        assert late is not None
        first = len(early.link_sockets)
        late.want([3])
        until = time.monotonic() + 20
        while len(early.link_sockets) == first:
            assert time.monotonic() < until
            time.sleep(0.01)
        time.sleep(0.2)  # until the native core has it as well
        links = {link.inode for link in early.link_sockets}
        assert links <= open_inodes()
        read, write = os.pipe()
        if (child := os.fork()) == 0:
            os.write(write, bytes([len(links & open_inodes())]))
            os._exit(0)
        os.waitpid(child, 0)
        os.close(write)
        with open(read, "rb") as answer:
            assert answer.read() == bytes([0])
        del early, late


@pytest.mark.threat("F1")
def test_a_rank_that_is_gone_is_named_by_all() -> None:
    with team() as one:
        one.groups[7].engine._native.interrupt()
        one.groups[7].close()

        def call(rank: int) -> None:
            values = np.ones(5000, dtype=np.float32)
            one.groups[rank].all_reduce(values, Algorithm.RING, timeout_s=20.0)

        assert set(one.all(call, 7)) == {("group.peer_lost", 7)}


@pytest.mark.threat("F2")
def test_a_member_that_is_no_longer_admitted_ends_the_group_where_no_link_leads_to_it() -> None:
    """One rank learns it from the broker and has no session with that member."""
    with team() as one:
        assert one.workers[3].sessions.with_rank(11) is None
        one.groups[3].engine.fail(Failure(FailureCode.NO_LONGER_ADMITTED, "it is out", 11))

        def call(rank: int) -> None:
            values = np.ones(5000, dtype=np.float32)
            one.groups[rank].all_reduce(values, Algorithm.TREE, timeout_s=20.0)

        assert set(one.all(call)) == {("group.no_longer_admitted", 11)}


@pytest.mark.threat("F2")
def test_every_members_key_is_known_to_every_member() -> None:
    """A revocation therefore ends the group also at members without a session with that member."""
    with team() as one:
        keys = {worker.rank: key_digest(worker.credentials.certificate) for worker in one.workers}
        agreed = [group.agreed for group in one.groups]
        for each in agreed:
            assert {rank: member.key for rank, member in each.members.items()} == keys
        assert {group.links_at_first for group in one.groups} == {1, 2, 3, 4}


@pytest.mark.threat("K3")
def test_a_group_after_an_eviction_takes_nothing_from_the_one_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taken: list[set[bytes]] = []

    def recorded(encoded: Iterable[bytearray]) -> Statements:
        said = list(encoded)
        taken.append({fields_of(bytes(each))[-1] for each in said})
        return Statements(said)

    monkeypatch.setattr(forming, "Statements", recorded)
    with team() as one:
        first = set().union(*taken)
        assert len(first) == SIZE
        taken.clear()
        survivors = [rank for rank in range(SIZE) if rank != 7]
        one.groups += one.all(lambda rank: one.workers[rank].form("again", survivors), 7)
        second = set().union(*taken)
        assert len(second) == SIZE - 1
        assert not first & second


@pytest.mark.threat("J25")
def test_only_a_process_that_the_group_was_formed_with_is_linked_later() -> None:
    """Another process has a valid certificate of that rank and knows the transcript."""
    with team() as one:
        late = one.groups[3].engine.exchange
        assert late is not None
        terms = late.terms_of(PipeName(3, "collectives"))
        second = replace(terms, rank=11, instance="1" * 32, host="elsewhere")
        address = one.groups[3].agreed.members[3].addresses[0]
        raises = pytest.raises(DuplicateRank, match="formed with another one")
        with socket.create_connection(address) as sock, raises:
            dial(sock, ISSUER.credentials(11, world=SIZE), second, 3, soon())
        del late
        sum_of(one, Algorithm.DIRECT)


@pytest.mark.parametrize("transcript", ["", "0" * 64])
@pytest.mark.threat("J25")
def test_a_later_link_must_state_the_groups_transcript(transcript: str) -> None:
    with team() as one:
        late = one.groups[11].engine.exchange
        assert late is not None
        other = replace(late.terms_of(PipeName(3, "collectives")), transcript=transcript)
        del late
        error = "handshake.wrong_group" if transcript else "handshake.malformed_setup"
        address = one.groups[3].agreed.members[3].addresses[0]
        with (
            socket.create_connection(address) as sock,
            pytest.raises(SealringError, check=coded(error)),
        ):
            dial(sock, one.workers[11].credentials, other, 3, soon())
        sum_of(one, Algorithm.DIRECT)


def test_links_are_made_after_the_time_for_forming_the_group_has_passed() -> None:
    with team() as one:
        for group in one.groups:
            late = group.engine.exchange
            assert late is not None
            late.listener.begin.__self__.deadline = time.monotonic()  # type: ignore[attr-defined]
        del late, group
        sum_of(one, Algorithm.RING)


def test_a_second_large_group_under_a_job_secret() -> None:
    """The members read their identities again, as init_process_group does for each group."""
    environ = {
        "SEALRING_SECRET": "3f9a1c5e7b2d4860a1f3c5d7e9b0826449ad17e35c8b60f2d1947ae3b5086c7d"
    }
    with team(formed=False) as one:
        for name in ("first", "second"):
            for worker in one.workers:
                worker.credentials = load_credentials(worker.rank, SIZE, environ)
            one.groups += one.all(lambda rank, name=name: one.workers[rank].form(name, range(SIZE)))
        first, second = one.groups[:SIZE], one.groups[SIZE:]
        for groups in (first, second):
            one.groups = groups
            sum_of(one, Algorithm.RING)
        one.groups = first + second
        del first, second, groups


def test_a_further_group_verifies_no_certificate_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each member still checks every other member's signature over the new transcript."""
    signatures: list[int] = []

    def counted(certificates: Any, made: dict[int, bytes], transcript: bytes) -> int | None:
        signatures.append(len(made))
        return wrong_signer(certificates, made, transcript)

    with team() as one:
        first = one.groups
        monkeypatch.setattr(verification, "_read", lambda *_: pytest.fail("verified again"))
        monkeypatch.setattr(forming, "wrong_signer", counted)
        one.groups = one.all(lambda rank: one.workers[rank].form("second", range(SIZE)))
        sum_of(one, Algorithm.TREE)
        one.groups += first
        del first
    assert signatures == [SIZE - 1] * SIZE


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (
            PeerNotAdmitted("it is out", peer=7, code="handshake.certificate_revoked"),
            FailureCode.NO_LONGER_ADMITTED,
        ),
        (
            BrokerRefusal("this worker is out", code="broker.worker_revoked"),
            FailureCode.NO_LONGER_ADMITTED,
        ),
        (PeerUnreachable("it is gone", peer=7), FailureCode.PEER_LOST),
    ],
)
def test_a_link_that_cannot_be_made_ends_the_group_with_its_reason(
    error: SealringError, code: FailureCode
) -> None:
    failures: list[Failure] = []

    class Owner:
        def add_late_link(self, peer: int, link: Any) -> None:
            raise AssertionError("no link is made here")

        def fail(self, failure: Failure) -> None:
            failures.append(failure)

    with team() as one:
        late = one.groups[3].engine.exchange
        assert late is not None
        owner = Owner()
        ends = LateEnds(owner, late, "messages", range(SIZE))
        # These are not ranks of the group: they are refused elsewhere, without an IndexError here.
        ends.want([SIZE, -5])
        name = PipeName(7, "messages")
        late.pipes.want(name)
        late.on_failed(name, error)
        del late, ends
        assert [failure.code for failure in failures] == [code]
        assert error.code in failures[0].text


@pytest.mark.parametrize("stated", [b"nowhere", b""])
def test_a_member_that_stated_no_addresses_is_named_when_it_is_dialed(stated: bytes) -> None:
    """The error comes at once, because a member's signed statement does not change."""
    failures: list[Failure] = []
    failed = threading.Event()

    class Owner:
        def add_late_link(self, peer: int, link: Any) -> None:
            raise AssertionError("no link is made here")

        def fail(self, failure: Failure) -> None:
            failures.append(failure)
            failed.set()

    with team() as one:
        late = one.groups[3].engine.exchange
        assert late is not None
        members = late.agreed.members
        assert isinstance(members, dict)
        members[11] = members[11]._replace(stated_addresses=stated)
        owner = Owner()
        LateEnds(owner, late, "messages", range(SIZE)).want([11])
        assert failed.wait(30)
        del late
    assert [(each.code, each.peer) for each in failures] == [(FailureCode.PEER_LOST, 11)]
    assert (
        "handshake.malformed_setup: rank 11's statement: the rendezvous store holds something that"
        in failures[0].text
    )


@pytest.mark.threat("J25")
def test_a_group_outlives_its_members_certificates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Links use the certificates with which the group was formed, and no other ones."""

    def expired(certificate: Any, now: float, where: str) -> None:
        raise PeerNotAdmitted(
            f"the certificate at {where} has ended", code="handshake.certificate_expired"
        )

    with team() as one:
        monkeypatch.setattr(verification, "_check_dates", expired)
        sum_of(one, Algorithm.RING)
        assert one.all(lambda rank: swap(one, rank)) == [SIZE - 1.0 - rank for rank in range(SIZE)]
        late = one.groups[11].engine.exchange
        assert late is not None
        terms = late.terms_of(PipeName(3, "collectives"))
        del late
        other = ISSUER.credentials(11, world=SIZE)
        address = one.groups[3].agreed.members[3].addresses[0]
        with (
            socket.create_connection(address) as sock,
            pytest.raises(PeerNotAdmitted, check=coded("handshake.certificate_expired")),
        ):
            dial(sock, other, terms, 3, soon())


def test_a_members_second_connection_is_not_reported_as_a_strangers(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with team() as one:
        others = [rank for rank in range(SIZE) if rank not in (3, 8)]
        assert one.all(lambda rank: swap(one, rank), *others) == [8.0, 3.0]
        late = one.groups[8].engine.exchange
        assert late is not None
        terms = late.terms_of(PipeName(3, "messages"))
        del late
        address = one.groups[3].agreed.members[3].addresses[0]
        raises = pytest.raises(PeerUnreachable, match="linked already")
        with socket.create_connection(address) as sock, raises:
            dial(sock, one.workers[8].credentials, terms, 3, soon())
    assert "linked already" not in caplog.text
