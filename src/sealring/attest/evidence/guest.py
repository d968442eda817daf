"""This guest's own SNP report or TDX quote, from the kernel or from Azure."""

from __future__ import annotations

import http.client
import json
import secrets
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from uuid import UUID

from cryptography import x509

from sealring.attest.evidence.az_vtpm import (
    HCL_SNP,
    SNP_KIND,
    TDX_KIND,
    canonical_hcl_report,
    parse_hcl_report,
)
from sealring.attest.evidence.chains import chain_of, load_certificate, split_pem, usual_pem
from sealring.attest.evidence.encoding import Cursor, from_any_base64, to_base64
from sealring.attest.evidence.evidence import (
    Challenge,
    DeviceEvidence,
    Evidence,
)
from sealring.attest.evidence.intel import (
    CCEL,
    canonical_quote,
    matching_events,
)
from sealring.attest.evidence.snp import KIND as SNP
from sealring.attest.evidence.snp import canonical_report, common_name, parse_report
from sealring.attest.evidence.tpm.commands import OWNER, Tpm
from sealring.attest.evidence.tpm.event_log import read_log
from sealring.attest.evidence.tpm.machine import Logs, quoted_parts
from sealring.attest.evidence.trust import TDX
from sealring.errors import AttestationUnavailable, MalformedEvidence
from sealring.formats.strict import read_json

_SECONDS: Final = 10.0
_MAX_BYTES: Final = 1 << 20


def ask_local(address: tuple[str, int], path: str, body: bytes | None = None) -> bytes:
    """Sends a GET, or a POST if there is a JSON body. Returns the answer if its status is 200."""
    host, port = address
    where = f"http://{host}:{port}{path.partition('?')[0]}"
    connection = http.client.HTTPConnection(host, port, timeout=_SECONDS)
    try:
        headers = {"Metadata": "true"} | ({"Content-Type": "application/json"} if body else {})
        connection.request("POST" if body else "GET", path, body, headers)
        answer = connection.getresponse()
        content = answer.read(_MAX_BYTES + 1)
    except (OSError, http.client.HTTPException) as problem:
        raise AttestationUnavailable(f"{where} does not answer: {problem}") from None
    finally:
        connection.close()
    if answer.status != http.client.OK or len(content) > _MAX_BYTES:
        raise AttestationUnavailable(f"{where} answers with status {answer.status}")
    return content


REPORTS: Final = Path("/sys/kernel/config/tsm/report")
_PROVIDERS: Final = {"sev_guest": SNP, "tdx_guest": TDX}
_TRIES: Final = 8
_PEM: Final = b"-----BEGIN CERTIFICATE-----"
# The names of certificates that the host's firmware gives to an SNP guest.
_LEAVES: Final = (
    UUID("63da758d-e664-4564-adc5-f4b93be8accd"),
    UUID("a8074bc2-a25a-483e-aae6-39c045a0b8a1"),
)
_ISSUERS: Final = (
    UUID("4ab7b379-bbac-4fe4-a02f-05aef327c782"),
    UUID("c0b406a4-a803-4952-9743-3fb6014cd0ae"),
)


@dataclass(frozen=True, slots=True)
class GuestAnswer:
    kind: str
    report: bytes
    certificates: bytes
    """SNP's table of certificates. Empty if the host gives none."""


class TsmMachine:
    def __init__(
        self, chain: Sequence[bytes] = (), reports: Path = REPORTS, event_log: Path = CCEL
    ) -> None:
        """`chain` holds an SNP chip's certificates, in case the host does not give them."""
        self._chain, self._reports, self._event_log = tuple(chain), reports, event_log
        self.kind = ask(bytes(64), reports).kind

    def attest(
        self, nonce: bytes, public_key: bytes, devices: tuple[DeviceEvidence, ...] = ()
    ) -> Evidence:
        challenge = Challenge(nonce, public_key)
        answer = ask(challenge.report_data(self.kind, devices), self._reports)
        if self.kind == TDX:
            parts = quote_parts(answer.report, read_log(self._event_log))
            return Evidence(TDX, challenge, parts, (), devices)
        handed = certificates_of(answer.certificates)
        parts, chain = report_parts(answer.report, handed, self._chain)
        return Evidence(SNP, challenge, parts, chain, devices)


def ask(report_data: bytes, reports: Path = REPORTS) -> GuestAnswer:
    """Asks the kernel for a report. Each request is a folder of its own.

    The kernel counts the writes to the folder, so a write by another process is noticed.
    """
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
                return GuestAnswer(_PROVIDERS[provider], report, certificates)
        raise AttestationUnavailable("somebody else keeps asking in our place")
    except OSError as problem:
        raise AttestationUnavailable(f"the kernel gives no report: {problem}") from None
    finally:
        entry.rmdir()


def certificates_of(table: bytes) -> tuple[bytes, ...]:
    """The certificates of a host's table (GHCB specification): the chip's key first, then issuers.

    Some hosts give only the key's certificate.
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


def report_parts(
    report: bytes, handed: Sequence[bytes], given: Sequence[bytes]
) -> tuple[dict[str, bytes], tuple[bytes, ...]]:
    """The parts and the chain of SNP evidence, from the host's certificates and the given ones."""
    chain = whole_chain(parse_report(report).key_name, handed, given)
    return {"report": canonical_report(report)}, chain


def quote_parts(padded: bytes, log: bytes) -> dict[str, bytes]:
    """The parts of TDX evidence, with the events of the guest's log that explain the RTMRs."""
    quote = canonical_quote(padded)
    return {"quote": quote} | matching_events(quote, log)


def whole_chain(key: str, handed: Sequence[bytes], given: Sequence[bytes]) -> tuple[bytes, ...]:
    """The chain from the signing key to AMD's root, put together from both sources."""
    known = dict(_readable((*handed, *given)))
    leaf = next((der for der, one in known.items() if common_name(one) == key), None)
    if leaf is None:
        raise AttestationUnavailable(
            f"the host hands no certificate of {key} to its guest: fetch it from AMD's key "
            "distribution service, with its issuers', and give them (SEALRING_ATTESTER=tsm:FILE)"
        )
    chain, missing = chain_of(leaf, list(known))
    if missing:
        raise AttestationUnavailable(
            f"the certificate of {missing} is missing: fetch it from AMD's key distribution "
            "service and give it (SEALRING_ATTESTER=tsm:FILE)"
        )
    return chain


def _readable(certificates: Sequence[bytes]) -> Iterator[tuple[bytes, x509.Certificate]]:
    """The certificates that can be read. Some hosts' tables hold PEM, even several in one entry."""
    for entry in certificates:
        with suppress(MalformedEvidence):
            for der in split_pem(usual_pem(entry)) if _PEM in entry else (entry,):
                yield der, load_certificate(der)


HCL_REPORT: Final = 0x01400001
AK: Final = 0x81000003
METADATA: Final = ("169.254.169.254", 80)
_TD_REPORT_BYTES: Final = 1024


class AzureMachine:
    def __init__(
        self,
        tpm: Tpm,
        chain: Sequence[bytes],
        metadata: tuple[str, int] = METADATA,
        logs: Logs | None = None,
    ) -> None:
        """`chain` is an SNP chip's, VCEK first. Azure's instance metadata service gives it out."""
        self._tpm, self._chain, self._metadata = tpm, tuple(chain), metadata
        self._logs = logs or Logs()
        report, ak = tpm.read_nv(HCL_REPORT, OWNER), tpm.read_public(AK)
        if report is None or ak is None:
            raise AttestationUnavailable("this is not one of Azure's confidential guests")
        self._ak, self._report = ak, canonical_hcl_report(report)
        self._hcl = parse_hcl_report(report)
        self.kind = SNP_KIND if self._hcl.kind == HCL_SNP else TDX_KIND

    def attest(
        self, nonce: bytes, public_key: bytes, devices: tuple[DeviceEvidence, ...] = ()
    ) -> Evidence:
        challenge = Challenge(nonce, public_key)
        bound = challenge.report_data(self.kind, devices)
        parts = quoted_parts(self._tpm, AK, self._ak, bound, self._logs)
        parts["hcl_report"] = self._report
        if self.kind == TDX_KIND:
            parts["td_quote"] = self._td_quote()
        chain = self._chain if self.kind == SNP_KIND else ()
        return Evidence(self.kind, challenge, parts, chain, devices)

    def _td_quote(self) -> bytes:
        report = to_base64(self._hcl.report[:_TD_REPORT_BYTES], url=True)
        asked = json.dumps({"report": report}).encode()
        answer = ask_local(self._metadata, "/acc/tdquote", asked)
        try:
            raw = from_any_base64(read_json(answer)["quote"])
        except (ValueError, KeyError, TypeError):
            raise AttestationUnavailable(
                "Azure's metadata service gives no quote for this guest"
            ) from None
        return canonical_quote(raw)
