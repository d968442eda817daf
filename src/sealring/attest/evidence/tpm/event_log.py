"""The firmware's log of what it measured, replayed against the PCRs.

The form is that of the TCG PC Client Platform Firmware Profile, crypto-agile. The log itself is not
signed. It counts only if it leads to the PCRs that the TPM signed: every PCR that it extends must
come out as quoted.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from sealring.attest.evidence.encoding import Cursor, unknown_evidence
from sealring.attest.evidence.tpm.structures import BANKS, PCRS, SHA256, SHA384
from sealring.errors import ForgedEvidence, MalformedEvidence

EV_NO_ACTION: Final = 3
_SPEC: Final = b"Spec ID Event03\0"
_LOCALITY: Final = b"StartupLocality\0"
_EVENT_HEAD_BYTES: Final = 12
_MAX_EVENTS: Final = 4096
_MAX_BANKS: Final = 8
_ALGORITHMS: Final = {SHA256: "sha256", SHA384: "sha384"}
PCR_NAMES: Final = {n: f"pcr{n}" for n in range(PCRS)}
RTMR_NAMES: Final = {n + 1: f"rtmr{n}" for n in range(4)}
"""A TDX guest's registers. Its log counts them from 1."""


@dataclass(frozen=True, slots=True)
class Event:
    pcr: int
    kind: int
    digest: bytes
    """The digest in the bank that was asked for."""
    data: bytes
    start: int
    end: int
    """The event's bytes are log[start:end]."""


def parse_event_log(log: bytes, wanted: int = SHA256, *, filled: bool = False) -> tuple[Event, ...]:
    """Reads a log. `filled`: ones or zeros may fill the log's memory after the last event."""
    cursor = Cursor(log, "the event log", "little")
    sizes = _banks(cursor)
    if sizes.get(wanted) != BANKS[wanted]:
        raise unknown_evidence("the event log has no digests of the bank that was quoted")
    events: list[Event] = []
    while cursor.left:
        if len(events) == _MAX_EVENTS:
            raise MalformedEvidence(f"the event log has more than {_MAX_EVENTS} events")
        start = cursor.at
        if filled and cursor.left < _EVENT_HEAD_BYTES:
            break
        pcr, kind, banks = cursor.number(4), cursor.number(4), cursor.number(4)
        if filled and (pcr >= PCRS or not banks or (pcr, kind) == (0, 0)):
            break
        if pcr >= PCRS:
            raise MalformedEvidence(f"the event log writes to PCR {pcr}, of {PCRS}")
        digests: dict[int, bytes] = {}
        for _ in range(_count(banks)):
            bank = cursor.number(2)
            if bank not in sizes or bank in digests:
                raise MalformedEvidence(
                    "an event has a digest of a bank that the log does not list"
                )
            digests[bank] = cursor.take(sizes[bank])
        if wanted not in digests:
            raise MalformedEvidence("an event has no digest of the bank that was quoted")
        data = cursor.sized(4)
        events.append(Event(pcr, kind, digests[wanted], data, start, cursor.at))
    return tuple(events)


def _banks(cursor: Cursor) -> dict[int, int]:
    """The hash algorithms of a log, listed by its first event, which has the old form."""
    pcr, kind = cursor.number(4), cursor.number(4)
    cursor.take(20)
    head = Cursor(cursor.sized(4), "the event log's head", "little")
    # A TDX guest's log may assign it to the first register that can be extended.
    if pcr > 1 or kind != EV_NO_ACTION or head.take(len(_SPEC)) != _SPEC:
        raise unknown_evidence("the event log is not in TCG's crypto-agile form")
    head.take(8)
    sizes = {head.number(2): head.number(2) for _ in range(_count(head.number(4)))}
    head.sized(1)
    head.end()
    return sizes


def _count(banks: int) -> int:
    if not 1 <= banks <= _MAX_BANKS:
        raise MalformedEvidence(f"the event log counts {banks} banks")
    return banks


def replay(events: tuple[Event, ...], bank: int = SHA256) -> dict[int, bytes]:
    """The PCRs' values if exactly these events were measured since the machine was reset."""
    algorithm, size = _ALGORITHMS[bank], BANKS[bank]
    values: dict[int, bytes] = {}
    for event in events:
        if event.kind == EV_NO_ACTION:
            # If the firmware started from another locality, PCR 0 began with its number.
            if event.data.startswith(_LOCALITY) and event.pcr == 0 and 0 not in values:
                values[0] = event.data[len(_LOCALITY) :][:1].rjust(size, b"\0")
            continue
        before = values.get(event.pcr, (b"\xff" if 17 <= event.pcr <= 22 else b"\0") * size)
        values[event.pcr] = hashlib.new(algorithm, before + event.digest).digest()
    return values


def check_log(
    log: bytes, registers: Mapping[str, str], bank: int, names: Mapping[int, str]
) -> dict[str, tuple[str, ...]]:
    """The digests that each quoted register was extended with. The log must lead to its value.

    `names` gives a register's name for its number in the log: PCR_NAMES, RTMR_NAMES.
    """
    events = parse_event_log(log, bank)
    for number, value in replay(events, bank).items():
        name = names.get(number)
        if name is None or registers.get(name, value.hex()) != value.hex():
            raise ForgedEvidence(f"the event log does not lead to the value of {name or number}")
    found: dict[str, list[str]] = {}
    for event in events:
        name = names.get(event.pcr, "")
        if event.kind != EV_NO_ACTION and name in registers:
            found.setdefault(name, []).append(event.digest.hex())
    return {name: tuple(digests) for name, digests in found.items()}


def read_log(path: Path) -> bytes:
    """A log's bytes. Empty if firmware left no log, or this process may not read it."""
    try:
        return path.read_bytes()
    except OSError:
        return b""


def matching_log(
    log: bytes, registers: Mapping[str, str], bank: int, names: Mapping[int, str]
) -> bytes:
    """The events of a machine's own log, for those registers whose values it explains.

    Empty if there is no log, or none that can be read.
    """
    try:
        events = parse_event_log(log, bank, filled=True)
    except MalformedEvidence:
        return b""
    values = replay(events, bank)
    same = {n for n, value in values.items() if registers.get(names.get(n, "")) == value.hex()}
    kept = [log[one.start : one.end] for one in events if one.pcr in same]
    return log[: events[0].start] + b"".join(kept) if same else b""
