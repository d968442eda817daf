"""The firmware's log of what it measured, replayed against the PCRs.

TCG PC Client Platform Firmware Profile, crypto-agile form. The log itself is not signed: what it
says counts only as far as it leads to the PCRs that the TPM signed. So every PCR that it writes to
must come out as quoted.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from sealring.attest.evidence.encoding import Cursor
from sealring.attest.evidence.tpm.structures import BANKS, PCRS, SHA256, SHA384
from sealring.errors import ForgedEvidence, MalformedEvidence, UnknownEvidence

EV_NO_ACTION: Final = 3
_SPEC: Final = b"Spec ID Event03\0"
_LOCALITY: Final = b"StartupLocality\0"
_MAX_EVENTS: Final = 4096
_MAX_BANKS: Final = 8
_ALGORITHMS: Final = {SHA256: "sha256", SHA384: "sha384"}


@dataclass(frozen=True, slots=True)
class Event:
    pcr: int
    kind: int
    digest: bytes
    """In the bank that was asked for."""
    data: bytes


def parse_event_log(log: bytes, wanted: int = SHA256) -> tuple[Event, ...]:
    cursor = Cursor(log, "the event log", "little")
    sizes = _banks(cursor)
    if sizes.get(wanted) != BANKS[wanted]:
        raise UnknownEvidence("the event log has no digests of the bank that was quoted")
    events: list[Event] = []
    while cursor.left:
        if len(events) == _MAX_EVENTS:
            raise MalformedEvidence(f"the event log has more than {_MAX_EVENTS} events")
        pcr, kind = cursor.number(4), cursor.number(4)
        if pcr >= PCRS:
            raise MalformedEvidence(f"the event log writes to PCR {pcr}, of {PCRS}")
        digests: dict[int, bytes] = {}
        for _ in range(_count(cursor.number(4))):
            bank = cursor.number(2)
            if bank not in sizes or bank in digests:
                raise MalformedEvidence(
                    "an event has a digest of a bank that the log does not list"
                )
            digests[bank] = cursor.take(sizes[bank])
        if wanted not in digests:
            raise MalformedEvidence("an event has no digest of the bank that was quoted")
        events.append(Event(pcr, kind, digests[wanted], cursor.sized(4)))
    return tuple(events)


def _banks(cursor: Cursor) -> dict[int, int]:
    """The log's first event, in the old form, lists the hash algorithms of those that follow."""
    pcr, kind = cursor.number(4), cursor.number(4)
    cursor.take(20)
    head = Cursor(cursor.sized(4), "the event log's head", "little")
    # A TDX guest's log may count it to the first register that can be extended.
    if pcr > 1 or kind != EV_NO_ACTION or head.take(len(_SPEC)) != _SPEC:
        raise UnknownEvidence("the event log is not in TCG's crypto-agile form")
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
    """What the PCRs hold if just these events were measured since the machine was reset."""
    algorithm, size = _ALGORITHMS[bank], BANKS[bank]
    values: dict[int, bytes] = {}
    for event in events:
        if event.kind == EV_NO_ACTION:
            # The one that matters: firmware started from another locality, so PCR 0 began there.
            if event.data.startswith(_LOCALITY) and event.pcr == 0 and 0 not in values:
                values[0] = event.data[len(_LOCALITY) :][:1].rjust(size, b"\0")
            continue
        before = values.get(event.pcr, (b"\xff" if 17 <= event.pcr <= 22 else b"\0") * size)
        values[event.pcr] = hashlib.new(algorithm, before + event.digest).digest()
    return values


def check_log(
    log: bytes, pcrs: Mapping[int, bytes], bank: int = SHA256
) -> dict[int, tuple[str, ...]]:
    """The digests that each PCR was extended with, if the log leads to what was quoted."""
    events = parse_event_log(log, bank)
    for pcr, value in replay(events, bank).items():
        if pcr in pcrs and pcrs[pcr] != value:
            raise ForgedEvidence(f"the event log does not lead to the value of PCR {pcr}")
    found: dict[int, list[str]] = {}
    for event in events:
        if event.kind != EV_NO_ACTION and event.pcr in pcrs:
            found.setdefault(event.pcr, []).append(event.digest.hex())
    return {pcr: tuple(digests) for pcr, digests in found.items()}


def only_pcrs(log: bytes, keep: set[int]) -> bytes:
    """The log without the events of other PCRs, some of which software extends without it."""
    cursor = Cursor(log, "the event log", "little")
    sizes = _banks(cursor)
    kept = [log[: cursor.at]]
    while cursor.left:
        start = cursor.at
        pcr, _ = cursor.number(4), cursor.number(4)
        for _ in range(_count(cursor.number(4))):
            cursor.take(sizes.get(cursor.number(2), 0))
        cursor.sized(4)
        if pcr in keep:
            kept.append(log[start : cursor.at])
    return b"".join(kept)


def without_filling(log: bytes) -> bytes:
    """The log without what fills its memory up behind the last event: ones, or zeros."""
    cursor = Cursor(log, "the event log", "little")
    sizes = _banks(cursor)
    end = cursor.at
    while cursor.left >= 12:
        pcr, kind, banks = (cursor.number(4) for _ in range(3))
        if pcr >= PCRS or not banks or (pcr, kind) == (0, 0):
            break
        for _ in range(_count(banks)):
            cursor.take(sizes.get(cursor.number(2), 0))
        cursor.sized(4)
        end = cursor.at
    return log[:end]
