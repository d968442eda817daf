"""Messages of tensors on a device: the mailbox's whole path for GPUs, with this CPU as the device.

As in test_on_a_device.py; process groups with messages on a GPU are tested there (tests/gpu).
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from sealring import _native, _stand_ins
from sealring.core.engine.mailbox import ANYONE, Mailbox
from sealring.errors import (
    GroupClosed,
    MissingRecord,
    OutOfStep,
    PeerSilent,
    ReplayedRecord,
    TamperedRecord,
)
from sealring.limits import HEADER_BYTES, TAG_BYTES
from tests.core.engine import attacker
from tests.core.engine.attacker import Kind, Record
from tests.core.engine.local_world import LocalMail, receive, send, slot
from tests.core.engine.test_message_attacks import FILL, Letters, assert_seen_by, values

RECORD_BYTES = 256
GPU_LANE = 1
OVERHEAD = HEADER_BYTES + 2 * TAG_BYTES
HOW = (None, "launched", "prelaunched")
"""The CPU plays the device itself (None), or a GPU's driver, by launches or by instructions."""
BOTH = {0: 2, 1: 3}
"""The lag of each rank's device."""


@pytest.fixture(params=[("tcp", 0), ("shm", 5)])
def three(request: pytest.FixtureRequest) -> Iterator[LocalMail]:
    transport, lag = request.param
    devices = {rank: lag + rank for rank in range(3)}
    with LocalMail(3, transport, RECORD_BYTES, rekey_bytes=5_000, devices=devices) as mail:
        yield mail


def caller(ready: int | None) -> _native.CallerStream | None:
    return None if ready is None else _native.CallerStream(ready)


def sent(
    box: Mailbox, peer: int, tag: int, message: np.ndarray, ready: int | None = 0
) -> _native.Completion:
    return send(box, peer, tag, slot(message), 20, caller(ready))


def got(
    box: Mailbox, peer: int, tag: int, memory: np.ndarray, ready: int | None = 0
) -> _native.Completion:
    return receive(box, peer, tag, slot(memory), 20, caller(ready))


# ---- what arrives -------------------------------------------------------------------------------


def test_all_pairs_of_a_large_group_share_a_few_buffers() -> None:
    """So many records are in flight that links wait for a buffer; all messages arrive."""
    world, size = 14, 60 * RECORD_BYTES
    devices = {rank: 20 + rank for rank in range(world)}
    with LocalMail(world, "tcp", RECORD_BYTES, devices=devices) as mail:

        def exchange(rank: int) -> None:
            box = mail.mailboxes[rank]
            peers = [peer for peer in range(world) if peer != rank]
            messages = {peer: values(size, 100 * rank + peer) for peer in peers}
            memory = {peer: np.empty(size, np.uint8) for peer in peers}
            there = [sent(box, peer, 7, messages[peer]) for peer in peers]
            here = [got(box, peer, 7, memory[peer]) for peer in peers]
            for each in (*there, *here):
                box.wait(each)
            for peer in peers:
                assert (memory[peer] == values(size, 100 * peer + rank)).all()

        with ThreadPoolExecutor(world) as pool:
            list(pool.map(exchange, range(world)))


def test_messages_of_every_length_come_back(three: LocalMail) -> None:
    """Lengths: 0, odd ones, many records, and several generations of keys."""
    zero, one, _ = three.mailboxes
    for size in (0, 1, 63, 255, 256, 257, 40_001):
        message = values(size, size)
        there, back = np.empty(size, np.uint8), np.empty(size, np.uint8)

        def echoes(there: np.ndarray = there) -> None:
            one.wait(got(one, 0, 7, there))
            one.wait(sent(one, 0, 8, there))

        echo = three.pool.submit(echoes)
        zero.wait(sent(zero, 1, 7, message))
        assert zero.wait(got(zero, 1, 8, back)) == 1
        echo.result()
        assert (there == message).all()
        assert (back == message).all()


def test_tags_match_in_any_order_beside_messages_of_the_cpu(three: LocalMail) -> None:
    zero, one, _ = three.mailboxes
    sizes = [3000, 10, 70_000, 300, 5000]
    messages = [values(size, size) for size in sizes]
    memories = [np.empty(size, np.uint8) for size in sizes]
    on_gpu = [0, None, None, 0, 0]
    for tag, message in enumerate(messages):
        sent(zero, 1, tag, message, on_gpu[tag])

    def moves_messages() -> None:
        done = 0
        while done < len(messages):
            done += len(zero.finished())

    mover = three.pool.submit(moves_messages)
    for tag in (4, 1, 0, 3, 2):
        one.wait(got(one, 0, tag, memories[tag], on_gpu[tag]))
    mover.result()
    for message, memory in zip(messages, memories, strict=True):
        assert (memory == message).all()


def test_receive_from_any_source_says_which(three: LocalMail) -> None:
    zero, one, two = three.mailboxes
    messages = {1: values(3000, 1), 2: values(3000, 2)}
    senders = [
        three.pool.submit(lambda box=box, rank=rank: box.wait(sent(box, 0, 5, messages[rank])))
        for rank, box in ((1, one), (2, two))
    ]
    seen = set()
    for _ in senders:
        memory = np.empty(3000, np.uint8)
        source = zero.wait(got(zero, ANYONE, 5, memory))
        assert source is not None
        assert (memory == messages[source]).all()
        seen.add(source)
    for sender in senders:
        sender.result()
    assert seen == {1, 2}


@pytest.mark.parametrize("late", [0, 1])
def test_memory_that_is_still_in_use_holds_up_no_other_message(late: int) -> None:
    """The stream never reaches the call. Messages posted later still arrive."""
    never = 1 << 60
    with LocalMail(2, record_bytes=RECORD_BYTES, devices=BOTH) as mail:
        zero, one = mail.mailboxes
        first, second = values(2000, 1), values(2000, 2)
        memories = [np.full(2000, FILL, np.uint8) for _ in range(2)]
        got(one, 0, 0, memories[0], never if late == 1 else 0)
        wanted = got(one, 0, 1, memories[1])
        sent(zero, 1, 0, first, never if late == 0 else 0)
        leaving = sent(zero, 1, 1, second)
        sender = mail.pool.submit(zero.wait, leaving)
        one.wait(wanted)
        sender.result()
        assert (memories[1] == second).all()
        assert (memories[0] == FILL).all()


@pytest.mark.parametrize("late", [0, 1])
def test_memory_is_touched_when_its_stream_is_there(late: int) -> None:
    asked = 50
    with LocalMail(2, record_bytes=RECORD_BYTES, devices=BOTH) as mail:
        zero, one = mail.mailboxes
        message, memory = values(2000, 1), np.full(2000, FILL, np.uint8)
        sender = mail.pool.submit(
            lambda: zero.wait(sent(zero, 1, 0, message, asked if late == 0 else 0))
        )
        one.wait(got(one, 0, 0, memory, asked if late == 1 else 0))
        sender.result()
        assert (memory == message).all()


# ---- what leaves --------------------------------------------------------------------------------


def records_of(letters: Letters, tap: attacker.Tap) -> list[Record]:
    assert letters.sender is None, letters.sender
    assert letters.receiver is None, letters.receiver
    return tap.records()


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("size", [0, 4, 5000])
@pytest.mark.threat("C5")
def test_records_are_the_gpus_own(size: int, how: str | None) -> None:
    """The announcement has no byte of the message. Lane 1 carries even a short one, under its own
    key."""
    tap = attacker.Tap()
    letters = Letters(
        {(0, 1): tap}, sizes=(size, size), record_bytes=RECORD_BYTES, devices=BOTH, driver=how
    )
    records = records_of(letters, tap)
    announced = [record for record in records if record.kind is Kind.ANNOUNCE]
    assert [record.fields["length"] for record in announced] == [0, 0]
    assert [record.fields["segment"] for record in announced] == [2, 2]
    data = [record for record in records if record.kind is Kind.DATA]
    assert {record.fields["lane"] for record in data} == {GPU_LANE}
    assert [record.fields["count"] for record in data] == list(range(len(data)))
    assert all(record.fields["lane"] == 0 for record in records if record.kind is not Kind.DATA)
    key = _native.gpu_key(bytes(LocalMail(1).key("pair", 0, 1)))
    plain = b""
    for count, record in enumerate(data):
        nonce = GPU_LANE.to_bytes(4, "little") + count.to_bytes(8, "little")
        header, payload = record.raw[:HEADER_BYTES], record.raw[HEADER_BYTES + TAG_BYTES :]
        opened = _stand_ins.gpu_aead_open(key, nonce, header + b"c" * 32, payload)
        assert opened is not None
        plain += opened
    assert plain == b"".join(message.tobytes() for message in letters.sent)


@pytest.mark.parametrize("how", HOW)
def test_no_key_and_nonce_seal_two_records(how: str | None) -> None:
    """The messages take several generations of both lanes' keys."""
    tap = attacker.Tap()
    letters = Letters(
        {(0, 1): tap}, sizes=(4000,) * 20, record_bytes=RECORD_BYTES, rekey_bytes=3_000,
        devices=BOTH, driver=how,
    )  # fmt: skip
    records = records_of(letters, tap)
    assert all((a == b).all() for a, b in zip(letters.got, letters.sent, strict=True))
    triples = attacker.triples(records)
    assert len(set(triples)) == len(triples)
    assert max(record.fields["generation"] for record in records if record.fields["lane"]) > 20


def test_a_device_gets_one_piece_of_work_per_record() -> None:
    with LocalMail(2, record_bytes=RECORD_BYTES, devices=BOTH) as mail:
        zero, one = mail.mailboxes
        message, memory = values(600, 1), np.empty(600, np.uint8)
        sender = mail.pool.submit(lambda: zero.wait(sent(zero, 1, 0, message)))
        one.wait(got(one, 0, 0, memory))
        sender.result()
        assert mail.probes[0].log == ["seal 256", "seal 256", "seal 88"]
        assert mail.probes[1].log == ["open 256", "open 256", "open 88"]


# ---- forgeries ----------------------------------------------------------------------------------


def forged(middle: attacker.ByRecord | attacker.Flip, **more: object) -> Letters:
    return Letters(
        {(0, 1): middle},
        record_bytes=RECORD_BYTES,
        devices={0: 2, 1: 30},
        **{"sizes": (600,), **more},  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("at", [0, 3, 5, 17, 33, 63, 64, 79, 80, 111, 335, 336, 351])
@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.threat("C3")
def test_a_changed_byte_is_seen(which: int, at: int) -> None:
    """The byte is in the header, the tag or the payload. Nothing unauthenticated reaches the
    user's memory."""
    record_bytes = OVERHEAD + RECORD_BYTES
    assert record_bytes == 352
    letters = forged(attacker.Flip(OVERHEAD + which * record_bytes + at, 0x40))
    assert_seen_by(letters.receiver, TamperedRecord, about=0)
    here = slice(which * RECORD_BYTES, (which + 1) * RECORD_BYTES)
    assert (letters.got[0][here] == FILL).all()
    # Records beside it may have been opened meanwhile: they are whole.
    assert ((letters.got[0] == FILL) | (letters.got[0] == letters.sent[0])).all()
    assert type(letters.sender) is TamperedRecord
    assert letters.sender.reported_by == 1


@pytest.mark.parametrize("at", [0, 64, 80, 335, 336, 351])
@pytest.mark.threat("C4")
def test_streams_that_wait_for_a_changed_record_get_nothing(at: int) -> None:
    """They go on once the failure is known, and every byte they find is 0xFF."""
    letters = forged(attacker.Flip(2 * OVERHEAD + RECORD_BYTES + at, 0x40), driver="prelaunched")
    assert_seen_by(letters.receiver, TamperedRecord, about=0)
    assert (letters.got[0] == 0xFF).all()
    assert type(letters.sender) is TamperedRecord


@pytest.mark.parametrize("at", range(0, OVERHEAD, 7))
@pytest.mark.threat("C3")
def test_a_changed_announcement_is_seen(at: int) -> None:
    letters = forged(attacker.Flip(at, 0x02))
    assert_seen_by(letters.receiver, TamperedRecord, about=0)
    assert letters.untouched(0)


@pytest.mark.threat("C3")
def test_records_dropped_repeated_or_swapped() -> None:
    """Record 0 is the announcement."""
    assert_seen_by(forged(attacker.drop(1)).receiver, MissingRecord, about=0)
    assert_seen_by(forged(attacker.repeat(1)).receiver, ReplayedRecord, about=0)
    assert_seen_by(forged(attacker.swap(1)).receiver, MissingRecord, about=0)


def test_a_message_of_the_cpu_under_a_gpus_name() -> None:
    """The lane is part of what is authenticated, so it cannot be changed on the way."""
    lane = 16
    letters = Letters(
        {(0, 1): attacker.Flip(OVERHEAD + lane, GPU_LANE)}, sizes=(70_000,), devices={}
    )
    assert_seen_by(letters.receiver, TamperedRecord, about=0)
    assert letters.untouched(0)


# ---- what goes wrong ----------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 10, 5000])
@pytest.mark.parametrize("on_gpu", [0, 1])
@pytest.mark.threat("C6")
def test_tensors_on_different_kinds_of_device(on_gpu: int, size: int) -> None:
    letters = Letters({}, sizes=(size,), devices={on_gpu: 1})
    places = {0: "the CPU", 1: "the CPU", on_gpu: "a GPU"}
    said = f"rank 0 has its tensor on {places[0]}, rank 1 on {places[1]}"
    for error, reporter in ((letters.receiver, None), (letters.sender, 1)):
        assert type(error) is OutOfStep, error
        assert error.reported_by == reporter
        assert said in str(error)
    assert letters.untouched(0)


@pytest.mark.parametrize("broken", [0, 1])
def test_a_device_that_fails_ends_the_group_everywhere(broken: int) -> None:
    with LocalMail(2, record_bytes=RECORD_BYTES, devices=BOTH) as mail:
        zero, one = mail.mailboxes
        message, memory = values(600, 1), np.full(600, FILL, np.uint8)
        sender = mail.pool.submit(lambda: zero.wait(sent(zero, 1, 0, message)))
        one.wait(got(one, 0, 0, memory))
        sender.result()
        mail.probes[broken].fail()
        answer = np.zeros(1, np.uint8)

        def sends() -> None:
            zero.wait(sent(zero, 1, 1, message))
            zero.wait(got(zero, 1, 2, answer))

        failing = mail.pool.submit(sends)
        with pytest.raises(GroupClosed, match=f"the GPU of rank {broken} failed: it was told to"):
            one.wait(got(one, 0, 1, memory))
        with pytest.raises(GroupClosed, match=f"the GPU of rank {broken} failed: it was told to"):
            failing.result()


@pytest.mark.parametrize("hangs", [0, 1])
def test_a_device_that_hangs_is_named(hangs: int) -> None:
    """The error names the device, not the peer, which did nothing wrong."""
    with LocalMail(2, record_bytes=RECORD_BYTES, devices={0: 1, 1: 1, hangs: 1 << 30}) as mail:
        zero, one = mail.mailboxes
        message, memory = values(600, 1), np.full(600, FILL, np.uint8)
        patience = [20.0, 20.0]
        patience[hangs] = 0.5
        answer = np.zeros(1, np.uint8)

        def sends() -> None:
            zero.wait(send(zero, 1, 0, slot(message), patience[0], caller(0)))
            zero.wait(got(zero, 1, 2, answer))

        sender = mail.pool.submit(sends)
        said = rf"the GPU of rank {hangs} did not do its part of a message for 0\.5 s"
        with pytest.raises(PeerSilent, match=said):
            one.wait(receive(one, 0, 0, slot(memory), patience[1], caller(0)))
        with pytest.raises(PeerSilent, match=said):
            sender.result()


def test_closing_leaves_nothing_on_the_device() -> None:
    """A message is in flight when the group ends: on both sides, its waiter gets an error at
    once."""
    with LocalMail(2, record_bytes=RECORD_BYTES, devices={0: 1, 1: 1 << 30}) as mail:
        zero, one = mail.mailboxes
        message, memory = values(600, 1), np.full(600, FILL, np.uint8)
        sent(zero, 1, 0, message)
        waiter = mail.pool.submit(lambda: one.wait(got(one, 0, 0, memory)))
        mover = mail.pool.submit(zero.finished)
        assert len(mover.result()) == 1
        one.close()
        with pytest.raises(GroupClosed):
            waiter.result()


def test_without_a_device_no_message_can_be_on_one() -> None:
    with LocalMail(2) as mail, pytest.raises(ValueError, match="no device attached"):
        sent(mail.mailboxes[0], 1, 0, values(8, 1))
