"""This guest's own SNP report or TDX quote, asked of the kernel (configfs-tsm, since Linux 6.7).

Not yet run on such hardware: tests play the kernel's part.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from uuid import UUID

from sealring.errors import AttestationUnavailable
from sealring.identity.attestation.cursor import Cursor
from sealring.identity.attestation.evidence import (
    Challenge,
    DeviceEvidence,
    Evidence,
    encode_devices,
)
from sealring.identity.attestation.intel import TDX, canonical_quote, quote_size
from sealring.identity.attestation.snp import KIND as SNP
from sealring.identity.attestation.snp import canonical_report

REPORTS: Final = Path("/sys/kernel/config/tsm/report")
_PROVIDERS: Final = {"sev_guest": SNP, "tdx_guest": TDX}
_TRIES: Final = 8
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
    def __init__(self, chain: Sequence[bytes] = (), reports: Path = REPORTS) -> None:
        """`chain` is an SNP chip's, leaf first, for hosts that do not hand it to their guests."""
        self._chain, self._reports = tuple(chain), reports
        self.kind = ask(bytes(64), reports).kind

    def attest(
        self, nonce: bytes, public_key: bytes, devices: tuple[DeviceEvidence, ...] = ()
    ) -> Evidence:
        challenge = Challenge(nonce, public_key)
        answer = ask(challenge.report_data(self.kind, encode_devices(devices)), self._reports)
        if self.kind == TDX:
            # The kernel's buffer may be longer than the quote.
            quote = answer.report[: quote_size(answer.report)]
            return Evidence(TDX, challenge, {"quote": canonical_quote(quote)}, (), devices)
        chain = certificates_of(answer.certificates) or self._chain
        if not chain:
            raise AttestationUnavailable(
                "the host hands no certificates to its guest: fetch the chip's from AMD's key "
                "distribution service and give them"
            )
        return Evidence(SNP, challenge, {"report": canonical_report(answer.report)}, chain, devices)


def ask(report_data: bytes, reports: Path = REPORTS) -> Answer:
    """One request is one folder. The kernel counts the writes to it: another's would show."""
    entry = reports / f"sealring-{secrets.token_hex(8)}"
    try:
        entry.mkdir()
    except OSError as problem:
        raise AttestationUnavailable(
            f"the kernel makes no reports for this guest ({reports}: {problem.strerror})"
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
    """The chain in a host's table (GHCB specification), leaf first; nothing if it is not whole."""
    cursor = Cursor(table, "the host's certificates", "little")
    found: dict[UUID, bytes] = {}
    while cursor.left >= 24:
        name = UUID(bytes=cursor.take(16))
        offset, size = cursor.number(4), cursor.number(4)
        if not name.int:
            break
        found[name] = table[offset : offset + size]
    leaf = next((found[name] for name in _LEAVES if name in found), b"")
    issuers = [found[name] for name in _ISSUERS if name in found]
    return (leaf, *issuers) if leaf and len(issuers) == len(_ISSUERS) else ()
