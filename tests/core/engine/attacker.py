"""Tools of a man in the middle, who reads and changes the bytes of a stream."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Final

from sealring import _native
from sealring.limits import HEADER_BYTES, TAG_BYTES
from tests.core.engine.local_world import Last

SEALED_HEADER_BYTES: Final = HEADER_BYTES + TAG_BYTES
EVERYONE: Final = 0xFFFFFFFF


class Kind(IntEnum):
    """Offset 3 of a header (native/record/record.hpp)."""

    PAIR = 1
    GROUP = 2
    ALERT = 3
    BYE = 4
    ANNOUNCE = 5
    ACCEPT = 6
    DATA = 7
    STATUS = 8
    FETCHED = 9


WIRE_LANE: Final = 256
DATA_KINDS: Final = (Kind.PAIR, Kind.GROUP)


@dataclass(frozen=True)
class Record:
    raw: bytes
    fields: dict[str, int]

    @property
    def kind(self) -> Kind:
        return Kind(self.fields["kind"])

    @property
    def sequence(self) -> tuple[int, int]:
        """The sealing key's users, (sender, receiver) or (sender, everyone): records are numbered
        per key."""
        return self.fields["sender"], self.fields["receiver"]

    @property
    def is_data(self) -> bool:
        return self.kind in DATA_KINDS


class Splitter:
    """Cuts a stream into records as its bytes arrive."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[Record]:
        self._rest += data
        records = []
        while len(self._rest) >= SEALED_HEADER_BYTES:
            fields = _native.parse_header(self._rest)
            assert fields is not None, "an engine wrote what is no header"
            # Of a record that lies in a slot of a GPU's area, only the header passes here.
            in_slot = fields["lane"] >= WIRE_LANE
            size = SEALED_HEADER_BYTES + (0 if in_slot else fields["length"] + TAG_BYTES)
            if len(self._rest) < size:
                break
            records.append(Record(self._rest[:size], fields))
            self._rest = self._rest[size:]
        return records

    @property
    def rest(self) -> bytes:
        return self._rest


def split(stream: bytes) -> list[Record]:
    splitter = Splitter()
    records = splitter.feed(stream)
    assert not splitter.rest, "the stream ends within a record"
    return records


@dataclass
class Tap:
    """Listens, and changes nothing."""

    stream: bytearray = field(default_factory=bytearray)

    def __call__(self, data: bytes) -> bytes:
        self.stream += data
        return data

    def records(self) -> list[Record]:
        return split(bytes(self.stream))

    def data_records(self) -> list[Record]:
        return [record for record in self.records() if record.is_data]


@dataclass
class Flip:
    """Changes one byte of the stream."""

    offset: int
    mask: int
    _seen: int = 0

    def __call__(self, data: bytes) -> bytes:
        at = self.offset - self._seen
        self._seen += len(data)
        if not 0 <= at < len(data):
            return data
        return data[:at] + bytes([data[at] ^ self.mask]) + data[at + 1 :]


@dataclass
class CutAt:
    """Lets a number of bytes pass, then cuts the link."""

    offset: int
    _seen: int = 0

    def __call__(self, data: bytes) -> bytes:
        left = self.offset - self._seen
        self._seen += len(data)
        return data if len(data) < left else Last(data[:left])


class ByRecord:
    """Hands each record and its index to `change`, and sends on what that returns."""

    def __init__(self, change: Callable[[int, Record], bytes], *, holds_open: bool = False) -> None:
        self.holds_open = holds_open
        """The receiver is kept from seeing that the sender has closed the link."""
        self._change = change
        self._splitter = Splitter()
        self._index = -1

    def __call__(self, data: bytes) -> Iterator[bytes]:
        for record in self._splitter.feed(data):
            self._index += 1
            yield self._change(self._index, record)


def drop(index: int) -> ByRecord:
    return ByRecord(lambda i, record: b"" if i == index else record.raw)


def repeat(index: int) -> ByRecord:
    return ByRecord(lambda i, record: record.raw * (2 if i == index else 1))


def replace(index: int, by: Record | bytes) -> ByRecord:
    raw = by.raw if isinstance(by, Record) else by
    return ByRecord(lambda i, record: raw if i == index else record.raw)


def swap(index: int) -> ByRecord:
    """Record `index` and the one after it change places."""
    held: list[bytes] = []

    def change(i: int, record: Record) -> bytes:
        if i == index:
            held.append(record.raw)
            return b""
        return record.raw + held.pop() if held else record.raw

    return ByRecord(change)


def swallow_alerts(*, holds_open: bool) -> ByRecord:
    return ByRecord(
        lambda _, record: b"" if record.kind is Kind.ALERT else record.raw, holds_open=holds_open
    )


class Mailbox:
    """Carries a record from one link, or one direction, to another."""

    def __init__(self) -> None:
        self._records: list[Record] = []
        self._changed = threading.Condition()

    def collect(self) -> ByRecord:
        def change(_: int, record: Record) -> bytes:
            with self._changed:
                self._records.append(record)
                self._changed.notify_all()
            return record.raw

        return ByRecord(change)

    def record(self, index: int) -> Record:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self._records) > index, timeout=5)
            return self._records[index]

    def put_in_place_of(self, index: int, of: int, delay_s: float = 0) -> ByRecord:
        """Sends the collected record `of` in place of record `index` of this stream."""

        def change(i: int, record: Record) -> bytes:
            if i != index:
                return record.raw
            time.sleep(delay_s)
            return self.record(of).raw

        return ByRecord(change)


def header(**fields: int) -> bytes:
    """A header that an attacker writes; each field has a valid value."""
    number = {name: fields.get(name, 0) for name in HEADER_FIELDS}
    number["kind"] = fields["kind"]
    out = b"SR\x01" + number["kind"].to_bytes(1, "little")
    for name, size in HEADER_FIELDS.items():
        out += number[name].to_bytes(size, "little")
    assert len(out) == HEADER_BYTES
    return out


HEADER_FIELDS: Final = {
    "length": 4,
    "count": 8,
    "lane": 4,
    "generation": 4,
    "sender": 4,
    "receiver": 4,
    "collective": 8,
    "operation": 1,
    "dtype": 1,
    "reduction": 1,
    "algorithm": 1,
    "message": 4,
    "segment": 4,
    "root": 4,
    "total": 8,
}
"""The header's fields after magic, version and kind, in order, and each one's size in bytes."""


def triples(records: Iterable[Record]) -> list[tuple[int, int, int, int, int]]:
    """Each record's key and nonce, as (sender, receiver, generation, lane, count)."""
    return [
        (*record.sequence, *(record.fields[name] for name in ("generation", "lane", "count")))
        for record in records
    ]
