"""Evidence from inside a confidential container, asked of the agent of its pod (guest-components).

Such pods have no configfs: the agent answers on the pod's own loopback (agent_evidence.py says in
which form).
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any, Final

from sealring.attest.evidence.agent_evidence import evidence_of
from sealring.attest.evidence.evidence import (
    Challenge,
    DeviceEvidence,
    Evidence,
    encode_devices,
)
from sealring.attest.evidence.intel_collateral import TDX
from sealring.attest.evidence.local_http import ask
from sealring.attest.evidence.snp import KIND as SNP
from sealring.errors import AttestationUnavailable, MalformedEvidence
from sealring.formats.strict import read_object

AGENT: Final = ("127.0.0.1", 8006)


class CocoMachine:
    def __init__(self, chain: Sequence[bytes] = (), agent: tuple[str, int] = AGENT) -> None:
        """`chain` holds certificates of an SNP chip that the agent does not give."""
        self._chain, self._agent = tuple(chain), agent
        self.kind = TDX if "quote" in self._ask(bytes(64)) else SNP

    def attest(
        self, nonce: bytes, public_key: bytes, devices: tuple[DeviceEvidence, ...] = ()
    ) -> Evidence:
        challenge = Challenge(nonce, public_key)
        answer = self._ask(challenge.report_data(self.kind, encode_devices(devices)))
        try:
            return evidence_of(self.kind, answer, challenge, devices, self._chain)
        except MalformedEvidence:
            raise AttestationUnavailable(
                "the pod's agent gives evidence in a form that is not known"
            ) from None

    def _ask(self, report_data: bytes) -> dict[str, Any]:
        asked = base64.urlsafe_b64encode(report_data).decode().rstrip("=")
        answer = ask(self._agent, f"/aa/evidence?runtime_data={asked}&encoding=base64")
        refusal = AttestationUnavailable(
            "the pod's agent gives neither an SNP report nor a TDX quote"
        )
        found = read_object(answer, refusal)
        if not {"quote", "attestation_report"} & set(found):
            raise refusal
        return found
