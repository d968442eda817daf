"""A member changes what it passes on while a group forms: no honest member gets a group.

Members agree along a tree, so most statements pass through other members. The liar is rank 4: ranks
5 and 6 are below it, rank 0 above it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.serialization import Encoding

from sealring import _native
from sealring.core.handshake.statements import (
    Statement,
    commitment_to,
    encode_bundle,
    parse_bundle,
)
from sealring.core.links import connections, forming, mesh, settling, tree
from sealring.core.schedule import Algorithm
from sealring.errors import HandshakeError, WrongPeer, named
from sealring.lab.bench.forming import LightGroup
from tests.core.handshake.test_statements import fields_of
from tests.core.links.teams import SIZE, team
from tests.core.links.worlds import ISSUER, world

LIAR, VICTIM = 4, 5
UP, DOWN, AGREED = 1, 2, 3
Entries = dict[int, bytearray]


def lying(monkeypatch: pytest.MonkeyPatch, change: Callable[[int, int, Entries], None]) -> None:
    """Lets `change` alter what the liar passes on; it gets the direction, receiver and entries."""
    plain = tree.TreeExchange.__init__

    def make(self: Any, members: Any, rank: int, conversation: Any, send: Any) -> None:
        def altered(receiver: int, message: bytearray) -> None:
            head = 33 if message[0] == AGREED else 1  # with the transcript
            entries = parse_bundle(message[head:])
            change(UP if message[0] == UP else DOWN, receiver, entries)
            if message[0] == UP:  # the liar must not find its own lie when it comes down again
                kept = entries.keys() & self._collected.keys()
                self._collected.update({rank: bytearray(entries[rank]) for rank in kept})
            send(receiver, message[:head] + encode_bundle(entries))

        plain(self, members, rank, conversation, altered if rank == LIAR else send)

    monkeypatch.setattr(tree.TreeExchange, "__init__", make)


def forged(entries: Entries, **changes: Any) -> None:
    """Changes fields of the victim's statement in `entries`, if this round has statements."""
    if VICTIM not in entries or len(entries[VICTIM]) < 200:
        return
    entries[VICTIM] = replace(said_in(entries[VICTIM]), **changes).encode()


def said_in(raw: bytearray) -> Statement:
    rank, instance, host, addresses, certificate, commitment, secret = fields_of(bytes(raw))
    return Statement(
        int.from_bytes(rank, "big"),
        instance.decode(),
        host.decode(),
        addresses,
        certificate,
        commitment,
        _native.Secret(secret),
    )


def outcome(expected: str) -> dict[int, HandshakeError]:
    """Returns the errors of the honest members; none may prove another honest member a liar."""
    errors: dict[int, HandshakeError] = {}
    with team(formed=False) as one:

        def form(rank: int) -> None:
            try:
                one.workers[rank].form("default", range(SIZE), timeout_s=20.0).close()
            except HandshakeError as error:
                errors[rank] = error

        one.all(form)
    del errors[LIAR]
    assert {rank: error.code for rank, error in errors.items()} == dict.fromkeys(
        set(range(SIZE)) - {LIAR}, expected
    )
    for rank, error in errors.items():
        if error.reported_by is not None:
            assert error.reported_by in neighbours(rank)
            assert not error.proven
        if error.peer != LIAR:
            # It is proven that a neighbour sent the error, but not that the error is true.
            assert not error.proven or f"rank {error.peer} at " in str(error)
    return errors


def neighbours(rank: int) -> set[int]:
    return forming.first_links(range(SIZE), rank, everybody=False)


@pytest.mark.threat("J7")
def test_anothers_contribution_replaced_on_the_way_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A liar knows the secret without a lie; to choose it, it must replace all contributions."""
    chosen = _native.Secret.random(32)
    lying(
        monkeypatch,
        lambda way, _, entries: forged(entries, contribution=chosen) if way == UP else None,
    )
    outcome("handshake.malformed_setup")


@pytest.mark.threat("J7")
def test_two_different_accounts_of_a_member(monkeypatch: pytest.MonkeyPatch) -> None:
    """The victim receives its own statement; all other members receive a changed one."""
    chosen = _native.Secret.random(32)
    words: list[bytearray] = []

    def change(way: int, receiver: int, entries: Entries) -> None:
        if way == UP and len(entries[VICTIM]) > 200:
            words.append(bytearray(entries[VICTIM]))
            forged(entries, contribution=chosen)
        elif way == DOWN and receiver == VICTIM and len(entries[VICTIM]) > 200:
            entries[VICTIM] = words[0]

    lying(monkeypatch, change)
    outcome("handshake.wrong_group")


@pytest.mark.parametrize(
    "changes",
    [{"addresses": b'[["127.0.0.1",9]]'}, {"commitment": commitment_to(bytearray(32))}],
    ids=["address", "commitment"],
)
@pytest.mark.threat("J7")
def test_words_of_the_liars_choice(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, bytes]
) -> None:
    """The liar changes the statement only for rank 6, which is below it."""
    lying(
        monkeypatch,
        lambda way, receiver, entries: (
            forged(entries, **changes) if (way, receiver) == (DOWN, 6) else None
        ),
    )
    outcome("handshake.wrong_group")


@pytest.mark.parametrize(
    ("rank", "error"),
    [(VICTIM, "handshake.wrong_group"), (LIAR, "handshake.wrong_rank")],
    ids=["of another process of that rank", "of the liar itself"],
)
@pytest.mark.threat("J7")
def test_another_certificate_in_a_members_place(
    monkeypatch: pytest.MonkeyPatch, rank: int, error: str
) -> None:
    """The authority signed this certificate, and the liar may even have its key."""
    other = ISSUER.credentials(rank, world=SIZE).certificate.public_bytes(Encoding.DER)

    def change(way: int, receiver: int, entries: Entries) -> None:
        if (way, receiver) == (DOWN, 6):
            forged(entries, certificate=other)

    lying(monkeypatch, change)
    outcome(error)


@pytest.mark.parametrize("victim", [5, 7])
@pytest.mark.threat("J8")
def test_a_lie_to_the_victims_parent_about_the_victims_own_words(
    monkeypatch: pytest.MonkeyPatch, victim: int
) -> None:
    """Rank 6 once passed the changed bytes on, and rank 7 then falsely proved rank 6 a liar."""

    def change(way: int, receiver: int, entries: Entries) -> None:
        if (way, receiver) == (DOWN, 6 if victim == 7 else victim) and len(entries[7]) > 200:
            entries[victim][-1] ^= 1

    lying(monkeypatch, change)
    errors = outcome("handshake.malformed_setup")
    witness = 6 if victim == 7 else victim
    assert (errors[witness].peer, errors[witness].proven) == (LIAR, True)
    assert f"rank {LIAR} changed what rank {victim} had said" in str(errors[witness])
    # All others learn from a neighbour that the error is about the liar.
    assert {error.peer for error in errors.values()} == {LIAR}


@pytest.mark.parametrize("told", [6, 0])
@pytest.mark.threat("J8")
def test_a_contribution_of_zeros_in_anothers_name(
    monkeypatch: pytest.MonkeyPatch, told: int
) -> None:
    """The error must name the rank that passed it on; once it named rank 5, as if proven."""

    def change(way: int, receiver: int, entries: Entries) -> None:
        if receiver == told:
            forged(entries, contribution=_native.Secret.zeros(32))

    lying(monkeypatch, change)
    errors = outcome("handshake.malformed_setup")
    if told == 6:  # several members report to the root, and any of them may be the first
        assert errors[6].peer == LIAR
        assert not errors[6].proven
        assert "rank 5 contributed no randomness (reported by rank 4" in str(errors[6])


@pytest.mark.threat("J8")
def test_an_innocent_member_accused_in_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    """The liar reports that rank 9 lied. All members hear it, but it proves nothing."""

    def change(way: int, _: int, entries: Entries) -> None:
        if way == UP:
            raise WrongPeer(
                "rank 9 did not sign", peer=9, proven=True, code="handshake.wrong_group"
            )

    lying(monkeypatch, change)
    errors = outcome("handshake.wrong_group")
    assert {(error.peer, error.proven) for error in errors.values()} == {(9, False)}
    assert errors[0].reported_by == errors[VICTIM].reported_by == LIAR
    assert f"rank {LIAR} at " in str(errors[0])


@pytest.mark.threat("J7")
def test_a_member_left_out_or_spoken_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def change(way: int, _: int, entries: Entries) -> None:
        if way == UP:
            entries[9] = entries.pop(VICTIM)

    lying(monkeypatch, change)
    outcome("handshake.malformed_setup")


@pytest.mark.threat("J7")
def test_a_signature_of_the_liars(monkeypatch: pytest.MonkeyPatch) -> None:
    def change(way: int, _: int, entries: Entries) -> None:
        if way == UP and len(entries[VICTIM]) == 64:
            entries[VICTIM] = entries[LIAR]

    lying(monkeypatch, change)
    with team(formed=False) as one:
        made = one.form(timeout_s=20.0)
        assert not any(isinstance(each, LightGroup) for each in made)
        kinds = {kind for rank, (kind, _) in enumerate(made) if rank != LIAR}
        assert kinds <= {"handshake.wrong_group", "handshake.malformed_setup"}


@pytest.mark.threat("J9")
def test_a_signature_changed_for_one_member_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """That member refuses. Without a round of confirmations the others would have the group."""
    said_down = 0

    def change(way: int, receiver: int, entries: Entries) -> None:
        nonlocal said_down
        said_down += (way, receiver) == (DOWN, VICTIM)
        if (way, receiver, said_down) == (DOWN, VICTIM, 2):
            entries[0][0] ^= 1

    lying(monkeypatch, change)
    outcome("handshake.wrong_group")


@pytest.mark.parametrize("made_of", ["the liar's own", "the commitment", "another group's"])
@pytest.mark.threat("J9")
def test_a_confirmation_that_the_member_did_not_show(
    monkeypatch: pytest.MonkeyPatch, made_of: str
) -> None:
    """The liar substitutes what it could know before the member below it confirms."""
    commitments: list[bytes] = []

    def change(way: int, _: int, entries: Entries) -> None:
        if way == UP and len(entries[VICTIM]) > 200:
            commitments.append(said_in(entries[VICTIM]).commitment)
        elif way == UP and len(entries[VICTIM]) == 32:
            entries[VICTIM] = {
                "the liar's own": entries[LIAR],
                "the commitment": bytearray(commitments[-1]),
                "another group's": earlier.setdefault("shown", bytearray(entries[VICTIM])),
            }[made_of]

    earlier: dict[str, bytearray] = {}
    lying(monkeypatch, change)
    with team(formed=False) as one:
        if made_of == "another group's":
            one.form(timeout_s=20.0)
            assert len(one.groups) == SIZE
        first, made = one.groups, one.form(timeout_s=20.0)
        assert not one.groups
        one.groups = first
        del first
        assert {made[rank][0] for rank in set(range(SIZE)) - {LIAR}} == {"handshake.wrong_group"}


@pytest.mark.threat("J9")
def test_a_confirmation_changed_for_the_members_below(monkeypatch: pytest.MonkeyPatch) -> None:
    """The members below refuse after others already have the group, which then lose them."""
    said_down = 0

    def change(way: int, receiver: int, entries: Entries) -> None:
        nonlocal said_down
        said_down += (way, receiver) == (DOWN, 6)
        if (way, receiver, said_down) == (DOWN, 6, 3):
            entries[0][0] ^= 1

    lying(monkeypatch, change)
    with team(formed=False) as one:
        made = [None if isinstance(each, LightGroup) else each[0] for each in one.form(20.0)]
        assert made == [None] * 6 + ["handshake.wrong_group"] * 2 + [None] * 4

        def call(rank: int) -> None:
            values = np.ones(1000, dtype=np.float32)
            group = one.groups[rank if rank < 6 else rank - 2]
            group.all_reduce(values, Algorithm.RING, timeout_s=20.0)

        assert set(one.all(call, 6, 7)) == {("group.peer_lost", 6)}


@pytest.mark.parametrize("liar", [0, LIAR])
@pytest.mark.threat("J10")
def test_ready_before_the_members_have_agreed(monkeypatch: pytest.MonkeyPatch, liar: int) -> None:
    """Nothing is read after "ready", so neighbours would wait for the liar until their timeout."""
    plain = settling.Settling.say_linked

    def say_ready(self: Any, links: Any) -> None:
        if self._terms.rank != liar:
            plain(self, links)
            return
        for link in links:
            link.channel.send({"type": "ready", "transcript": "ab" * 32}, self._deadline)

    monkeypatch.setattr(settling.Settling, "say_linked", say_ready)
    with team(formed=False) as one:
        made = one.form(timeout_s=20.0)
        assert {kind for rank, (kind, _) in enumerate(made) if rank != liar} == {
            "handshake.malformed_setup"
        }


@pytest.mark.threat("J10")
def test_a_transcript_of_the_liars(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here all pairs are linked, though rank 3 is no neighbour of rank 0 in the tree."""
    plain = settling.Settling.say_linked

    def say_ready_too(self: Any, links: Any) -> None:
        plain(self, links)
        for link in links:
            if (self._terms.rank, link.rank) == (3, 0):
                link.channel.send({"type": "ready", "transcript": "ab" * 32}, self._deadline)

    monkeypatch.setattr(settling.Settling, "say_linked", say_ready_too)
    with world(4) as one:
        one.start_all()
        one.join()
        # The error is malformed_setup if rank 0 could not have agreed at that point.
        assert named(one.outcomes[0]) in ("handshake.wrong_group", "handshake.malformed_setup")
        assert isinstance(one.outcomes[0], HandshakeError)
        assert one.outcomes[0].peer == 3


@pytest.mark.threat("J10")
def test_another_transcript_in_the_last_rounds_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """Members below the liar refuse it; the others lose the liar or one of those members."""
    plain = tree.TreeExchange.pass_on

    def pass_on(self: Any, child: int) -> None:
        if self._rank == LIAR:
            self._passed_on = bytes([AGREED]) + bytes(32) + self._passed_on[33:]
        plain(self, child)

    monkeypatch.setattr(tree.TreeExchange, "pass_on", pass_on)
    with team(formed=False) as one:
        made = [None if isinstance(each, LightGroup) else each for each in one.form(20.0)]
        assert made[5:7] == [("handshake.wrong_group", LIAR)] * 2
        assert made[:5] + made[8:] == [None] * 9


@pytest.mark.parametrize("before", ["all rounds", "the last round"])
@pytest.mark.threat("J10")
def test_the_last_rounds_message_out_of_turn(monkeypatch: pytest.MonkeyPatch, before: str) -> None:
    """A parent presents an early round as the last one, or the last round as an early one."""
    plain = tree.TreeExchange.__init__

    def make(self: Any, members: Any, rank: int, conversation: Any, send: Any) -> None:
        def altered(receiver: int, message: bytearray) -> None:
            if message[0] == DOWN and before == "all rounds":
                message = bytearray([AGREED]) + bytearray(32) + message[1:]
            elif message[0] == AGREED and before == "the last round":
                message = bytearray([DOWN]) + message[33:]
            send(receiver, message)

        plain(self, members, rank, conversation, altered if rank == LIAR else send)

    monkeypatch.setattr(tree.TreeExchange, "__init__", make)
    with team(formed=False) as one:
        made = [None if isinstance(each, LightGroup) else each for each in one.form(20.0)]
        assert made[5] == made[6] == ("handshake.malformed_setup", LIAR)


@pytest.mark.parametrize("size", [4, SIZE])
@pytest.mark.threat("J15")
def test_one_key_on_the_links_and_another_in_the_statement(
    monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """Both keys are certified for the liar's rank; a broker would revoke only the stated one."""
    liar, plain = size - 1, forming.agree

    other = ISSUER.credentials(liar, world=size)

    def agree(current: Any, terms: Any, *rest: Any, sparse: bool) -> Any:
        shown = (lambda: other) if terms.rank == liar else current
        return plain(shown, terms, *rest, sparse=sparse)

    monkeypatch.setattr(mesh, "agree", agree)
    with team(size, formed=False) as one:
        made = one.form(timeout_s=20.0)
        assert {kind for rank, (kind, _) in enumerate(made) if rank != liar} == {
            "handshake.duplicate_rank"
        }


def test_a_certificate_of_an_unknown_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """The certificate parser raises an error that is not a ValueError."""

    def change(way: int, _: int, entries: Entries) -> None:
        if way == UP and len(entries[LIAR]) > 200:
            version = entries[LIAR].find(b"\xa0\x03\x02\x01\x02")
            assert version > 0
            entries[LIAR][version + 4] = 7

    lying(monkeypatch, change)
    outcome("handshake.malformed_setup")


def test_an_error_of_a_library_is_named_after_the_neighbour(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever a certificate parser raises, the set-up ends with one of the project's errors."""

    def read(*_: object) -> Any:
        raise KeyError("a parser's own error")

    monkeypatch.setattr(forming, "read_certificates", read)
    outcome("handshake.malformed_setup")


@pytest.mark.threat("J12")
def test_an_error_of_a_library_in_a_message_that_came_early(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rank 2 speaks for itself and for rank 3 before rank 3 is linked with rank 0."""
    connected, plain = connections.Connections.dialed, forming.read_certificates
    go_on, hear, early = tree.TreeExchange.go_on, settling.Settling.hear, threading.Event()

    def invent(self: Any) -> None:
        if self._rank == 2 and self.started and self._awaited and not self._sent_up:
            own = said_in(bytearray(self._collected[2]))
            said = Statement(
                3, own.instance, own.host, b"", b"strange", own.commitment, own.contribution
            )
            self._awaited, self._collected[3] = set(), said.encode()
        go_on(self)

    def read(statements: Any, *rest: Any) -> Any:
        if any(each.certificate == b"strange" for each in statements.members):
            raise KeyError("a parser's own error")
        return plain(statements, *rest)

    def late(self: Any, sock: Any, pipe: Any) -> Any:
        if (self._terms.rank, pipe.peer) == (3, 0):
            early.wait(10.0)
        return connected(self, sock, pipe)

    def heard(self: Any, link: Any) -> None:
        hear(self, link)
        if self._terms.rank == 0 and not self.exchange.started:
            early.set()

    monkeypatch.setattr(settling.Settling, "hear", heard)
    monkeypatch.setattr(tree.TreeExchange, "go_on", invent)
    monkeypatch.setattr(forming, "read_certificates", read)
    monkeypatch.setattr(connections.Connections, "dialed", late)
    with world(4) as one:
        one.start_all()
        one.join()
        assert early.is_set()
        assert set(one.errors().values()) == {"handshake.malformed_setup"}
