"""A TPM whose attestation key has a certificate of its own: Google's virtual TPMs.

The certificate and the key's template are in the TPM's memory. The issuer has found that the key is
in the TPM, so no credential is asked for: the verifier believes the issuer instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from sealring.attest.evidence.chains import load_certificate
from sealring.attest.evidence.evidence import (
    QUALIFYING_BYTES,
    Challenge,
    DeviceEvidence,
    Evidence,
    encode_devices,
)
from sealring.attest.evidence.tpm.commands import Tpm
from sealring.attest.evidence.tpm.machine import (
    Logs,
    first_der,
    quote_pcrs,
)
from sealring.attest.evidence.tpm.structures import canonical_signature, parse_public
from sealring.attest.evidence.tpm.verify import KIND
from sealring.errors import TpmFailed

# Where Google keeps the certificate and the template: on P-256 first, then RSA's.
AKS: Final = ((0x01C10002, 0x01C10003), (0x01C10000, 0x01C10001))


class CertifiedTpmMachine:
    kind: Final = KIND

    def __init__(self, tpm: Tpm, issuers: Sequence[bytes], logs: Logs | None = None) -> None:
        """`issuers` are those of the certificate (DER), root last."""
        self._tpm, self._logs = tpm, logs or Logs()
        certificate, self._template = self._find()
        self._chain = (certificate, *issuers)

    def attest(
        self, nonce: bytes, public_key: bytes, devices: tuple[DeviceEvidence, ...] = ()
    ) -> Evidence:
        challenge = Challenge(nonce, public_key)
        qualifying = challenge.report_data(KIND, encode_devices(devices))[:QUALIFYING_BYTES]
        with self._tpm.primary(self._template) as (handle, ak):
            quote, signature, values = quote_pcrs(self._tpm, handle, qualifying)
        signature = canonical_signature(signature, parse_public(ak).key)
        parts = {"quote": quote, "signature": signature, "ak": ak, "pcrs": values}
        parts |= self._logs.matching(values)
        return Evidence(KIND, challenge, parts, self._chain, devices)

    def _find(self) -> tuple[bytes, bytes]:
        for certificate_index, template_index in AKS:
            found = self._tpm.read_nv(certificate_index)
            template = self._tpm.read_nv(template_index)
            if found is None or template is None:
                continue
            certificate = first_der(found)
            with self._tpm.primary(template) as (_, ak):
                if parse_public(ak).key == load_certificate(certificate).public_key():
                    return certificate, template
        raise TpmFailed("the TPM holds no certificate for an attestation key of its own")
