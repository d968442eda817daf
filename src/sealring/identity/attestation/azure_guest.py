"""Evidence from inside one of Azure's confidential guests: its virtual TPM, its paravisor's word.

The paravisor leaves its report in the TPM's memory and the attestation key at a fixed handle.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from sealring.errors import AttestationUnavailable
from sealring.identity.attestation.az_snp_vtpm import KIND, canonical_hcl_report
from sealring.identity.attestation.evidence import (
    QUALIFYING_BYTES,
    Challenge,
    DeviceEvidence,
    Evidence,
    encode_devices,
)
from sealring.identity.attestation.tpm.commands import OWNER, Tpm
from sealring.identity.attestation.tpm.machine import matching_log, quote_pcrs

HCL_REPORT: Final = 0x01400001
AK: Final = 0x81000003


class AzureMachine:
    kind: Final = KIND

    def __init__(self, tpm: Tpm, chain: Sequence[bytes]) -> None:
        """`chain` is the chip's, VCEK first: Azure's instance metadata service gives it out."""
        self._tpm, self._chain = tpm, tuple(chain)
        report = tpm.read_nv(HCL_REPORT, OWNER)
        if report is None or tpm.read_public(AK) is None:
            raise AttestationUnavailable("this is not one of Azure's confidential guests")
        self._report = canonical_hcl_report(report)

    def attest(
        self, nonce: bytes, public_key: bytes, devices: tuple[DeviceEvidence, ...] = ()
    ) -> Evidence:
        challenge = Challenge(nonce, public_key)
        qualifying = challenge.report_data(KIND, encode_devices(devices))[:QUALIFYING_BYTES]
        quote, signature, values = quote_pcrs(self._tpm, AK, qualifying)
        parts = {
            "hcl_report": self._report,
            "quote": quote,
            "signature": signature,
            "pcrs": values,
        }
        if log := matching_log(values):
            parts["event_log"] = log
        return Evidence(KIND, challenge, parts, self._chain, devices)
