"""The envelope in which evidence travels, and what evidence must be bound to.

{"version": 1, "kind": "snp",
 "challenge": {"nonce": hex, "public_key": base64 DER, "credential": hex},
 "parts": {"report": base64}, "chain": [base64 DER, leaf first, root last],
 "devices": [{"kind": "nvidia", "parts": {...}, "chain": [...]}]}

Parsing does not judge. Each evidence has one spelling: what parses is written back as it came.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from sealring.attest.evidence.encoding import (
    from_base64,
    from_hex,
    not_bound,
    to_base64,
    unknown_evidence,
)
from sealring.errors import MalformedEvidence
from sealring.formats.strict import read_object

VERSION: Final = 1
NONCE_BYTES: Final = 32
REPORT_DATA_BYTES: Final = 64
QUALIFYING_BYTES: Final = 32
"""How many bytes of the report data a TPM signs. Every TPM's qualifying data has room for them."""
MAX_EVIDENCE_BYTES: Final = 512 << 10
MAX_CHAIN: Final = 8
MAX_DEVICES: Final = 24
CREDENTIAL_BYTES: Final = 64
_BINDING: Final = b"sealring-1 attestation\0"
_DEVICE_BINDING: Final = b"sealring-1 device\0"
_FIELDS: Final = {"version", "kind", "challenge", "parts", "chain", "devices"}
_KIND: Final = re.compile(r"[a-z]{1,16}(?:-[a-z]{1,16}){0,3}")


@dataclass(frozen=True, slots=True)
class Challenge:
    """What evidence must be made for: the verifier's nonce and the worker's public key."""

    nonce: bytes
    public_key: bytes
    """DER, SubjectPublicKeyInfo."""
    credential: bytes = b""
    """For TPMs: whom the verifier's credential was made for, and its secret (tpm/credential.py)."""

    def report_data(self, kind: str, devices: Sequence[DeviceEvidence] = ()) -> bytes:
        """The 64 bytes that the hardware signs.

        The kind is in them, so that one TEE's report cannot pass as another's. The encoded evidence
        of the devices is in them, so that the machine vouches for these devices and no others. All
        parts but the last have a fixed length or an end mark, so no two inputs give the same bytes.
        """
        shown = json.dumps([device.as_json() for device in devices]).encode()
        bound = self._asked(kind) + _sha256(self.credential) + _sha256(shown)
        return hashlib.sha512(_BINDING + bound + self.public_key).digest()

    def device_nonce(self, kind: str) -> bytes:
        """The nonce for the devices of a machine of this kind. It serves one worker, one time.

        A TPM's credential is not in it, because devices are asked before the TPM.
        """
        return _sha256(_DEVICE_BINDING + self._asked(kind) + self.public_key)

    def _asked(self, kind: str) -> bytes:
        return kind.encode() + b"\0" + self.nonce


@dataclass(frozen=True, slots=True)
class DeviceEvidence:
    """The evidence of a device inside the machine, such as a GPU."""

    kind: str
    parts: Mapping[str, bytes]
    chain: tuple[bytes, ...]

    def only(self, *names: str, optional: tuple[str, ...] = ()) -> tuple[bytes, ...]:
        """The parts with these names. Raises if there are others. An optional one may be empty."""
        if not set(names) <= set(self.parts) <= {*names, *optional}:
            raise MalformedEvidence(
                f"{self.kind} evidence has the parts {', '.join((*names, *optional))}, only"
            )
        return tuple(self.parts.get(name, b"") for name in (*names, *optional))

    def as_json(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "parts": {name: to_base64(part) for name, part in self.parts.items()},
            "chain": [to_base64(certificate) for certificate in self.chain],
        }


@dataclass(frozen=True, slots=True)
class Evidence:
    kind: str
    challenge: Challenge
    """The sender's claim. A verifier brings its own challenge."""
    parts: Mapping[str, bytes]
    chain: tuple[bytes, ...]
    devices: tuple[DeviceEvidence, ...] = ()

    def only(self, *names: str, optional: tuple[str, ...] = ()) -> tuple[bytes, ...]:
        return DeviceEvidence(self.kind, self.parts, self.chain).only(*names, optional=optional)

    def binding(self, challenge: Challenge) -> bytes:
        """The bytes that the machine must have signed, with this evidence of its devices."""
        return challenge.report_data(self.kind, self.devices)

    def check_bound(self, signed: bytes, challenge: Challenge | None, what: str) -> None:
        """Raises evidence.not_bound unless the report data `signed` answer the challenge.

        It may be the first part of the report data. Without a challenge nothing is checked, and
        the result is no AttestedWorker.
        """
        if challenge is None:
            return
        if len(signed) < QUALIFYING_BYTES or signed != self.binding(challenge)[: len(signed)]:
            raise not_bound(f"{what} was made for another nonce, worker's key or set of devices")

    def encode(self) -> bytes:
        own = DeviceEvidence(self.kind, self.parts, self.chain).as_json()
        challenge = {
            "nonce": self.challenge.nonce.hex(),
            "public_key": to_base64(self.challenge.public_key),
            "credential": self.challenge.credential.hex(),
        }
        devices = [device.as_json() for device in self.devices]
        return json.dumps(
            {"version": VERSION, **own, "challenge": challenge, "devices": devices}
        ).encode()


def parse_evidence(data: bytes) -> Evidence:
    if len(data) > MAX_EVIDENCE_BYTES:
        raise MalformedEvidence(f"evidence has at most {MAX_EVIDENCE_BYTES} bytes")
    refusal = MalformedEvidence("evidence is a JSON object, and this is not one")
    fields = read_object(data, refusal)
    version = fields.get("version")
    if type(version) is not int or version != VERSION:
        raise unknown_evidence(f"the evidence is not of version {VERSION}: install one sealring")
    if set(fields) != _FIELDS:
        raise MalformedEvidence(f"evidence has exactly the fields {', '.join(sorted(_FIELDS))}")
    own = _one(fields)
    devices = fields["devices"]
    if not isinstance(devices, list) or len(devices) > MAX_DEVICES:
        raise MalformedEvidence(f"devices is a list of at most {MAX_DEVICES}")
    for device in devices:
        if not isinstance(device, dict) or set(device) != {"kind", "parts", "chain"}:
            raise MalformedEvidence("a device is an object of kind, parts and chain")
    return Evidence(
        own.kind,
        _challenge(fields["challenge"]),
        own.parts,
        own.chain,
        tuple(_one(device) for device in devices),
    )


def _one(fields: dict[str, Any]) -> DeviceEvidence:
    kind, parts, chain = fields["kind"], fields["parts"], fields["chain"]
    if not isinstance(kind, str) or not _KIND.fullmatch(kind):
        raise MalformedEvidence("kind is a word")
    if not isinstance(parts, dict) or not 1 <= len(parts) <= 16:
        raise MalformedEvidence("parts is an object of 1 to 16 fields")
    if not isinstance(chain, list) or len(chain) > MAX_CHAIN:
        raise MalformedEvidence(f"chain is a list of at most {MAX_CHAIN} certificates")
    return DeviceEvidence(
        kind,
        {name: _bytes(part, "a part") for name, part in parts.items()},
        tuple(_bytes(certificate, "a certificate") for certificate in chain),
    )


def _challenge(value: Any) -> Challenge:
    if not isinstance(value, dict) or set(value) != {"nonce", "public_key", "credential"}:
        raise MalformedEvidence("challenge is an object of nonce, public_key and credential")
    credential = value["credential"]
    return Challenge(
        _hex(value["nonce"], NONCE_BYTES, "the nonce"),
        _bytes(value["public_key"], "the public key"),
        b"" if credential == "" else _hex(credential, CREDENTIAL_BYTES, "the credential"),
    )


def _hex(value: Any, size: int, what: str) -> bytes:
    refusal = MalformedEvidence(f"{what} is not {size} bytes in lower-case hexadecimal")
    return from_hex(value, size, refusal)


def _bytes(value: Any, what: str) -> bytes:
    refusal = MalformedEvidence(f"{what} is not base64 in its one canonical form")
    if value == "":
        raise refusal
    return from_base64(value, refusal)


def _sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()
