"""Evidence from inside one of Azure's confidential guests: its virtual TPM, its paravisor's word.

The paravisor leaves its report in the TPM's memory and the attestation key at a fixed handle. On
TDX, the host's metadata service turns the paravisor's report into a quote.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Sequence
from typing import Final

from sealring.attest.evidence.az_vtpm import SNP_KIND, TDX_KIND
from sealring.attest.evidence.evidence import (
    QUALIFYING_BYTES,
    Challenge,
    DeviceEvidence,
    Evidence,
    encode_devices,
)
from sealring.attest.evidence.intel import canonical_quote, quote_size
from sealring.attest.evidence.local_http import ask
from sealring.attest.evidence.paravisor import SNP, canonical_hcl_report, parse_hcl_report
from sealring.attest.evidence.tpm.commands import OWNER, Tpm
from sealring.attest.evidence.tpm.machine import Logs, quote_pcrs
from sealring.errors import AttestationUnavailable
from sealring.formats.strict import read_json

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
        """`chain` is an SNP chip's, VCEK first: Azure's instance metadata service gives it out."""
        self._tpm, self._chain, self._metadata = tpm, tuple(chain), metadata
        self._logs = logs or Logs()
        report = tpm.read_nv(HCL_REPORT, OWNER)
        if report is None or tpm.read_public(AK) is None:
            raise AttestationUnavailable("this is not one of Azure's confidential guests")
        self._report = canonical_hcl_report(report)
        self._hcl = parse_hcl_report(report)
        self.kind = SNP_KIND if self._hcl.kind == SNP else TDX_KIND

    def attest(
        self, nonce: bytes, public_key: bytes, devices: tuple[DeviceEvidence, ...] = ()
    ) -> Evidence:
        challenge = Challenge(nonce, public_key)
        qualifying = challenge.report_data(self.kind, encode_devices(devices))[:QUALIFYING_BYTES]
        quote, signature, values = quote_pcrs(self._tpm, AK, qualifying)
        parts = {
            "hcl_report": self._report,
            "quote": quote,
            "signature": signature,
            "pcrs": values,
        }
        if self.kind == TDX_KIND:
            parts["td_quote"] = self._td_quote()
        parts |= self._logs.matching(values)
        chain = self._chain if self.kind == SNP_KIND else ()
        return Evidence(self.kind, challenge, parts, chain, devices)

    def _td_quote(self) -> bytes:
        report = base64.urlsafe_b64encode(self._hcl.report[:_TD_REPORT_BYTES]).decode()
        asked = json.dumps({"report": report.rstrip("=")}).encode()
        answer = ask(self._metadata, "/acc/tdquote", asked)
        try:
            text = read_json(answer)["quote"]
            raw = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
        except (ValueError, KeyError, TypeError, binascii.Error):
            raise AttestationUnavailable(
                "Azure's metadata service gives no quote for this guest"
            ) from None
        return canonical_quote(raw[: quote_size(raw)])
