"""One group's recorder, driven by hand."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import pytest

from sealring.core.engine.collective import Collective, DType, ReduceKind
from sealring.core.engine.cuda.wires import Wire
from sealring.core.engine.endpoint import LinkTraffic
from sealring.core.engine.flight import KEPT, FlightRecorder, MessageEntry
from sealring.core.engine.link_ends import LinkSocket
from sealring.core.schedule import Algorithm, Operation
from sealring.errors import ConfigurationError, PeerLost
from sealring.observe import ProcessAccount

ALL_REDUCE = Collective(
    Operation.ALL_REDUCE, Algorithm.RING, [(4096, 32)] * 2, 64, DType.FLOAT32, ReduceKind.SUM
)  # fmt: skip
BROADCAST = Collective(
    Operation.BROADCAST, Algorithm.DIRECT, [(4096, 7)], 7, DType.BYTES, root=2
)  # fmt: skip


class CountingEngine:
    """A stand-in for the engine, for tests that read only its counts."""

    def __init__(self, links: Sequence[LinkSocket] = (), wire: Wire | None = None) -> None:
        self.sealed = self.opened = 0
        self.link_sockets = list(links)
        self.wire = wire

    def commitments(self) -> list[LinkTraffic]:
        return [LinkTraffic(1, (self.sealed, b"s" * 32), None)]

    def sealed_and_opened(self) -> tuple[int, int]:
        return self.sealed, self.opened

    def account(self) -> Any:
        return {
            "sealed_bytes": self.sealed,
            "opened_bytes": self.opened,
            "rekeys": [1, 0, 2],
            "waited_s": [0.5, 0.0, 0.25],
        }


class CountingMailbox:
    def __init__(self) -> None:
        self.sealed = self.opened = 0
        self.link_sockets: list[LinkSocket] = []

    def commitments(self) -> list[LinkTraffic]:
        return []

    def account(self) -> Any:
        return {"sealed_bytes": self.sealed, "opened_bytes": self.opened, "memory_bytes": 0}


def recorder(
    engine: CountingEngine,
    failures: list[str] | None = None,
    mailbox: CountingMailbox | None = None,
) -> FlightRecorder:
    flight = FlightRecorder(
        engine,
        mailbox or CountingMailbox(),
        job="tests",
        job_rank=4,
        group="pairs",
        group_id="00ff",
        epoch="e1",
        members=(2, 4, 6),
    )
    if failures is not None:
        flight.on_failure = lambda: failures.append("told")
    return flight


def run(flight: FlightRecorder, call: int, collective: Collective = ALL_REDUCE) -> None:
    flight.queued(call, collective)
    flight.started(call, call, collective)
    flight.ended(None)
    flight.call_done(collective.operation)


def test_a_collective_is_recorded_from_the_queue_to_its_end() -> None:
    engine = CountingEngine()
    flight = recorder(engine)
    before = time.time_ns()
    flight.queued(1, ALL_REDUCE)
    flight.queued(2, BROADCAST)
    assert [each.state for each in flight.account().collectives] == ["queued", "queued"]
    flight.started(1, 1, ALL_REDUCE)
    assert [each.state for each in flight.account().collectives] == ["running", "queued"]
    engine.sealed, engine.opened = 48, 50
    flight.ended(None)
    flight.started(2, 2, BROADCAST)
    engine.opened = 57
    flight.ended(None)
    first, second = flight.account().collectives
    assert (first.number, first.operation, first.algorithm) == (1, "all_reduce", "ring")
    assert (first.bytes, first.dtype, first.reduction, first.root) == (64, "float32", "sum", None)
    assert (first.sealed_bytes, first.opened_bytes, first.state) == (48, 50, "done")
    assert (second.number, second.operation, second.root) == (2, "broadcast", 2)
    assert (second.reduction, second.sealed_bytes, second.opened_bytes) == (None, 0, 7)
    assert first.started_ns is not None
    assert first.ended_ns is not None
    # Within a second, as the two clocks are read one after the other.
    assert before - 10**9 < first.queued_ns <= first.started_ns <= first.ended_ns
    assert first.ended_ns < time.time_ns() + 10**9


def test_the_last_thousand_are_kept() -> None:
    flight = recorder(CountingEngine())
    for call in range(1, KEPT + 6):
        run(flight, call)
    kept = flight.account().collectives
    assert KEPT == 1000
    assert [kept[0].number, kept[-1].number, len(kept)] == [6, KEPT + 5, KEPT]
    assert flight.collective(5) is None
    sixth = flight.collective(6)
    assert sixth is not None
    assert (sixth.number, sixth.state) == (6, "done")
    assert flight.finished == {Operation.ALL_REDUCE: KEPT + 5}


def test_however_many_wait_the_one_under_way_is_in_the_record() -> None:
    flight = recorder(CountingEngine())
    run(flight, 1)
    for call in range(2, KEPT + 500):
        flight.queued(call, ALL_REDUCE)
    flight.started(2, 2, ALL_REDUCE)
    states = [each.state for each in flight.account().collectives]
    assert states[:3] == ["done", "running", "queued"]
    assert len(states) == KEPT + 499


def test_a_call_may_run_several_collectives() -> None:
    flight = recorder(CountingEngine())
    flight.queued(1, ALL_REDUCE)
    flight.started(1, 1, ALL_REDUCE)
    flight.ended(None)
    flight.started(1, 2, BROADCAST)
    flight.ended(None)
    flight.call_done(Operation.ALL_REDUCE)
    assert flight.finished == {Operation.ALL_REDUCE: 1}
    run_two = [(each.number, each.operation) for each in flight.account().collectives]
    assert run_two == [(1, "all_reduce"), (2, "broadcast")]


def test_the_first_failure_is_told_once_and_nothing_of_it_is_held() -> None:
    failures: list[str] = []
    flight = recorder(CountingEngine(), failures)
    for call in (1, 2):
        flight.queued(call, ALL_REDUCE)
    for call in (1, 2):
        flight.started(call, call, ALL_REDUCE)
        flight.ended(PeerLost("rank 2 is gone", peer=2))
    assert failures == ["told"]
    assert flight.failed == {"group.peer_lost": 2}
    account = flight.account()
    assert account.state == "failed"
    assert [each.error for each in account.collectives] == ["group.peer_lost: rank 2 is gone"] * 2
    assert [each.state for each in account.collectives] == ["failed"] * 2


def test_a_closed_group_keeps_its_account_and_lets_go_of_its_engine() -> None:
    import gc
    import weakref

    engine = CountingEngine()
    flight = recorder(engine)
    engine.sealed = 48
    run(flight, 1)
    flight.close()
    alive = weakref.ref(engine)
    del engine
    gc.collect()
    assert alive() is None
    account = flight.account()
    assert (account.state, account.sealed_bytes, account.rekeys) == ("closed", 48, 3)
    assert (account.rank, account.members) == (1, [2, 4, 6])


def message(way: Any, peer: int, tag: int = 0) -> MessageEntry:
    return MessageEntry(way, peer, tag, 28, DType.FLOAT32)


def test_messages_are_recorded_from_their_call_to_their_end() -> None:
    mailbox = CountingMailbox()
    engine = CountingEngine()
    flight = recorder(engine, mailbox=mailbox)
    sent, received = message("send", 2, tag=7), message("recv", -1)
    for entry in (sent, received):
        flight.mail.posted(entry)
    first, second = flight.account().messages
    assert (first.operation, first.peer, first.tag, first.bytes) == ("send", 2, 7, 28)
    assert (first.dtype, first.state, first.ended_ns) == ("float32", "waiting", None)
    assert (second.operation, second.peer) == ("recv", None)
    engine.sealed, mailbox.sealed, mailbox.opened = 100, 28, 28
    flight.message_ended(received, 0, None)  # the later message ends first
    flight.message_ended(sent, 2, None)
    account = flight.account()
    assert [each.operation for each in account.messages] == ["send", "recv"]
    assert [each.state for each in account.messages] == ["done", "done"]
    assert account.messages[1].peer == 0, "the rank it came from"
    assert (account.sealed_bytes, account.opened_bytes) == (128, 28)
    assert flight.mail.finished == {"send": 1, "recv": 1}


def test_the_last_thousand_messages_are_kept_besides_those_under_way() -> None:
    flight = recorder(CountingEngine())
    waiting = message("recv", 0, tag=5000)
    flight.mail.posted(waiting)
    for tag in range(KEPT + 3):
        entry = message("send", 0, tag)
        flight.mail.posted(entry)
        flight.message_ended(entry, 0, None)
    kept = flight.account().messages
    assert [kept[0].tag, kept[1].tag, kept[-1].tag, len(kept)] == [5000, 3, KEPT + 2, KEPT + 1]
    assert flight.mail.finished == {"send": KEPT + 3}


def test_a_failed_message_is_a_failure_of_the_group() -> None:
    failures: list[str] = []
    flight = recorder(CountingEngine(), failures)
    entry = message("recv", 0)
    flight.mail.posted(entry)
    flight.message_ended(entry, None, PeerLost("rank 2 is gone", peer=2))
    flight.queued(1, ALL_REDUCE)
    flight.started(1, 1, ALL_REDUCE)
    flight.ended(PeerLost("rank 2 is gone", peer=2))
    assert failures == ["told"], "once, whichever failed first"
    assert flight.failed == {"group.peer_lost": 2}
    (failed,) = flight.account().messages
    assert (failed.state, failed.error) == ("failed", "group.peer_lost: rank 2 is gone")
    assert flight.account().state == "failed"
    assert flight.mail.finished == {}


def written() -> ProcessAccount:
    flight = recorder(CountingEngine())
    run(flight, 1)
    flight.queued(2, BROADCAST)
    flight.mail.posted(message("recv", -1))
    return ProcessAccount("tests", 4, "a-host", 17, time.time_ns(), [flight.account()])


def test_what_is_written_is_read_back() -> None:
    account = written()
    assert ProcessAccount.from_json(account.to_json(), "x") == account


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ("{", "", "x is not a flight record"),
        ("sealring flight record", "other", "x is not a flight record"),
        ('"version": 1', '"version": 2', "version 2; this sealring reads 1"),
        ('"pid": 17', '"pid": "17"', "x: pid is not what"),
        ('"pid": 17', '"pid": true', "x: pid is not what"),
        ('"pid": 17', '"pod": 17', "x is not what"),
        ('"state": "done"', '"state": "won"', r"x: groups\[0\]: collectives\[0\]: state is not"),
        ('"number": 1', '"number": -1', r"collectives\[0\]: number is not"),
        ('"number": 1', f'"number": {1 << 63}', r"collectives\[0\]: number is not"),
        ("0.5", "NaN", "x is not a flight record"),
        ('"waiting"', '"lost"', r"x: groups\[0\]: messages\[0\]: state is not"),
        ('"recv"', '"steal"', r"x: groups\[0\]: messages\[0\]: operation is not"),
        ('"number": 1', '"number": 1.5', r"x: groups\[0\]: collectives\[0\]: number is not"),
    ],
)
def test_a_file_that_is_no_flight_record_is_refused(old: str, new: str, sentence: str) -> None:
    text = written().to_json()
    assert old in text
    with pytest.raises(ConfigurationError, match=sentence):
        ProcessAccount.from_json(text.replace(old, new, 1), "x")
