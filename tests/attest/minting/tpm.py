"""A stand-in for a maker of TPMs and for one of its chips."""

from __future__ import annotations

import base64
import hashlib
import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec, padding, rsa
from cryptography.hazmat.primitives.hashes import SHA256

from sealring.attest.evidence import Challenge, Evidence, Trust
from sealring.attest.evidence.evidence import DeviceEvidence
from sealring.attest.evidence.tpm.commands import selection
from sealring.attest.evidence.tpm.credential import (
    check_ak,
    seal_credential,
    subject,
    verify_endorsement,
)
from tests.attest.minting import CHALLENGE, NOW, Holder, issue
from tests.attest.minting import sign as sign_ecdsa
from tests.attest.minting.amd import Amd
from tests.attest.minting.intel import Intel, tdx_body

EK_PURPOSE: Final = x509.ExtendedKeyUsage([x509.ObjectIdentifier("2.23.133.8.1")])
AK_ATTRIBUTES: Final = 0x00050472
SECRET: Final = b"\x77" * 32
PCRS: Final = tuple(pcr for pcr in range(24) if pcr not in (16, 23))
_LOG_HEAD: Final = b"Spec ID Event03\0" + bytes(4) + b"\0\2\0\2"


@dataclass(frozen=True, slots=True)
class Credential:
    """What a verifier keeps (`Challenge.credential`), and what it sends to the TPM."""

    expected: bytes
    blob: bytes


def make_credential(chain: Sequence[bytes], ak: bytes, trust: Trust) -> Credential:
    """Makes a credential for a TPM that shows its EK's chain and the AK's public part."""
    endorsement = verify_endorsement(chain, trust)
    secret = secrets.token_bytes(32)
    blob = seal_credential(endorsement.leaf.public_key(), check_ak(ak).name, secret)
    return Credential(subject(chain[0], ak) + secret, blob)


@dataclass(frozen=True, slots=True)
class Measured:
    """One event of a log."""

    pcr: int
    kind: int
    content: bytes

    @property
    def digest(self) -> bytes:
        return hashlib.sha256(self.content).digest()


BOOT: Final = (
    Measured(0, 3, b"StartupLocality\0\x03"),
    Measured(0, 8, b"firmware 1.2"),
    Measured(4, 0x80000003, b"boot loader"),
    Measured(4, 0x80000003, b"kernel"),
    Measured(7, 0x80000001, b"SecureBoot=1"),
)


def event_log(
    events: tuple[Measured, ...], banks: tuple[tuple[int, int], ...] = ((11, 32),)
) -> bytes:
    """An event log in TCG's crypto-agile form."""
    head = _LOG_HEAD + len(banks).to_bytes(4, "little")
    head += b"".join(_le(bank, 2) + _le(size, 2) for bank, size in banks) + b"\0"
    log = _le(0, 4) + _le(3, 4) + bytes(20) + _le(len(head), 4) + head
    for event in events:
        log += _le(event.pcr, 4) + _le(event.kind, 4) + _le(len(banks), 4)
        for bank, size in banks:
            hashed = {11: event.digest, 12: hashlib.sha384(event.content).digest()}
            log += _le(bank, 2) + hashed.get(bank, bytes(size))
        log += _le(len(event.content), 4) + event.content
    return log


def pcr_values(events: tuple[Measured, ...]) -> dict[int, bytes]:
    """The PCRs after these events, computed independently of the verifier's code."""
    values = {pcr: (b"\xff" if 17 <= pcr <= 22 else b"\0") * 32 for pcr in range(24)}
    for event in events:
        if event.kind == 3 and event.content.startswith(b"StartupLocality"):
            values[0] = event.content[-1:].rjust(32, b"\0")
        elif event.kind != 3:
            values[event.pcr] = hashlib.sha256(values[event.pcr] + event.digest).digest()
    return values


def quote(
    pcrs: dict[int, bytes], qualifying: bytes, *, magic: int = 0xFF544347, kind: int = 0x8018
) -> bytes:
    body = magic.to_bytes(4, "big") + kind.to_bytes(2, "big")
    body += sized(b"\x00\x0b" + bytes(32)) + sized(qualifying)
    body += bytes(8) + (5).to_bytes(4, "big") + bytes(4) + b"\1" + (0x20260601).to_bytes(8, "big")
    chosen = sorted(pcrs)
    joined = b"".join(pcrs[pcr] for pcr in chosen)
    return body + selection(chosen) + sized(hashlib.sha256(joined).digest())


def sign(key: ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey, message: bytes) -> bytes:
    if isinstance(key, rsa.RSAPrivateKey):
        raw = key.sign(message, padding.PKCS1v15(), SHA256())
        return bytes.fromhex("0014000b") + sized(raw)
    r, s = sign_ecdsa(key, message)
    return bytes.fromhex("0018000b") + sized(r.to_bytes(32, "big")) + sized(s.to_bytes(32, "big"))


def public_of(key: ec.EllipticCurvePrivateKey, attributes: int = AK_ATTRIBUTES) -> bytes:
    """The TPMT_PUBLIC of a restricted signing key."""
    numbers = key.public_key().public_numbers()
    head = bytes.fromhex("0023000b") + attributes.to_bytes(4, "big")
    head += bytes.fromhex("000000100018000b00030010")
    return head + sized(numbers.x.to_bytes(32, "big")) + sized(numbers.y.to_bytes(32, "big"))


class Maker:
    def __init__(
        self,
        *,
        ek: object = None,
        ek_days: int = 100,
        purpose: x509.ExtensionType = EK_PURPOSE,
        attributes: int = AK_ATTRIBUTES,
        events: tuple[Measured, ...] = BOOT,
        ak_certified: object = None,
    ) -> None:
        """`ek` and `ak_certified` may be a real TPM's public keys, to be certified."""
        self.root = issue("TPM maker's root", None, ca=True)
        self.signer = issue("TPM maker", self.root, ca=True)
        self.ek: Holder = issue(
            "endorsement key",
            self.signer,
            ca=False,
            curve=ec.SECP256R1(),
            public_key=ek,
            days=ek_days,
            usage=["key_encipherment"],
            extensions=[purpose],
        )
        self.ak_key = ec.generate_private_key(ec.SECP256R1())
        self.ak = public_of(self.ak_key, attributes)
        self.ak_certificate: Holder = issue(
            "attestation key",
            self.signer,
            ca=False,
            public_key=ak_certified or self.ak_key.public_key(),
            usage=["digital_signature"],
            extensions=[x509.ExtendedKeyUsage([x509.ObjectIdentifier("2.23.133.8.3")])],
        )
        self.events = events

    @property
    def chain(self) -> tuple[bytes, ...]:
        return (self.ek.der, self.signer.der, self.root.der)

    def trust(self, *lists: x509.CertificateRevocationList, now: datetime = NOW) -> Trust:
        return Trust(now, tpm=frozenset({self.root.fingerprint}), lists=lists)

    def challenge(self, challenge: Challenge = CHALLENGE) -> Challenge:
        """A challenge with a credential that this TPM has opened."""
        credential = subject(self.ek.der, self.ak) + SECRET
        return Challenge(challenge.nonce, challenge.public_key, credential)

    def evidence(
        self,
        challenge: Challenge | None = None,
        *,
        pcrs: tuple[int, ...] = PCRS,
        log: bytes | None = None,
        devices: tuple[DeviceEvidence, ...] = (),
    ) -> Evidence:
        asked = challenge or self.challenge()
        everything = pcr_values(self.events)
        values = {pcr: everything[pcr] for pcr in pcrs}
        message = quote(values, asked.report_data("tpm", devices)[:32])
        parts = {
            "quote": message,
            "signature": sign(self.ak_key, message),
            "ak": self.ak,
            "pcrs": b"".join(values[pcr] for pcr in sorted(values)),
            "event_log": event_log(self.events) if log is None else log,
        }
        return Evidence("tpm", asked, parts, self.chain, devices)


def sized(data: bytes) -> bytes:
    return len(data).to_bytes(2, "big") + data


def _le(number: int, size: int) -> bytes:
    return number.to_bytes(size, "little")


# ---- a virtual TPM in Azure's form, vouched for by a report of the tests' own AMD or Intel


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
        """`modulus` is a real TPM's. `changes` are for the hardware's report."""
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
        everything = pcr_values(BOOT)
        values = {pcr: everything[pcr] for pcr in PCRS}
        message = quote(values, challenge.report_data(self.kind)[:32])
        parts = {
            "hcl_report": raw or self.hcl_report(),
            "quote": message,
            "signature": sign(self.key, message),
            "pcrs": b"".join(values[pcr] for pcr in sorted(values)),
            "event_log": event_log(BOOT),
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
