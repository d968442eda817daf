"""A virtual TPM that a report of our own AMD or Intel vouches for, in Azure's form."""

from __future__ import annotations

import base64
import hashlib
import json
from typing import Any

from cryptography.hazmat.primitives.asymmetric import rsa

from sealring.bench.minting import tpm
from sealring.bench.minting.amd import Amd
from sealring.bench.minting.certificates import CHALLENGE
from sealring.bench.minting.intel import Intel, tdx_body
from sealring.identity.attestation import Challenge, Evidence

_SNP, _TDX = 2, 4


class AzureGuest:
    def __init__(
        self,
        maker: Amd | Intel,
        *,
        secure_boot: bool = True,
        modulus: int | None = None,
        **changes: Any,
    ) -> None:
        """`modulus` is a real TPM's; `changes` are the hardware's report's."""
        self.maker = maker
        self.kind = "az-snp-vtpm" if isinstance(maker, Amd) else "az-tdx-vtpm"
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
        self.td_quote = b""
        if isinstance(maker, Amd):
            self.report = maker.report(report_data=bound, **changes)
        else:
            self.td_quote = maker.quote(tdx_body(bound, **changes))
            self.report = bytes(1184)

    def hcl_report(self, text: bytes | None = None, *, version: int = 1, pad: int = 0) -> bytes:
        claims = self.text if text is None else text
        inner = 20 + len(claims)
        head = b"HCLA" + _numbers(version, 32 + len(self.report) + inner, 2) + bytes(16)
        kind = _TDX if self.td_quote else _SNP
        return head + self.report + _numbers(inner, 1, kind, 1, len(claims)) + claims + bytes(pad)

    def evidence(self, challenge: Challenge = CHALLENGE, raw: bytes | None = None) -> Evidence:
        everything = tpm.pcr_values(tpm.BOOT)
        values = {pcr: everything[pcr] for pcr in tpm.PCRS}
        message = tpm.quote(values, challenge.report_data(self.kind)[:32])
        parts = {
            "hcl_report": raw or self.hcl_report(),
            "quote": message,
            "signature": tpm.sign(self.key, message),
            "pcrs": b"".join(values[pcr] for pcr in sorted(values)),
            "event_log": tpm.event_log(tpm.BOOT),
        }
        if self.td_quote:
            parts["td_quote"] = self.td_quote
        chain = self.maker.chain if isinstance(self.maker, Amd) else ()
        return Evidence(self.kind, challenge, parts, chain)


def _base64url(number: int) -> str:
    raw = number.to_bytes((number.bit_length() + 7) // 8, "big")
    return base64.urlsafe_b64encode(raw).decode().rstrip("=")


def _numbers(*values: int) -> bytes:
    return b"".join(value.to_bytes(4, "little") for value in values)
