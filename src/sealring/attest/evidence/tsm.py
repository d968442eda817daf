"""This guest's own SNP report or TDX quote, asked of the kernel (configfs-tsm, since Linux 6.7).

Not yet run on such hardware: tests play the kernel's part.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from uuid import UUID

from cryptography import x509

from sealring.attest.evidence.ccel import CCEL, matching_ccel
from sealring.attest.evidence.chains import load_certificate, split_pem, usual_pem
from sealring.attest.evidence.cursor import Cursor
from sealring.attest.evidence.evidence import (
    Challenge,
    DeviceEvidence,
    Evidence,
    encode_devices,
)
from sealring.attest.evidence.intel import canonical_quote, quote_size, registers_of
from sealring.attest.evidence.intel_collateral import TDX
from sealring.attest.evidence.snp import KIND as SNP
from sealring.attest.evidence.snp import canonical_report, common_name, parse_report
from sealring.errors import AttestationUnavailable, MalformedEvidence

REPORTS: Final = Path("/sys/kernel/config/tsm/report")
_PROVIDERS: Final = {"sev_guest": SNP, "tdx_guest": TDX}
_TRIES: Final = 8
_PEM: Final = b"-----BEGIN CERTIFICATE-----"
# How the host's firmware names the certificates that it hands to an SNP guest.
_LEAVES: Final = (
    UUID("63da758d-e664-4564-adc5-f4b93be8accd"),
    UUID("a8074bc2-a25a-483e-aae6-39c045a0b8a1"),
)
_ISSUERS: Final = (
    UUID("4ab7b379-bbac-4fe4-a02f-05aef327c782"),
    UUID("c0b406a4-a803-4952-9743-3fb6014cd0ae"),
)


@dataclass(frozen=True, slots=True)
class Answer:
    kind: str
    report: bytes
    certificates: bytes
    """SNP's table of certificates, empty where the host gives none."""


class TsmMachine:
    def __init__(
        self, chain: Sequence[bytes] = (), reports: Path = REPORTS, event_log: Path = CCEL
    ) -> None:
        """`chain` holds certificates of an SNP chip that the host does not hand to its guests."""
        self._chain, self._reports, self._event_log = tuple(chain), reports, event_log
        self.kind = ask(bytes(64), reports).kind

    def attest(
        self, nonce: bytes, public_key: bytes, devices: tuple[DeviceEvidence, ...] = ()
    ) -> Evidence:
        challenge = Challenge(nonce, public_key)
        answer = ask(challenge.report_data(self.kind, encode_devices(devices)), self._reports)
        if self.kind == TDX:
            # The kernel's buffer may be longer than the quote.
            quote = answer.report[: quote_size(answer.report)]
            parts = {"quote": canonical_quote(quote)}
            if log := matching_ccel(registers_of(quote), self._event_log):
                parts["event_log"] = log
            return Evidence(TDX, challenge, parts, (), devices)
        key = parse_report(answer.report).key_name
        chain = whole_chain(key, certificates_of(answer.certificates), self._chain)
        return Evidence(SNP, challenge, {"report": canonical_report(answer.report)}, chain, devices)


def ask(report_data: bytes, reports: Path = REPORTS) -> Answer:
    """One request is one folder. The kernel counts the writes to it: another's would show."""
    entry = reports / f"sealring-{secrets.token_hex(8)}"
    try:
        entry.mkdir()
    except OSError as problem:
        raise AttestationUnavailable(
            f"the kernel makes no reports for this guest ({reports}: {problem.strerror}). Is this "
            "an SNP or TDX guest? `sealring policy attest` lists what there is; SEALRING_ATTESTER "
            "chooses another source of evidence, as tpm"
        ) from None
    try:
        for _ in range(_TRIES):
            (entry / "inblob").write_bytes(report_data)
            before = (entry / "generation").read_text()
            report = (entry / "outblob").read_bytes()
            table = entry / "auxblob"
            certificates = table.read_bytes() if table.exists() else b""
            if (entry / "generation").read_text() == before:
                provider = (entry / "provider").read_text().strip()
                if provider not in _PROVIDERS:
                    raise AttestationUnavailable(f"reports of {provider} are not known")
                return Answer(_PROVIDERS[provider], report, certificates)
        raise AttestationUnavailable("somebody else keeps asking in our place")
    except OSError as problem:
        raise AttestationUnavailable(f"the kernel gives no report: {problem}") from None
    finally:
        entry.rmdir()


def certificates_of(table: bytes) -> tuple[bytes, ...]:
    """What is in a host's table (GHCB specification): the chip's key first, then its issuers.

    Some hosts hand over the key's certificate alone.
    """
    cursor = Cursor(table, "the host's certificates", "little")
    found: dict[UUID, bytes] = {}
    while cursor.left >= 24:
        name = UUID(bytes=cursor.take(16))
        offset, size = cursor.number(4), cursor.number(4)
        if not name.int:
            break
        found[name] = table[offset : offset + size]
    return tuple(found[name] for name in (*_LEAVES, *_ISSUERS) if found.get(name))


def whole_chain(key: str, handed: Sequence[bytes], given: Sequence[bytes]) -> tuple[bytes, ...]:
    """From the key that signed to AMD's root, by the names of issuers, out of both sources."""
    known = dict(_readable((*handed, *given)))
    leaf = next((der for der, one in known.items() if common_name(one) == key), None)
    if leaf is None:
        raise AttestationUnavailable(
            f"the host hands no certificate of {key} to its guest: fetch it from AMD's key "
            "distribution service, with its issuers', and give them (SEALRING_ATTESTER_CHAIN)"
        )
    chain = [leaf]
    while (last := known[chain[-1]]).subject != last.issuer:
        above = next((der for der, one in known.items() if one.subject == last.issuer), None)
        if above is None or above in chain:
            raise AttestationUnavailable(
                f"the certificate of {last.issuer.rfc4514_string()} is missing: fetch it from "
                "AMD's key distribution service and give it (SEALRING_ATTESTER_CHAIN)"
            )
        chain.append(above)
    return tuple(chain)


def _readable(certificates: Sequence[bytes]) -> Iterator[tuple[bytes, x509.Certificate]]:
    """Some hosts' tables hold PEM, and some entries a chain of several certificates."""
    for entry in certificates:
        with suppress(MalformedEvidence):
            for der in split_pem(usual_pem(entry)) if _PEM in entry else (entry,):
                yield der, load_certificate(der)
