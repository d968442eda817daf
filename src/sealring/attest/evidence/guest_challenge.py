"""What a stock KBS client's evidence must be bound to: the KBS protocol's own rule.

    SHA-384(JCS({"tee-pubkey", "nonce", "additional-evidence"}))    then zeros, up to 64 bytes

JCS is RFC 8785: for objects of strings, JSON with sorted names, without spaces, and with no escapes
but those that JSON needs. The devices' evidence is the text "additional-evidence", so the machine
vouches for just those devices. Devices sign the hash of the same object without that field.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from sealring.attest.evidence.evidence import REPORT_DATA_BYTES, Challenge

HASH: Final = "sha384"
_DEVICE_NONCE_BYTES: Final = 32


@dataclass(frozen=True, slots=True)
class GuestChallenge(Challenge):
    """`public_key` is the client's JWK, as it is hashed."""

    machine_digest: bytes = b""
    device_digest: bytes = b""

    def report_data(self, kind: str, devices: bytes = b"[]") -> bytes:
        return self.machine_digest.ljust(REPORT_DATA_BYTES, b"\0")

    def device_nonce(self, kind: str) -> bytes:
        return self.device_digest[:_DEVICE_NONCE_BYTES]


def guest_challenge(
    nonce: bytes, nonce_text: str, jwk: Mapping[str, str], additional: str
) -> GuestChallenge:
    """ValueError: a text that has no encoding."""
    asked = {"tee-pubkey": dict(jwk), "nonce": nonce_text}
    return GuestChallenge(
        nonce,
        canonical(jwk),
        machine_digest=_digest({**asked, "additional-evidence": additional}),
        device_digest=_digest(asked),
    )


def canonical(value: Mapping[str, Any]) -> bytes:
    """RFC 8785, of objects whose names are ASCII and whose values are texts or such objects."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return text.encode()


def _digest(value: Mapping[str, Any]) -> bytes:
    return hashlib.new(HASH, canonical(value)).digest()
