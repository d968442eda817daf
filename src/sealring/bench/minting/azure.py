"""A virtual TPM that an SNP report of our own AMD vouches for, in Azure's form."""

from __future__ import annotations

import base64
import hashlib
import json
from typing import Any

from cryptography.hazmat.primitives.asymmetric import rsa

from sealring.bench.minting import tpm
from sealring.bench.minting.amd import Amd
from sealring.bench.minting.certificates import CHALLENGE
from sealring.identity.attestation import Challenge, Evidence

KIND = "az-snp-vtpm"


class AzureGuest:
    def __init__(
        self, amd: Amd, *, secure_boot: bool = True, modulus: int | None = None, **changes: Any
    ) -> None:
        """`modulus` is a real TPM's; `changes` are the SNP report's."""
        self.amd = amd
        self.key = rsa.generate_private_key(65537, 2048)
        numbers = self.key.public_key().public_numbers()
        ak = {
            "kid": "HCLAkPub",
            "key_ops": ["sign"],
            "kty": "RSA",
            "e": _base64url(numbers.e),
            "n": _base64url(modulus or numbers.n),
        }
        settings = {"secure-boot": secure_boot, "tpm-enabled": True}
        self.text = json.dumps({"keys": [ak], "vm-configuration": settings}).encode()
        bound = hashlib.sha256(self.text).digest().ljust(64, b"\0")
        self.report = amd.report(report_data=bound, **changes)

    def hcl_report(self, text: bytes | None = None, *, version: int = 1, pad: int = 100) -> bytes:
        claims = self.text if text is None else text
        inner = 20 + len(claims)
        head = b"HCLA" + _numbers(version, 32 + len(self.report) + inner, 2) + bytes(16)
        return head + self.report + _numbers(inner, 1, 2, 1, len(claims)) + claims + bytes(pad)

    def evidence(self, challenge: Challenge = CHALLENGE, raw: bytes | None = None) -> Evidence:
        everything = tpm.pcr_values(tpm.BOOT)
        values = {pcr: everything[pcr] for pcr in tpm.PCRS}
        message = tpm.quote(values, challenge.report_data(KIND)[:32])
        parts = {
            "hcl_report": raw or self.hcl_report(),
            "quote": message,
            "signature": tpm.sign(self.key, message),
            "pcrs": b"".join(values[pcr] for pcr in sorted(values)),
            "event_log": tpm.event_log(tpm.BOOT),
        }
        return Evidence(KIND, challenge, parts, self.amd.chain)


def _base64url(number: int) -> str:
    raw = number.to_bytes((number.bit_length() + 7) // 8, "big")
    return base64.urlsafe_b64encode(raw).decode().rstrip("=")


def _numbers(*values: int) -> bytes:
    return b"".join(value.to_bytes(4, "little") for value in values)
