"""Attacks by the network on a stream, and the error that every rank ends with.

The attacker sits on one link of a small ring all-reduce. The collective's first half sends records
of the pair, its second half published records, which ranks forward unchanged. Both kinds are
attacked byte by byte and record by record. After every attack, a rank that returns without an
error has the right result, and by the end of the next collective every rank gets the same error.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import numpy as np
import pytest

from sealring.core.engine.collective import DType, ReduceKind
from sealring.core.schedule import ALGORITHMS, REDUCING, Algorithm, Operation
from sealring.errors import (
    GroupError,
    MissingRecord,
    OutOfStep,
    PeerLost,
    PeerSilent,
    ReplayedRecord,
    TamperedRecord,
)
from sealring.limits import TAG_BYTES
from tests.core.engine import attacker
from tests.core.engine.attacker import (
    EVERYONE,
    CutAt,
    Flip,
    Kind,
    Mailbox,
    Record,
    Tap,
)
from tests.core.engine.cases import Case, each_program, expected, tensors_of
from tests.core.engine.local_world import Change, LocalWorld

TRANSPORTS = ("tcp", "shm")
PATTERN = b"PLAINTEXT-GRADIENT"
SUM = Case(Operation.ALL_REDUCE, Algorithm.RING, 12, DType.FLOAT32, ReduceKind.SUM)
GATHER = Case(Operation.ALL_GATHER, Algorithm.DIRECT, 4)
Middles = dict[tuple[int, int], Change]
Errors = list[GroupError | None]


def rings(*worlds: int) -> list[tuple[int, int, int]]:
    """(world, sender, receiver) of each link that a ring uses, for each world size."""
    return [(world, rank, (rank + 1) % world) for world in worlds for rank in range(world)]


def attack(
    world: int,
    middle: Middles,
    case: Case = SUM,
    *,
    timeout_s: float = 10.0,
    rounds: int = 2,
    during: Callable[[LocalWorld], None] | None = None,
    **options: object,
) -> Errors:
    """Runs the case under attack, then again, and returns each rank's first error.

    A rank may have received all its records before another rank saw the attack. Then its result is
    right, and its next collective ends with the error.
    """
    local = LocalWorld(world, middle=middle, **options)  # type: ignore[arg-type]
    right = expected(case, world, 0, local.record_bytes)
    with local:
        errors: Errors = [None] * world
        for _ in range(rounds):
            tensors = tensors_of(case, world)
            if during is not None:
                during(local)
            outcome = local.run([each.collective() for each in tensors], timeout_s)
            for rank, error in enumerate(outcome):
                if error is None:
                    assert tensors[rank].bits() == right[rank], "a wrong result was delivered"
                else:
                    assert isinstance(error, GroupError), repr(error)
                    errors[rank] = errors[rank] or error
    return errors


def assert_all(
    errors: Sequence[BaseException | None],
    kind: type[GroupError],
    *,
    seen_by: int,
    about: int,
    first: int = 1,
) -> None:
    """Rank `seen_by` saw the attack on its link to rank `about`, and told all other ranks."""
    described = [repr(error) for error in errors]
    for rank, error in enumerate(errors):
        assert isinstance(error, GroupError), described
        assert type(error) is kind, described
        assert error.reported_by == (None if rank == seen_by else seen_by), described
        assert error.peer == about, described
        assert error.collective in range(first, first + 3), described
        assert f"rank {about}" in str(error), described


@cache
def recorded(
    world: int, sender: int, receiver: int, case: Case = SUM, keys_seed: bytes = b"test"
) -> tuple[Record, ...]:
    """The records, except goodbyes, that cross a link in the case's first run without an attack."""
    tap = Tap()
    middle: Middles = {(sender, receiver): tap}
    errors = attack(world, middle, case, rounds=1, keys_seed=keys_seed)
    assert errors == [None] * world
    return tuple(tap.data_records())


def each_record(*worlds: int) -> list[tuple[int, int, int, int]]:
    """(world, sender, receiver, index): a ring's link carries 2 (world - 1) records."""
    return [(*link, index) for link in rings(*worlds) for index in range(2 * (link[0] - 1))]


def test_the_ring_carries_both_kinds_of_records() -> None:
    """The attacks below assume this."""
    for world, sender, receiver in rings(2, 3):
        records = recorded(world, sender, receiver)
        halves = [Kind.PAIR] * (world - 1) + [Kind.GROUP] * (world - 1)
        assert [record.kind for record in records] == halves
        published_by = [r.fields["sender"] for r in records if r.kind is Kind.GROUP]
        assert published_by[0] == sender
        assert sender not in published_by[1:], "the others' records are forwarded"


# ---- bytes changed ------------------------------------------------------------------------------


@pytest.mark.parametrize(("world", "sender", "receiver"), rings(2, 3))
@pytest.mark.threat("W2")
def test_every_byte_flipped_in_turn(world: int, sender: int, receiver: int) -> None:
    stream = b"".join(record.raw for record in recorded(world, sender, receiver))

    def flip(offset: int) -> Errors:
        # All eight bits get their turn, and no offset keeps one bit for all links.
        mask = 1 << ((offset + sender) % 8)
        return attack(world, {(sender, receiver): Flip(offset, mask)})

    # Each attack mostly waits for acknowledgements, so many run side by side.
    with ThreadPoolExecutor(8) as attackers:
        for errors in attackers.map(flip, range(len(stream))):
            assert_all(errors, TamperedRecord, seen_by=receiver, about=sender)


@pytest.mark.parametrize(
    ("index", "kind"),
    [(0, 0), (0, 2), (0, 3), (0, 4), (0, 5), (1, 0), (1, 1), (1, 3), (1, 4), (1, 255)],
)
@pytest.mark.parametrize(("sender", "receiver"), [(0, 1), (1, 0)])
@pytest.mark.threat("W3")
def test_kind_changed(sender: int, receiver: int, index: int, kind: int) -> None:
    """Record 0 is the pair's, record 1 a published one."""
    raw = recorded(2, sender, receiver)[index].raw
    changed = raw[:3] + bytes([kind]) + raw[4:]
    errors = attack(2, {(sender, receiver): attacker.replace(index, changed)})
    assert_all(errors, TamperedRecord, seen_by=receiver, about=sender)


@pytest.mark.parametrize("length", [0, 15, 17, 64 << 10, 1 << 20, (1 << 20) + 1, 0xFFFFFFFF])
@pytest.mark.threat("W3")
def test_length_changed(length: int) -> None:
    """A forged length must not make a rank wait for bytes that never come."""
    record = recorded(2, 0, 1)[0]
    changed = record.raw[:4] + length.to_bytes(4, "little") + record.raw[8:]
    errors = attack(2, {(0, 1): attacker.replace(0, changed)})
    assert_all(errors, TamperedRecord, seen_by=1, about=0)


@pytest.mark.parametrize("generation", [1, 2, 0x7FFFFFFF, 0xFFFFFFFF])
@pytest.mark.parametrize("index", range(2))
@pytest.mark.threat("W3")
def test_generation_changed(index: int, generation: int) -> None:
    """A forged generation must not move the receiver's ratchet either."""
    record = recorded(2, 0, 1)[index]
    changed = record.raw[:20] + generation.to_bytes(4, "little") + record.raw[24:]
    errors = attack(2, {(0, 1): attacker.replace(index, changed)})
    assert_all(errors, TamperedRecord, seen_by=1, about=0)


@pytest.mark.threat("W2")
def test_tags_exchanged_between_header_and_payload() -> None:
    raw = recorded(2, 0, 1)[0].raw
    header, tag = raw[:64], raw[64:80]
    payload, payload_tag = raw[80:-TAG_BYTES], raw[-TAG_BYTES:]
    for changed in (header + payload_tag + payload + tag, header + tag + payload + tag):
        errors = attack(2, {(0, 1): attacker.replace(0, changed)})
        assert_all(errors, TamperedRecord, seen_by=1, about=0)


@pytest.mark.threat("W4")
def test_nothing_of_a_changed_record_is_used_or_forwarded() -> None:
    """Verify before use: the payload's last byte is wrong, and no rank beyond sees the record."""
    world, beyond = 3, Tap()
    index = 2  # rank 0's own published record, which rank 1 is to forward to rank 2
    raw = recorded(world, 0, 1)[index].raw
    changed = raw[:-1] + bytes([raw[-1] ^ 1])
    middle: Middles = {(0, 1): attacker.replace(index, changed), (1, 2): beyond}
    errors = attack(world, middle)
    assert_all(errors, TamperedRecord, seen_by=1, about=0)
    assert (0, EVERYONE) not in {record.sequence for record in beyond.records()}


# ---- records dropped, repeated, reordered -------------------------------------------------------


@pytest.mark.parametrize(("world", "sender", "receiver", "index"), each_record(2, 3, 4))
@pytest.mark.threat("W5")
def test_record_dropped(world: int, sender: int, receiver: int, index: int) -> None:
    """The next record of the same key shows the gap.

    If no such record is sent (because the receiver, and so every rank after it, waits for the
    dropped one), all ranks wait until the first one times out and sends its alert. For the attacked
    receiver that alert is the next record, so it sees the gap.
    """
    records = recorded(world, sender, receiver)
    gap = records[index].sequence
    shown = gap in [record.sequence for record in records[index + 1 :]]
    errors = attack(
        world, {(sender, receiver): attacker.drop(index)}, timeout_s=10 if shown else 0.3
    )
    if shown:
        assert_all(errors, MissingRecord, seen_by=receiver, about=sender)
    else:
        for rank, error in enumerate(errors):
            assert type(error) in (MissingRecord, PeerSilent)
            if type(error) is MissingRecord:
                assert error.peer == sender
                assert (rank if error.reported_by is None else error.reported_by) == receiver


@pytest.mark.parametrize(("world", "sender", "receiver", "index"), each_record(2, 3))
@pytest.mark.threat("W6")
def test_record_repeated(world: int, sender: int, receiver: int, index: int) -> None:
    errors = attack(world, {(sender, receiver): attacker.repeat(index)})
    assert_all(errors, ReplayedRecord, seen_by=receiver, about=sender)


@pytest.mark.parametrize(("world", "sender", "receiver", "index"), each_record(2, 3))
@pytest.mark.threat("W6")
def test_earlier_record_in_place_of_a_later_one(
    world: int, sender: int, receiver: int, index: int
) -> None:
    """An old record, played back in the next collective."""
    old = recorded(world, sender, receiver)[index]
    per_collective = len(recorded(world, sender, receiver))
    change = attacker.replace(per_collective + index, old)
    errors = attack(world, {(sender, receiver): change}, rounds=3)
    assert_all(errors, ReplayedRecord, seen_by=receiver, about=sender)


@pytest.mark.parametrize(("world", "sender", "receiver"), rings(3, 4))
@pytest.mark.threat("W7")
def test_records_of_one_key_swapped(world: int, sender: int, receiver: int) -> None:
    records = recorded(world, sender, receiver)
    for index in range(len(records) - 1):
        if records[index].sequence == records[index + 1].sequence:
            errors = attack(world, {(sender, receiver): attacker.swap(index)})
            assert_all(errors, MissingRecord, seen_by=receiver, about=sender)


# ---- links cut ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("world", "sender", "receiver"), rings(2, 3))
@pytest.mark.threat("W9")
def test_link_cut_at_any_byte(world: int, sender: int, receiver: int) -> None:
    """Both ends of the link lose each other; each rank reports one of the two."""
    stream = b"".join(record.raw for record in recorded(world, sender, receiver))
    for offset in range(0, len(stream), 13):
        errors = attack(world, {(sender, receiver): CutAt(offset)})
        for rank, error in enumerate(errors):
            assert type(error) is PeerLost
            assert {error.peer, error.reported_by if error.reported_by is not None else rank} == {
                sender,
                receiver,
            }
        seen = errors[receiver]
        assert seen is not None
        if seen.reported_by is None and offset % len(recorded(world, sender, receiver)[0].raw):
            assert "in the middle of a record" in str(seen)


# ---- records put where they do not belong -------------------------------------------------------


@pytest.mark.parametrize("index", range(2))
@pytest.mark.parametrize(("sender", "receiver"), [(0, 1), (1, 0)])
@pytest.mark.threat("W8")
def test_record_reflected_to_its_sender(sender: int, receiver: int, index: int) -> None:
    mail = Mailbox()
    middle: Middles = {
        (sender, receiver): mail.collect(),
        (receiver, sender): mail.put_in_place_of(index, of=index),
    }
    errors = attack(2, middle)
    assert_all(errors, TamperedRecord, seen_by=sender, about=receiver)


@pytest.mark.parametrize(("world", "sender", "receiver", "index"), each_record(2, 3))
@pytest.mark.threat("W8")
def test_record_of_another_run(world: int, sender: int, receiver: int, index: int) -> None:
    """The group and the position are the same, the keys are different."""
    foreign = recorded(world, sender, receiver, keys_seed=b"another run")[index]
    ours = recorded(world, sender, receiver)[index]
    assert foreign.fields == ours.fields
    errors = attack(world, {(sender, receiver): attacker.replace(index, foreign)})
    assert_all(errors, TamperedRecord, seen_by=receiver, about=sender)


@pytest.mark.parametrize(("world", "sender", "receiver", "index"), each_record(2, 3))
@pytest.mark.threat("W8")
def test_record_of_another_group(world: int, sender: int, receiver: int, index: int) -> None:
    """Position and keys are the same: only the context tells jobs, groups and epochs apart."""
    foreign = recorded(world, sender, receiver)[index]
    errors = attack(
        world, {(sender, receiver): attacker.replace(index, foreign)}, context=b"d" * 32
    )
    assert_all(errors, TamperedRecord, seen_by=receiver, about=sender)


@pytest.mark.parametrize("rank", range(3))
@pytest.mark.threat("W8")
def test_rank_that_takes_itself_to_be_in_another_group(rank: int) -> None:
    """Nothing of one group opens in another, though the keys were the same."""
    errors = attack(3, {}, contexts={rank: b"d" * 32})
    assert {type(error) for error in errors} == {TamperedRecord}


@pytest.mark.parametrize("index", range(2))
@pytest.mark.threat("W8")
def test_record_of_another_link(index: int) -> None:
    """A record of the pair (0, 1) in the place of one of the pair (1, 2)."""
    mail = Mailbox()
    middle: Middles = {(0, 1): mail.collect(), (1, 2): mail.put_in_place_of(index, of=index)}
    errors = attack(3, middle)
    assert_all(errors, TamperedRecord, seen_by=2, about=1)


@pytest.mark.parametrize("held", [False, True], ids=["second", "first"])
@pytest.mark.threat("W8")
def test_published_record_over_another_link(held: bool) -> None:
    """Every rank can open a published record from any link. Here rank 1's record also arrives over
    rank 2's link: its key is right there, but its position and its number are wrong.

    If it arrives there first, rank 0 cannot tell an attacker from a rank 2 that makes another call,
    and only reports that the record has no place in its program.
    """
    mail, arrived = Mailbox(), threading.Event()

    def late(data: bytes) -> bytes:
        if held:
            arrived.wait(0.3)
        return data

    middle: Middles = {
        (1, 2): mail.collect(),
        (1, 0): late,
        (2, 0): mail.put_in_place_of(0, of=0, delay_s=0 if held else 0.3),
    }
    errors = attack(3, middle, GATHER)
    assert_all(errors, OutOfStep if held else ReplayedRecord, seen_by=0, about=2)


@pytest.mark.parametrize(("world", "algorithm"), [(2, Algorithm.RING), (3, Algorithm.DIRECT)])
def test_alert_overtaken_by_no_reset(world: int, algorithm: Algorithm) -> None:
    """A rank that fails in the middle of a large tensor has bytes unread and unsent. Closing the
    link must not destroy its alert."""
    case = Case(Operation.ALL_REDUCE, algorithm, 3 << 20, DType.UINT8, ReduceKind.MAX)
    for offset in range(100_000, 1_300_000, 200_000):
        errors = attack(world, {(0, 1): Flip(offset, 1)}, case)
        assert_all(errors, TamperedRecord, seen_by=1, about=0)


# ---- forgeries ----------------------------------------------------------------------------------


def forged(kind: Kind, **fields: int) -> bytes:
    length = fields.get("length", 0)
    return attacker.header(kind=kind, **fields) + bytes(TAG_BYTES + length + TAG_BYTES)


@pytest.mark.parametrize("index", range(2))
@pytest.mark.parametrize("kind", [Kind.ALERT, Kind.BYE])
@pytest.mark.threat("W10")
def test_forged_alert_or_goodbye(kind: Kind, index: int) -> None:
    forgery = forged(kind, sender=0, receiver=1, length=17 if kind is Kind.ALERT else 0)
    errors = attack(2, {(0, 1): attacker.replace(index, forgery)})
    assert_all(errors, TamperedRecord, seen_by=1, about=0)


@pytest.mark.parametrize("kind", [Kind.PAIR, Kind.ALERT, Kind.BYE])
@pytest.mark.threat("W10")
def test_forgery_on_a_link_that_the_collective_does_not_use(kind: Kind) -> None:
    """In a ring of three, rank 2 never sends data to rank 1, but its alerts must be heard."""
    forgery = forged(kind, sender=2, receiver=1)

    def during(local: LocalWorld) -> None:
        if not injected.is_set():
            injected.set()
            local.middles[2, 1].inject(forgery)

    injected = threading.Event()
    # Rank 1 looks at that link only when it has to wait, so make it wait.
    held = threading.Event()

    def hold(data: bytes) -> bytes:
        held.wait(0.3)
        return data

    errors = attack(3, {(2, 1): bytes, (0, 1): hold}, during=during)
    assert_all(errors, TamperedRecord, seen_by=1, about=2)


@pytest.mark.threat("W10")
def test_alert_of_another_run_replayed() -> None:
    """A true alert of an earlier run cannot end this one by itself: it shows as an attack."""
    tap = Tap()
    errors = attack(2, {(0, 1): Flip(0, 1), (1, 0): tap}, keys_seed=b"another run")
    assert_all(errors, TamperedRecord, seen_by=1, about=0)
    [alert] = [record for record in tap.records() if record.kind is Kind.ALERT]
    errors = attack(2, {(1, 0): attacker.replace(0, alert)})
    assert_all(errors, TamperedRecord, seen_by=0, about=1)


@pytest.mark.threat("W11")
def test_alert_swallowed_on_one_link_comes_over_another() -> None:
    """Rank 1 sees the attack. Its alert to rank 2 is dropped, and rank 0 tells rank 2 instead."""
    swallow = attacker.swallow_alerts(holds_open=True)
    errors = attack(3, {(0, 1): Flip(100, 1), (1, 2): swallow})
    assert_all(errors, TamperedRecord, seen_by=1, about=0)


@pytest.mark.threat("W11")
def test_alert_swallowed_and_link_cut() -> None:
    """An attacker on two links can make two ranks see different errors, and both are true: rank 1
    sees a changed record, and rank 2 sees that rank 1 left without an alert."""
    swallow = attacker.swallow_alerts(holds_open=False)
    errors = attack(3, {(0, 1): Flip(100, 1), (1, 2): swallow})
    assert type(errors[1]) is TamperedRecord
    for error in errors:
        assert error is not None
        assert (type(error), error.peer) in ((TamperedRecord, 0), (PeerLost, 1))


# ---- peers that leave or fall silent ------------------------------------------------------------


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.threat("F8")
def test_rank_that_closes_in_order(world: int, transport: str) -> None:
    tensors = tensors_of(SUM, world)
    with LocalWorld(world, transport) as local:
        local.engines[1].close()
        errors = local.run([None if t is tensors[1] else t.collective() for t in tensors])
    for rank, error in enumerate(errors):
        if rank != 1:
            assert type(error) is PeerLost
            assert error.peer == 1
            assert "left the group" in str(error)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("case", [SUM, GATHER], ids=str)
@pytest.mark.parametrize("silent", range(3))
@pytest.mark.threat("F4")
def test_silent_rank(silent: int, case: Case, transport: str) -> None:
    """The rank that waits for the silent one times out, and its alert names the silent rank."""
    waiting = (silent + 1) % 3
    tensors = tensors_of(case, 3)
    with LocalWorld(3, transport) as local:
        errors = local.run(
            [None if t is tensors[silent] else t.collective() for t in tensors],
            timeout_s=[0.3 if rank == waiting else 10.0 for rank in range(3)],
        )
    errors[silent] = errors[waiting]
    for rank, error in enumerate(errors):
        assert type(error) is PeerSilent
        assert error.peer == silent
        assert error.reported_by == (None if rank in (silent, waiting) else waiting)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.threat("F9")
def test_rank_that_does_not_come_in_time_still_learns_why(transport: str) -> None:
    """The others timed out long ago. Their alerts wait for the late rank."""
    tensors = tensors_of(SUM, 3)
    calls = [t.collective() for t in tensors]
    with LocalWorld(3, transport) as local:
        local.run([calls[0], calls[1], None], timeout_s=[0.2, 10.0, 10.0])
        errors = local.run(calls, numbers=[2, 2, 1])
    assert_all(errors, PeerSilent, seen_by=0, about=2)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("algorithm", ALGORITHMS[Operation.BROADCAST])
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.threat("F8")
def test_root_that_only_sends_learns_that_a_rank_is_gone(
    world: int, algorithm: Algorithm, transport: str
) -> None:
    """A broadcast needs no answer, so a root might go on sending forever with no reader left."""
    case = Case(Operation.BROADCAST, algorithm, 100_000)
    tensors = tensors_of(case, world)
    with LocalWorld(world, transport) as local:
        local.engines[1].close()
        for _ in range(10):
            errors = local.run([t.collective() if t is tensors[0] else None for t in tensors])
            if errors[0] is not None:
                break
    assert type(errors[0]) is PeerLost
    assert errors[0].peer == 1


# ---- listening ----------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", TRANSPORTS)
@each_program
@pytest.mark.threat("W1")
def test_nothing_of_the_tensor_is_seen(
    operation: Operation, algorithm: Algorithm, transport: str
) -> None:
    """Not even eight bytes of it, at any alignment, appear on the wire or in shared memory."""
    world = 3
    taps = {(a, b): Tap() for a in range(world) for b in range(world) if a != b}
    kind = ReduceKind.BOR if operation in REDUCING else ReduceKind.NONE
    case = Case(operation, algorithm, 5000, DType.UINT8, kind)
    with LocalWorld(world, transport, record_bytes=1024, middle=dict(taps)) as local:
        per_rank = tensors_of(case, world)
        for tensors in per_rank:
            for array in tensors.slots:
                array[:] = np.frombuffer(PATTERN * 1000, np.uint8)[: array.size]
        assert local.run([tensors.collective() for tensors in per_rank]) == [None] * world
        seen = [os.pread(memory, 1 << 21, 0) for memory in local.memories.values()]
    seen += [bytes(tap.stream) for tap in taps.values()]
    assert sum(map(len, seen)) > 3 * 96, "there was something to listen to"
    for each in seen:
        for at in range(len(PATTERN)):
            assert (PATTERN * 2)[at : at + 8] not in each
