"""Attacks on messages between ranks from the network: all are noticed."""

from __future__ import annotations

import numpy as np
import pytest

from sealring.core.engine.mailbox import ANYONE
from sealring.core.schedule import Algorithm, Operation
from sealring.errors import (
    GroupError,
    MissingRecord,
    PeerLost,
    PeerSilent,
    ReplayedRecord,
    TamperedRecord,
)
from sealring.limits import TAG_BYTES
from tests.core.engine import attacker
from tests.core.engine.cases import Case, tensors_of
from tests.core.engine.local_world import Change, LocalMail, LocalWorld, receive, send, slot

FILL = 0xEE


def values(size: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


class Letters:
    """Rank 0 sends rank 1 messages, one after the other, and then waits for its answer.

    It is the more patient of the two: where nothing comes, rank 1 is the first to see that.
    """

    def __init__(
        self,
        middle: dict[tuple[int, int], Change],
        *,
        sizes: tuple[int, ...] = (64, 64, 64),
        timeout_s: float = 20.0,
        **world: object,
    ) -> None:
        self.sent = [values(size, seed) for seed, size in enumerate(sizes)]
        self.got = [np.full(size, FILL, np.uint8) for size in sizes]
        answer = np.zeros(1, np.uint8)
        with LocalMail(2, middle=middle, **world) as mail:  # type: ignore[arg-type]
            zero, one = mail.mailboxes
            patience = timeout_s + 10

            def sends() -> None:
                messages_sent = [
                    send(zero, 1, tag, slot(message), patience, mail.caller(0))
                    for tag, message in enumerate(self.sent)
                ]
                for submitted in (*messages_sent, receive(zero, 1, 99, slot(answer), patience)):
                    zero.wait(submitted)

            def receives() -> None:
                for tag, memory in enumerate(self.got):
                    one.wait(receive(one, 0, tag, slot(memory), timeout_s, mail.caller(1)))
                one.wait(send(one, 0, 99, slot(answer), timeout_s))

            futures = [mail.pool.submit(part) for part in (sends, receives)]
            self.sender, self.receiver = (future.exception() for future in futures)
            for mailbox in mail.mailboxes:
                assert mailbox.release_gpu(timeout_s)  # streams go on, if the group has ended

    def untouched(self, message: int) -> bool:
        return bool((self.got[message] == FILL).all())


def assert_seen_by(error: BaseException | None, kind: type[GroupError], about: int) -> None:
    assert type(error) is kind, error
    assert isinstance(error, GroupError)
    assert (error.peer, error.reported_by) == (about, None)


@pytest.mark.parametrize("size", [64, 100_000])
@pytest.mark.threat("M1")
def test_nothing_of_a_message_is_seen(size: int) -> None:
    tap = attacker.Tap()
    letters = Letters({(0, 1): tap}, sizes=(size,))
    assert letters.sender is letters.receiver is None
    assert (letters.got[0] == letters.sent[0]).all()
    plain, stream = letters.sent[0].tobytes(), bytes(tap.stream)
    assert len(stream) > size
    assert not any(plain[at : at + 8] in stream for at in range(0, min(size, 4096), 8))


@pytest.mark.threat("M2")
def test_every_byte_of_a_message_flipped_in_turn() -> None:
    size = 4
    for offset in range(attacker.SEALED_HEADER_BYTES + size + TAG_BYTES):
        letters = Letters({(0, 1): attacker.Flip(offset, 0x10)}, sizes=(size, size))
        assert_seen_by(letters.receiver, TamperedRecord, about=0)
        assert letters.untouched(0), "nothing of a changed message reaches the user's memory"
        assert type(letters.sender) is TamperedRecord
        assert letters.sender.reported_by == 1


@pytest.mark.parametrize("kind", [kind for kind in attacker.Kind if kind < attacker.Kind.ANNOUNCE])
@pytest.mark.threat("M2")
def test_a_message_that_claims_to_be_of_a_collective(kind: attacker.Kind) -> None:
    """The header's fourth byte tells messages, collectives and the answers to both apart."""
    letters = Letters({(0, 1): attacker.Flip(3, attacker.Kind.ANNOUNCE ^ kind)})
    assert_seen_by(letters.receiver, TamperedRecord, about=0)
    letters = Letters({(1, 0): attacker.Flip(3, attacker.Kind.ACCEPT ^ kind)}, sizes=(100_000,))
    assert_seen_by(letters.sender, TamperedRecord, about=1)


@pytest.mark.threat("M2")
def test_a_long_message_changed_in_its_middle() -> None:
    flip = attacker.Flip(150_000, 1)
    letters = Letters({(0, 1): flip}, sizes=(200_000,))
    assert_seen_by(letters.receiver, TamperedRecord, about=0)
    # Its first record is whole; nothing of the changed one was written.
    assert (letters.got[0][140_000:] == FILL).all()


@pytest.mark.threat("M3")
def test_a_message_dropped() -> None:
    letters = Letters({(0, 1): attacker.drop(0)})
    assert_seen_by(letters.receiver, MissingRecord, about=0)
    assert letters.untouched(1), "what follows a gap is not delivered"


@pytest.mark.threat("M3")
def test_the_last_message_dropped() -> None:
    """No later record shows that it is missing, so it is noticed by the timeout."""
    letters = Letters({(0, 1): attacker.drop(0)}, sizes=(64,), timeout_s=0.5)
    assert {type(letters.sender), type(letters.receiver)} == {PeerSilent}


@pytest.mark.threat("M4")
def test_a_message_repeated() -> None:
    letters = Letters({(0, 1): attacker.repeat(0)})
    assert_seen_by(letters.receiver, ReplayedRecord, about=0)


@pytest.mark.threat("M4")
def test_two_messages_swapped() -> None:
    letters = Letters({(0, 1): attacker.swap(0)})
    assert_seen_by(letters.receiver, MissingRecord, about=0)


@pytest.mark.threat("M5")
def test_a_message_reflected_to_its_sender() -> None:
    taken = attacker.Mailbox()
    middle = {(0, 1): taken.collect(), (1, 0): taken.put_in_place_of(0, of=0)}
    letters = Letters(middle)  # type: ignore[arg-type]
    assert_seen_by(letters.sender, TamperedRecord, about=1)


@pytest.mark.threat("M5")
def test_a_message_of_another_group() -> None:
    letters = Letters({}, contexts={1: b"d" * 32})
    assert_seen_by(letters.receiver, TamperedRecord, about=0)
    assert letters.untouched(0)


@pytest.mark.threat("M5")
def test_a_collectives_record_in_place_of_a_message() -> None:
    """It is refused even if both have the same keys, which never happens in a real group."""
    tap = attacker.Tap()
    case = Case(Operation.GATHER, Algorithm.DIRECT, root=1)
    with LocalWorld(2, middle={(0, 1): tap}) as local:
        assert local.run([each.collective() for each in tensors_of(case, 2)]) == [None, None]
    letters = Letters({(0, 1): attacker.replace(0, tap.data_records()[0])})
    assert_seen_by(letters.receiver, TamperedRecord, about=0)
    assert "a collective came over a messages' link" in str(letters.receiver)


@pytest.mark.threat("M6")
def test_a_message_cut_within_a_record() -> None:
    letters = Letters({(0, 1): attacker.CutAt(100)})
    assert_seen_by(letters.receiver, PeerLost, about=0)
    assert_seen_by(letters.sender, PeerLost, about=1)


@pytest.mark.threat("M5")
def test_a_receive_from_anyone_believes_no_stranger() -> None:
    """No rank passes for another without its key: rank 2 delivers a record that rank 0 sealed for
    rank 1."""
    taken = attacker.Mailbox()
    middle = {(0, 1): taken.collect(), (2, 1): taken.put_in_place_of(0, of=0)}
    memory = np.full(8, FILL, np.uint8)
    with LocalMail(3, middle=middle) as mail:  # type: ignore[arg-type]
        zero, one, two = mail.mailboxes
        zero.wait(send(zero, 1, 5, slot(values(8, 1)), 20))
        two.wait(send(two, 1, 6, slot(values(8, 2)), 20))
        with pytest.raises(TamperedRecord) as refused:
            one.wait(receive(one, ANYONE, 6, slot(memory), 20))
    assert refused.value.peer == 2
    assert (memory == FILL).all()
