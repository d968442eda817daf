"""What an NVIDIA device signs: SPDM 1.1's request for measurements and the answer (DMTF DSP0274).

The request's nonce is the verifier's. The answer's opaque data holds NVIDIA's own fields.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from sealring.attest.evidence.cursor import Cursor
from sealring.attest.evidence.ecdsa import P384_ORDER, with_lower_s
from sealring.errors import MalformedEvidence, UnknownEvidence

SIGNATURE_BYTES: Final = 96
_VERSION: Final = 0x11
_REQUEST, _ANSWER = 0xE0, 0x60
_SIGNED, _ALL = 0x01, 0xFF
_DMTF: Final = 1

DRIVER, VBIOS, NVDEC0, CHIP_SKU, PROJECT, PROJECT_SKU = 3, 6, 11, 15, 17, 18
FWID, PROTECTED_PCIE, SWITCHES, SWITCH_GPUS, FEATURES = 20, 21, 22, 26, 36


@dataclass(frozen=True, slots=True)
class Report:
    nonce: bytes
    """The verifier's, from the request."""
    measurements: Mapping[int, bytes]
    """By index, counted from 0 as in the references."""
    opaque: Mapping[int, bytes]
    signed: bytes
    signature: bytes

    def text(self, field: int) -> str:
        raw = self.opaque.get(field, b"").rstrip(b"\0")
        return raw.decode() if raw.isascii() and raw.decode("ascii").isprintable() else raw.hex()

    @property
    def vbios(self) -> str:
        """GPUs have it as five bytes in an order of their own, switches as text."""
        raw = self.opaque.get(VBIOS, b"")
        if len(raw) != 8:
            return self.text(VBIOS)
        return ".".join(f"{raw[at]:02X}" for at in (3, 2, 1, 0, 4))


def canonical_report(data: bytes) -> bytes:
    """As a worker sends it (ecdsa.py), without the zeros that some drivers leave behind it."""
    _, end = _read(data)
    _check_rest(data, data[end:].rstrip(b"\0"))
    half = SIGNATURE_BYTES // 2
    return with_lower_s(data[:end], end - half, half, P384_ORDER)


def parse_report(data: bytes) -> Report:
    report, end = _read(data)
    _check_rest(data, data[end:])
    return report


def _check_rest(data: bytes, rest: bytes) -> None:
    if rest:
        raise MalformedEvidence(
            f"the device's report of {len(data)} bytes goes on behind its signature"
        )


def _read(data: bytes) -> tuple[Report, int]:
    """The report, and where it ends."""
    cursor = Cursor(data, "the device's report", "little")
    version, code, attributes, which = cursor.take(4)
    if version != _VERSION:
        raise UnknownEvidence(f"SPDM version {version:#x} is not known")
    if (code, attributes, which) != (_REQUEST, _SIGNED, _ALL):
        raise MalformedEvidence("the report is no answer to a request for all measurements")
    nonce = cursor.take(32)
    cursor.take(1)
    version, code = cursor.number(1), cursor.number(1)
    if (version, code) != (_VERSION, _ANSWER):
        raise MalformedEvidence("the report does not hold SPDM measurements")
    cursor.take(2)
    blocks = cursor.number(1)
    measurements = _measurements(cursor.sized(3), blocks)
    cursor.take(32)  # The device's own nonce: it keeps the device from signing foreign bytes.
    opaque = _opaque(cursor.sized(2))
    signed = data[: cursor.at]
    signature = cursor.take(SIGNATURE_BYTES)
    return Report(nonce, measurements, opaque, signed, signature), cursor.at


def _measurements(record: bytes, blocks: int) -> dict[int, bytes]:
    cursor = Cursor(record, "the measurements", "little")
    found: dict[int, bytes] = {}
    for _ in range(blocks):
        index, form = cursor.number(1), cursor.number(1)
        if form != _DMTF:
            raise UnknownEvidence(f"measurements of form {form} are not known")
        if index == 0 or index - 1 in found:
            raise MalformedEvidence(f"measurement {index} has no place, or comes twice")
        block = Cursor(cursor.sized(2), "a measurement", "little")
        block.take(1)
        found[index - 1] = block.sized(2)
        block.end()
    cursor.end()
    if not found:
        raise MalformedEvidence("the report holds no measurements")
    return found


def _opaque(data: bytes) -> dict[int, bytes]:
    cursor = Cursor(data, "the device's own fields", "little")
    found: dict[int, bytes] = {}
    while cursor.left:
        field = cursor.number(2)
        if field in found:
            raise MalformedEvidence(f"the device's field {field} comes twice")
        found[field] = cursor.sized(2)
    return found
