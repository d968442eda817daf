"""A decoder written from docs/spec.md alone opens the records that engines put on their links.

Every kind of record, every lane, several generations of keys.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable

import numpy as np
import pytest
from cryptography.exceptions import InvalidTag

from sealring import _native
from sealring.core.engine.collective import DType, ReduceKind
from sealring.core.engine.cuda.wires import Wire
from sealring.core.handshake.terms import PipeName
from sealring.core.links.link import Link
from sealring.core.schedule import Algorithm, Operation
from tests.core.engine import spec_decoder as spec
from tests.core.engine.attacker import Splitter, Tap
from tests.core.engine.cases import Case, tensors_of
from tests.core.engine.cuda.test_wires import RUN, SLOT_BYTES
from tests.core.engine.local_world import (
    LocalMail,
    LocalWorld,
    Middle,
    receive,
    send,
    slot,
    tcp_pair,
)
from tests.core.engine.spec_decoder import Alert, Inbox, Opened
from tests.imports import packages_imported_by

ALL_REDUCE = Case(Operation.ALL_REDUCE, Algorithm.DIRECT, 5000, DType.FLOAT32, ReduceKind.SUM)


def tapped(world: int) -> dict[tuple[int, int], Tap]:
    return {(a, b): Tap() for a in range(world) for b in range(world) if a != b}


def decoded(
    local: LocalWorld,
    taps: dict[tuple[int, int], Tap],
    slots: dict[tuple[int, int], Callable[[int], bytes]] | None = None,
    lanes: dict[tuple[int, int, int], Tap] | None = None,
) -> dict[tuple[int, int], list[Opened]]:
    """Every record on every link, by (sender, receiver) of the link.

    `lanes` has the further pipes, by (sender, receiver, lane).
    """
    records = {}
    group_keys = {rank: bytes(local.key("group", rank)) for rank in range(local.world)}
    for receiver in range(local.world):
        inbox = Inbox(receiver, local.context, group_keys)
        for (a, b), tap in taps.items():
            if b == receiver:
                key = bytes(local.key("pair", a, b))
                records[a, b] = inbox.decode(bytes(tap.stream), a, key, (slots or {}).get((a, b)))
        for (a, b, lane), tap in (lanes or {}).items():
            if b == receiver:
                key = bytes(local.key("pair", a, b))
                records[a, b] += inbox.decode(bytes(tap.stream), a, key, lane=lane)
        inbox.finish()
    return records


def kinds(records: dict[tuple[int, int], list[Opened]]) -> set[int]:
    return {record.kind for each in records.values() for record in each}


def joined(records: list[Opened], kind: int, **fields: int) -> bytes:
    """The payloads of one message, in the order of their segments."""
    wanted = [
        one
        for one in records
        if one.kind == kind and all(one.fields[name] == value for name, value in fields.items())
    ]
    return b"".join(one.plain for one in sorted(wanted, key=lambda one: one.segment))


def run(local: LocalWorld, case: Case) -> list[list[bytes]]:
    """Runs the case, and returns what each rank's slots held before it."""
    tensors = tensors_of(case, local.world)
    before = [each.bits() for each in tensors]
    assert local.run([each.collective() for each in tensors], timeout_s=30) == [None] * local.world
    return before


@pytest.mark.parametrize(("devices", "lane"), [({}, 0), ({0: 1, 1: 2, 2: 0}, 1)])
def test_collectives(devices: dict[int, int], lane: int) -> None:
    taps = tapped(3)
    scattered = Case(Operation.REDUCE_SCATTER, Algorithm.DIRECT, 900, DType.FLOAT32, ReduceKind.SUM)
    gathered = Case(Operation.ALL_GATHER, Algorithm.RING, 700, DType.FLOAT32)
    with LocalWorld(
        3, record_bytes=1024, rekey_bytes=5000, middle=dict(taps), devices=devices
    ) as local:
        reduced = run(local, ALL_REDUCE)
        parts = run(local, scattered)
        own = run(local, gathered)
    records = decoded(local, taps)
    assert kinds(records) >= {spec.PAIR, spec.GROUP, spec.BYE}
    data = [one for each in records.values() for one in each if one.kind != spec.BYE]
    assert {one.lane for one in data if one.kind in (spec.PAIR, spec.GROUP)} == {lane}
    assert max(one.generation for one in data) > 2
    for (a, b), each in records.items():
        assert each[-1].kind == spec.BYE
        assert joined(each, spec.GROUP, collective=1, sender=a) == reduced[a][0]
        assert joined(each, spec.PAIR, collective=2, message=b) == parts[a][b]
    for receiver in range(3):
        for sender in {0, 1, 2} - {receiver}:
            # Around the ring: over the link from the rank below, which need not have sealed it.
            passed = records[(receiver - 1) % 3, receiver]
            assert joined(passed, spec.GROUP, collective=3, message=sender) == own[sender][-1]


def test_a_status_and_alerts() -> None:
    taps = tapped(2)
    with LocalWorld(2, middle=dict(taps)) as local:
        tensors = tensors_of(ALL_REDUCE, 2)
        early = local.pool.submit(local.engines[0].run, 1, tensors[0].collective(), 20.0)
        time.sleep(0.9)
        local.engines[1].run(1, tensors[1].collective(), 20.0)
        early.result()
        local.number = 1
        other = Case(Operation.ALL_REDUCE, Algorithm.DIRECT, 77, DType.FLOAT32, ReduceKind.SUM)
        errors = local.run(
            [tensors_of(ALL_REDUCE, 2)[0].collective(), tensors_of(other, 2)[1].collective()]
        )
        assert None not in errors
    records = decoded(local, taps)
    statuses = [one for one in records[0, 1] if one.kind == spec.STATUS]
    assert [(one.collective, one.plain) for one in statuses[:1]] == [(1, b"")]
    alerts = [
        Alert.parse(one.plain)
        for each in records.values()
        for one in each
        if one.kind == spec.ALERT
    ]
    assert {alert.error for alert in alerts} == {"OutOfStep"}
    assert {alert.collective for alert in alerts} == {2}


@pytest.mark.parametrize(("devices", "lane"), [({}, 0), ({0: 1, 1: 2}, 1)])
def test_messages(devices: dict[int, int], lane: int) -> None:
    taps = tapped(2)
    sizes = (0, 64, 20_000, 100_000)
    messages = [np.random.default_rng(size).integers(0, 256, size, np.uint8) for size in sizes]
    memories = [np.zeros(size, np.uint8) for size in sizes]
    with LocalMail(
        2, record_bytes=4096, rekey_bytes=30_000, middle=dict(taps), devices=devices
    ) as mail:
        zero, one = mail.mailboxes
        sent = [
            send(zero, 1, tag, slot(message), 20, mail.caller(0))
            for tag, message in enumerate(messages)
        ]

        def receives() -> None:
            for tag, memory in enumerate(memories):
                one.wait(receive(one, 0, tag, slot(memory), 20, mail.caller(1)))

        receiving = mail.pool.submit(receives)
        for submitted in sent:
            zero.wait(submitted)
        receiving.result()
    records = decoded(mail, taps)
    assert kinds(records) == {spec.ANNOUNCE, spec.ACCEPT, spec.DATA, spec.BYE}
    announced = [each for each in records[0, 1] if each.kind == spec.ANNOUNCE]
    assert [(each.message, each.total) for each in announced] == list(enumerate(sizes))
    for each, message in zip(announced, messages, strict=True):
        if each.segment == 1:
            assert each.plain == message.tobytes()
        else:
            assert each.segment == (2 if devices else 0)
            assert joined(records[0, 1], spec.DATA, collective=each.collective) == message.tobytes()
    data = [each for each in records[0, 1] if each.kind == spec.DATA]
    assert {each.lane for each in data} == {lane}
    assert max(each.generation for each in data) > 1
    accepted = {each.collective for each in records[1, 0] if each.kind == spec.ACCEPT}
    assert accepted >= {each.collective for each in data}


class Recorder(Tap):
    """A tap that also keeps the slot's bytes at the time its header passes."""

    def __init__(self) -> None:
        super().__init__()
        self.area = 0
        self.slots: list[bytes] = []
        self._splitter = Splitter()

    def __call__(self, data: bytes) -> bytes:
        for record in self._splitter.feed(data):
            if record.fields["lane"] >= spec.FIRST_WIRE_LANE:
                at = self.area + (record.fields["lane"] - spec.FIRST_WIRE_LANE) * SLOT_BYTES
                self.slots.append(ctypes.string_at(at, SLOT_BYTES))
        return super().__call__(data)


def test_runs_in_slots(areas: dict[int, int]) -> None:
    taps = {way: Recorder() for way in ((0, 1), (1, 0))}
    big = Case(Operation.ALL_REDUCE, Algorithm.DIRECT, RUN, DType.FLOAT32, ReduceKind.SUM)
    with LocalWorld(
        2, middle=dict(taps), hosts=[0, 0], devices={0: 1, 1: 2}, rekey_bytes=1_000_000
    ) as local:
        assert local.wire(Wire.PEER) == [None, None]
        first = local.number + 1
        for (a, _), tap in taps.items():
            tap.area = areas[id(local.engines[a]._native)]
        inputs = [run(local, big), run(local, big)]
    records = decoded(local, dict(taps), {way: tap.slots.__getitem__ for way, tap in taps.items()})
    assert kinds(records) == {spec.PAIR, spec.GROUP, spec.FETCHED, spec.BYE}
    for (a, _), each in records.items():
        for number, before in enumerate(inputs, first):
            runs = [one for one in each if one.kind == spec.GROUP and one.collective == number]
            assert {one.lane >= spec.FIRST_WIRE_LANE for one in runs} == {True}
            assert len(runs) > 2
            assert joined(each, spec.GROUP, collective=number) == before[a][0]
        wired = [one for one in each if one.lane >= spec.FIRST_WIRE_LANE]
        assert max(one.generation for one in wired) > 0
        fetched = [one.total for one in each if one.kind == spec.FETCHED]
        assert fetched == sorted(set(fetched))


def test_further_lanes() -> None:
    """Three lanes of a pair, each with keys of its own."""
    taps = tapped(2)
    further: dict[tuple[int, int, int], Tap] = {}
    middles: list[Middle] = []
    opened: dict[int, list[Link]] = {0: [], 1: []}
    for lane in (1, 2):
        (zero, led), (back, other) = tcp_pair(), tcp_pair()
        for source, sink, way in ((led, back, (0, 1)), (back, led, (1, 0))):
            further[*way, 1 + lane] = tap = Tap()
            middles.append(Middle(source, sink, tap))
        for rank, end in enumerate((zero, other)):
            end.setblocking(False)
            unused = _native.Secret.random(32)
            opened[rank].append(
                Link(
                    peer=1 - rank,
                    purpose="collectives",
                    lane=lane,
                    host="",
                    address="",
                    socket=end,
                    memory=None,
                    dialer=False,
                    send_key=unused,
                    receive_key=unused,
                    peer_group_key=None,
                    fingerprint="",
                )
            )

    class OpenedBefore:
        """The exchange, as far as an engine needs it for lanes."""

        def __init__(self, rank: int) -> None:
            self.links = opened[rank]

        def open_agreed(self, names: list[PipeName], within_s: float) -> list[Link]:
            assert [name.lane for name in names] == [1, 2]
            return self.links

    large = Case(Operation.ALL_REDUCE, Algorithm.DIRECT, 1 << 20, DType.FLOAT32, ReduceKind.SUM)
    with LocalWorld(2, middle=dict(taps), rekey_bytes=1_000_000) as local:
        for rank, engine in enumerate(local.engines):
            engine.lanes.limit = 3
            engine.lanes.exchange = OpenedBefore(rank)  # type: ignore[assignment]
        tensors = tensors_of(large, 2)
        before = [each.bits() for each in tensors]

        def run_all(rank: int) -> int:
            engine, collective = local.engines[rank], tensors[rank].collective()
            number = 0
            for number, each in enumerate(engine.with_lanes(collective, 30.0), 1):
                engine.run(number, each, 30.0)
            return number

        (last,) = set(local.pool.map(run_all, range(2)))
    for middle in middles:
        middle.join(10)
        middle.source.close()
    records = decoded(local, taps, lanes=further)
    assert {lane for _, _, lane in further} == {2, 3}
    for (a, _), each in records.items():
        data = [one for one in each if one.kind == spec.GROUP and one.collective == last]
        # In headers, the further lane n has the number n + 1.
        assert {one.lane for one in data} == {0, 2, 3}
        for one in data:
            number = one.segment // 4 % 3
            assert one.lane == (number + 1 if number else 0)
        assert max(one.generation for one in data if one.lane == 2) > 0
        assert joined(each, spec.GROUP, collective=last) == before[a][0]
        assert {one.lane for one in each if one.kind == spec.BYE} == {0, 2, 3}


def test_the_decoder_refuses_what_was_changed() -> None:
    taps = tapped(2)
    with LocalWorld(2, middle=dict(taps)) as local:
        run(local, ALL_REDUCE)
    stream = taps[0, 1].stream
    for at in (60, 70, 100, len(stream) - 1):
        stream[at] ^= 1
        with pytest.raises((InvalidTag, spec.NotTheSpecification)):
            decoded(local, taps)
        stream[at] ^= 1
    decoded(local, taps)


def test_the_decoder_knows_nothing_of_sealring() -> None:
    imported = packages_imported_by(spec)
    assert "cryptography" in imported
    assert not imported & {"sealring", "tests"}
