"""Evidence from inside a confidential container, asked of the agent of its pod (guest-components).

Such pods have no configfs: the agent answers on the pod's own loopback. It gives a TDX quote as
base64 and an SNP report field by field; the report's bytes are put together again. If that went
wrong, the signature would not verify.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Sequence
from typing import Any, Final

from sealring.errors import AttestationUnavailable
from sealring.identity.attestation.ccel import matching_events
from sealring.identity.attestation.evidence import (
    Challenge,
    DeviceEvidence,
    Evidence,
    encode_devices,
)
from sealring.identity.attestation.intel import canonical_quote, quote_size, registers_of
from sealring.identity.attestation.intel_collateral import TDX
from sealring.identity.attestation.local_http import ask
from sealring.identity.attestation.snp import KIND as SNP
from sealring.identity.attestation.snp import REPORT_BYTES, canonical_report, parse_report
from sealring.identity.attestation.tsm import whole_chain

AGENT: Final = ("127.0.0.1", 8006)
# The fields of a report that are plain numbers or bytes, by where they are: AMD's document 56860.
_NUMBERS: Final = {
    "version": (0x00, 4), "guest_svn": (0x04, 4), "policy": (0x08, 8), "vmpl": (0x30, 4),
    "sig_algo": (0x34, 4), "plat_info": (0x40, 8), "key_info": (0x48, 4),
    "_author_key_en": (0x48, 4), "author_key_en": (0x48, 4), "cpuid_fam_id": (0x188, 1),
    "cpuid_mod_id": (0x189, 1),
    "cpuid_step": (0x18A, 1), "current_build": (0x1E8, 1), "current_minor": (0x1E9, 1),
    "current_major": (0x1EA, 1), "committed_build": (0x1EC, 1), "committed_minor": (0x1ED, 1),
    "committed_major": (0x1EE, 1), "launch_mit_vector": (0x1F8, 8),
    "current_mit_vector": (0x200, 8),
}  # fmt: skip
_BYTES: Final = {
    "family_id": (0x10, 16), "image_id": (0x20, 16), "report_data": (0x50, 64),
    "measurement": (0x90, 48), "host_data": (0xC0, 32), "id_key_digest": (0xE0, 48),
    "author_key_digest": (0x110, 48), "report_id": (0x140, 32), "report_id_ma": (0x160, 32),
    "chip_id": (0x1A0, 64),
}  # fmt: skip
_TCBS: Final = {
    "current_tcb": 0x38,
    "reported_tcb": 0x180,
    "committed_tcb": 0x1E0,
    "launch_tcb": 0x1F0,
}
_VERSIONS: Final = {"current": 0x1E8, "committed": 0x1EC}
_OLD_TCB: Final = {"bootloader": 0, "tee": 1, "snp": 6, "microcode": 7}
_NEW_TCB: Final = {"fmc": 0, "bootloader": 1, "tee": 2, "snp": 3, "microcode": 7}
_SIGNATURE: Final = {"r": 0x2A0, "s": 0x2E8}


class CocoMachine:
    def __init__(self, chain: Sequence[bytes] = (), agent: tuple[str, int] = AGENT) -> None:
        """`chain` holds certificates of an SNP chip that the agent does not give."""
        self._chain, self._agent = tuple(chain), agent
        self.kind = TDX if "quote" in self._ask(bytes(64)) else SNP

    def attest(
        self, nonce: bytes, public_key: bytes, devices: tuple[DeviceEvidence, ...] = ()
    ) -> Evidence:
        challenge = Challenge(nonce, public_key)
        answer = self._ask(challenge.report_data(self.kind, encode_devices(devices)))
        try:
            return self._evidence(answer, challenge, devices)
        except (KeyError, TypeError, ValueError, OverflowError, AttributeError):
            raise AttestationUnavailable(
                "the pod's agent gives evidence in a form that is not known"
            ) from None

    def _evidence(
        self, answer: dict[str, Any], challenge: Challenge, devices: tuple[DeviceEvidence, ...]
    ) -> Evidence:
        if self.kind == TDX:
            padded = _decoded(answer["quote"])
            quote = padded[: quote_size(padded)]
            parts = {"quote": canonical_quote(quote)}
            if log := _log(answer.get("cc_eventlog"), quote):
                parts["event_log"] = log
            return Evidence(TDX, challenge, parts, (), devices)
        report = report_of(answer["attestation_report"])
        handed = [bytes(one["data"]) for one in answer.get("cert_chain") or []]
        chain = whole_chain(parse_report(report).key_name, handed, self._chain)
        return Evidence(SNP, challenge, {"report": canonical_report(report)}, chain, devices)

    def _ask(self, report_data: bytes) -> dict[str, Any]:
        asked = base64.urlsafe_b64encode(report_data).decode().rstrip("=")
        answer = ask(self._agent, f"/aa/evidence?runtime_data={asked}&encoding=base64")
        try:
            found = json.loads(answer)
        except ValueError:
            found = None
        if not isinstance(found, dict) or not {"quote", "attestation_report"} & set(found):
            raise AttestationUnavailable(
                "the pod's agent gives neither an SNP report nor a TDX quote"
            )
        return found


def report_of(fields: Any) -> bytes:
    """A report's bytes, from its fields or as they are."""
    if isinstance(fields, str):
        return _decoded(fields)
    if isinstance(fields, list):
        return bytes(fields)
    raw = bytearray(REPORT_BYTES)

    def put(at: int, value: bytes) -> None:
        raw[at : at + len(value)] = value

    for name, (at, size) in _NUMBERS.items():
        if fields.get(name) is not None:
            put(at, int(fields[name]).to_bytes(size, "little"))
    for name, (at, size) in _BYTES.items():
        put(at, bytes(fields[name]).ljust(size, b"\0")[:size])
    for name, at in _TCBS.items():
        layout = _NEW_TCB if fields[name].get("fmc") is not None else _OLD_TCB
        for part, offset in layout.items():
            raw[at + offset] = int(fields[name][part])
    for name, at in _VERSIONS.items():
        if name in fields:
            put(at, bytes(int(fields[name][part]) for part in ("build", "minor", "major")))
    for name, at in _SIGNATURE.items():
        put(at, bytes(fields["signature"][name]))
    return bytes(raw[:REPORT_BYTES])


def _log(text: str | None, quote: bytes) -> bytes:
    """The guest's log, of the RTMRs that nothing has extended since without telling it."""
    try:
        return matching_events(_decoded(text), registers_of(quote)) if text else b""
    except ValueError:
        return b""


def _decoded(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error:
        return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
