"""Evidence in guest-components' JSON form: parses it, binds it, and asks their agent for it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from sealring.attest.evidence.az_vtpm import SNP_KIND, TDX_KIND, canonical_hcl_report
from sealring.attest.evidence.encoding import from_any_base64, places, to_base64, unknown_evidence
from sealring.attest.evidence.evidence import (
    MAX_CHAIN,
    MAX_DEVICES,
    REPORT_DATA_BYTES,
    Challenge,
    DeviceEvidence,
    Evidence,
)
from sealring.attest.evidence.guest import ask_local, quote_parts, report_parts, whole_chain
from sealring.attest.evidence.intel import (
    canonical_quote,
)
from sealring.attest.evidence.nvidia import KIND as NVIDIA
from sealring.attest.evidence.nvidia import canonical_report as canonical_device_report
from sealring.attest.evidence.snp import KIND as SNP
from sealring.attest.evidence.snp import (
    REPORT_BYTES,
    TCB_BYTES,
    Report,
)
from sealring.attest.evidence.tpm.machine import read_issuers
from sealring.attest.evidence.tpm.structures import parse_quote
from sealring.attest.evidence.trust import SGX, TDX
from sealring.errors import AttestationUnavailable, MalformedEvidence
from sealring.formats.strict import read_json, read_object

HASH: Final = "sha384"
_DEVICE_NONCE_BYTES: Final = 32


@dataclass(frozen=True, slots=True)
class GuestChallenge(Challenge):
    """A stock client's challenge. `public_key` is its JWK, in the form that is hashed."""

    machine_digest: bytes = b""
    device_digest: bytes = b""

    def report_data(self, kind: str, devices: Sequence[DeviceEvidence] = ()) -> bytes:
        return self.machine_digest.ljust(REPORT_DATA_BYTES, b"\0")

    def device_nonce(self, kind: str) -> bytes:
        return self.device_digest[:_DEVICE_NONCE_BYTES]


def guest_challenge(
    nonce: bytes, nonce_text: str, jwk: Mapping[str, str], additional: str
) -> GuestChallenge:
    """Makes the challenge. ValueError: a text that has no UTF-8 encoding."""
    asked = {"tee-pubkey": dict(jwk), "nonce": nonce_text}
    return GuestChallenge(
        nonce,
        canonical(jwk),
        machine_digest=_digest({**asked, "additional-evidence": additional}),
        device_digest=_digest(asked),
    )


def canonical(value: Mapping[str, Any]) -> bytes:
    """The RFC 8785 form of an object with ASCII names, whose values are texts or such objects."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return text.encode()


def _digest(value: Mapping[str, Any]) -> bytes:
    return hashlib.new(HASH, canonical(value)).digest()


_AZURE_VERSIONS: Final = (1, 2)
_RSASSA_SHA256: Final = bytes.fromhex("0014000b")
_PCR_BYTES: Final = 32
_VCEK: Final = "SEV-VCEK"
# Fields of a report that are numbers or bytes. This form has more of them than rules use.
_FIELDS: Final = {
    name: place
    for name, place in places(Report).items()
    if name not in ("tcb", "launch_tcb", "signed", "r", "s", "after_signature")
} | {
    "_author_key_en": (0x48, 4), "author_key_en": (0x48, 4), "report_id": (0x140, 32),
    "report_id_ma": (0x160, 32), "cpuid_fam_id": (0x188, 1), "cpuid_mod_id": (0x189, 1),
    "cpuid_step": (0x18A, 1), "current_build": (0x1E8, 1), "current_minor": (0x1E9, 1),
    "current_major": (0x1EA, 1), "committed_build": (0x1EC, 1), "committed_minor": (0x1ED, 1),
    "committed_major": (0x1EE, 1), "launch_mit_vector": (0x1F8, 8),
    "current_mit_vector": (0x200, 8),
}  # fmt: skip
_BYTES: Final = {"report_id", "report_id_ma"} | {
    one.name for one in dataclasses.fields(Report) if one.type == "bytes"
}
"""The fields that must be there, as lists of numbers."""
_TCBS: Final = {
    "current_tcb": 0x38,
    "reported_tcb": 0x180,
    "committed_tcb": 0x1E0,
    "launch_tcb": 0x1F0,
}
_VERSIONS: Final = {"current": 0x1E8, "committed": 0x1EC}


def evidence_of(
    kind: str,
    given: Any,
    challenge: Challenge,
    devices: tuple[DeviceEvidence, ...] = (),
    issuers: Sequence[bytes] = (),
) -> Evidence:
    """Reads the evidence of a kind. `issuers` are certificates that an SNP guest did not send.

    MalformedEvidence: it has another form. AttestationUnavailable: a certificate is in neither the
    evidence nor `issuers`.
    """
    try:
        if kind == SNP:
            parts, chain = _snp(given, issuers)
        elif kind in (TDX, SGX):
            parts, chain = _intel(kind, given), ()
        elif kind in (SNP_KIND, TDX_KIND):
            parts, chain = _azure(kind, given, issuers)
        else:
            raise unknown_evidence(
                f"{kind} evidence of stock KBS clients cannot be judged: it does not show whose "
                "hardware signed it"
            )
    except (KeyError, TypeError, ValueError, OverflowError, AttributeError, IndexError):
        raise MalformedEvidence(f"the {kind} evidence is not in guest-components' form") from None
    return Evidence(kind, challenge, parts, chain, devices)


def devices_of(additional: str) -> tuple[DeviceEvidence, ...]:
    """The devices' evidence in a client's `additional_evidence`: JSON, by kind. Often empty."""
    try:
        kinds = read_json(additional) if additional else {}
        if not isinstance(kinds, dict):
            raise TypeError
        if unknown := sorted(set(kinds) - {NVIDIA}):
            raise unknown_evidence(f"devices of kind {unknown[0][:32]} cannot be judged")
        listed = kinds[NVIDIA]["device_evidence_list"] if kinds else []
        if len(listed) > MAX_DEVICES:
            raise MalformedEvidence(f"a guest shows at most {MAX_DEVICES} devices")
        return tuple(_device(one) for one in listed)
    except (KeyError, TypeError, ValueError, AttributeError):
        raise MalformedEvidence("additional_evidence is not in guest-components' form") from None


def _device(given: Any) -> DeviceEvidence:
    text = given["evidence"]
    try:
        report = bytes.fromhex(text)  # as older clients send it
    except ValueError:
        report = from_any_base64(text)
    chain = read_issuers(from_any_base64(given["certificate"]))
    return DeviceEvidence(NVIDIA, {"report": canonical_device_report(report)}, chain)


def _snp(given: Any, issuers: Sequence[bytes]) -> tuple[dict[str, bytes], tuple[bytes, ...]]:
    report = report_of(given["attestation_report"])
    entries = given.get("cert_chain") or []
    if len(entries) > MAX_CHAIN:
        raise MalformedEvidence(f"an SNP host hands over at most {MAX_CHAIN} certificates")
    handed = [_octets(one["data"]) for one in entries]
    return report_parts(report, handed, issuers)


def _intel(kind: str, given: Any) -> dict[str, bytes]:
    quote = from_any_base64(given["quote"])
    if kind == TDX:
        return quote_parts(quote, _event_log(given.get("cc_eventlog")))
    return {"quote": canonical_quote(quote)}


def _azure(
    kind: str, given: Any, issuers: Sequence[bytes]
) -> tuple[dict[str, bytes], tuple[bytes, ...]]:
    if given["version"] not in _AZURE_VERSIONS:
        raise unknown_evidence(f"{kind} evidence of version {given['version']!r} is not known")
    quoted = given["tpm_quote"]
    message, signature = bytes.fromhex(quoted["message"]), bytes.fromhex(quoted["signature"])
    values = [bytes.fromhex(one) for one in quoted["pcrs"]]
    if any(len(one) != _PCR_BYTES for one in values):
        raise ValueError
    parts = {
        "hcl_report": canonical_hcl_report(from_any_base64(given["hcl_report"])),
        "quote": message,
        # The client sends the RSA signature without the TPM's header that names the scheme.
        "signature": _RSASSA_SHA256 + len(signature).to_bytes(2, "big") + signature,
        "pcrs": b"".join(values[pcr] for pcr in parse_quote(message).pcrs),
    }
    if kind == TDX_KIND:
        return parts | {"td_quote": canonical_quote(from_any_base64(given["td_quote"]))}, ()
    return parts, whole_chain(_VCEK, [from_any_base64(given["vcek"])], issuers)


def report_of(fields: Any) -> bytes:
    """A report's bytes, from its JSON fields or from an encoding of the bytes."""
    if isinstance(fields, str):
        return from_any_base64(fields)
    if isinstance(fields, list):
        return _octets(fields)
    raw = bytearray(REPORT_BYTES)

    def put(at: int, value: bytes) -> None:
        raw[at : at + len(value)] = value

    for name, (at, size) in _FIELDS.items():
        if name in _BYTES:
            put(at, _octets(fields[name]).ljust(size, b"\0")[:size])
        elif fields.get(name) is not None:
            put(at, int(fields[name]).to_bytes(size, "little"))
    for name, at in _TCBS.items():
        product = "Turin" if fields[name].get("fmc") is not None else "Milan"
        for part, offset in TCB_BYTES[product].items():
            raw[at + offset] = int(fields[name][part])
    for name, at in _VERSIONS.items():
        if name in fields:
            put(at, bytes(int(fields[name][part]) for part in ("build", "minor", "major")))
    for name in ("r", "s"):
        at, size = places(Report)[name]
        put(at, _octets(fields["signature"][name])[:size])
    return bytes(raw[:REPORT_BYTES])


def _event_log(text: Any) -> bytes:
    """The guest's event log. Empty if it cannot be read, since it is optional."""
    try:
        return from_any_base64(text) if text else b""
    except ValueError:
        return b""


def _octets(value: Any) -> bytes:
    """The bytes of a list of numbers. A lone number is refused: `bytes(n)` would make n zeros."""
    if not isinstance(value, list):
        raise TypeError
    return bytes(value)


AGENT: Final = ("127.0.0.1", 8006)


class CocoMachine:
    def __init__(self, chain: Sequence[bytes] = (), agent: tuple[str, int] = AGENT) -> None:
        """`chain` holds certificates of an SNP chip that the agent does not give."""
        self._chain, self._agent = tuple(chain), agent
        self.kind = TDX if "quote" in self._ask(bytes(64)) else SNP

    def attest(
        self, nonce: bytes, public_key: bytes, devices: tuple[DeviceEvidence, ...] = ()
    ) -> Evidence:
        challenge = Challenge(nonce, public_key)
        answer = self._ask(challenge.report_data(self.kind, devices))
        try:
            return evidence_of(self.kind, answer, challenge, devices, self._chain)
        except MalformedEvidence:
            raise AttestationUnavailable(
                "the pod's agent gives evidence in a form that is not known"
            ) from None

    def _ask(self, report_data: bytes) -> dict[str, Any]:
        asked = to_base64(report_data, url=True)
        answer = ask_local(self._agent, f"/aa/evidence?runtime_data={asked}&encoding=base64")
        refusal = AttestationUnavailable(
            "the pod's agent gives neither an SNP report nor a TDX quote"
        )
        found = read_object(answer, refusal)
        if not {"quote", "attestation_report"} & set(found):
            raise refusal
        return found
