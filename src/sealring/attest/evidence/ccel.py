"""The log of what a TDX guest's firmware and boot loader measured into the RTMRs.

It has the form of a TPM's log (UEFI's confidential-computing event log), with SHA-384 digests and
registers counted from MRTD: RTMR 0 is register 1. It is not signed: what it says counts only as far
as it leads to the RTMRs that the quote holds.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from sealring.attest.evidence.tpm.event_log import (
    EV_NO_ACTION,
    only_pcrs,
    parse_event_log,
    replay,
    without_filling,
)
from sealring.attest.evidence.tpm.structures import SHA384
from sealring.errors import ForgedEvidence, MalformedEvidence, UnknownEvidence

CCEL: Final = Path("/sys/firmware/acpi/tables/data/CCEL")
_REGISTERS: Final = {n + 1: f"rtmr{n}" for n in range(4)}


def check_ccel(log: bytes, registers: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    """The digests that each RTMR was extended with, if the log leads to what was quoted."""
    events = parse_event_log(log, SHA384)
    for number, value in replay(events, SHA384).items():
        name = _REGISTERS.get(number, "")
        if registers.get(name) != value.hex():
            raise ForgedEvidence(f"the event log does not lead to the value of {name or number}")
    found: dict[str, list[str]] = {}
    for event in events:
        if event.kind != EV_NO_ACTION:
            found.setdefault(_REGISTERS[event.pcr], []).append(event.digest.hex())
    return {name: tuple(digests) for name, digests in found.items()}


def matching_ccel(registers: Mapping[str, str], path: Path = CCEL) -> bytes:
    """This guest's log, where its firmware left one."""
    try:
        return matching_events(path.read_bytes(), registers)
    except OSError:
        return b""


def matching_events(padded: bytes, registers: Mapping[str, str]) -> bytes:
    """The log's events for the RTMRs that nothing has extended since without telling it."""
    try:
        log = without_filling(padded)
        expected = replay(parse_event_log(log, SHA384), SHA384)
    except (MalformedEvidence, UnknownEvidence):
        return b""
    same = {
        number
        for number, value in expected.items()
        if registers.get(_REGISTERS.get(number, "")) == value.hex()
    }
    return only_pcrs(log, same) if same else b""
