"""A peer's attestation, judged by this worker's own policy while the link is set up.

Its certificate's claim is judged as soon as its key is proved. Where the policy has peers show the
evidence itself, each end sends its own over TLS; that both do so is one of the settings that the
hellos have compared by then.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from cryptography import x509

from sealring.errors import HandshakeError
from sealring.identity.names import WorkerName

if TYPE_CHECKING:  # its verifiers take long to import, and most workers need none
    from sealring.identity.attestation.admission import Admission
    from sealring.identity.attestation.claims import ClaimedWorker


@dataclass(frozen=True, slots=True)
class JudgedPeer:
    admission: Admission
    certificate: x509.Certificate
    name: WorkerName
    claimed: ClaimedWorker

    @property
    def shows_evidence(self) -> bool:
        return self.admission.evidence_limit > 0

    def check_evidence(self, evidence: bytes, who: str) -> None:
        self.admission.check_evidence(self.certificate, self.claimed, evidence, self.name, who)


def judge_peer(
    admission: Admission, certificate: x509.Certificate, name: WorkerName, who: str
) -> JudgedPeer:
    """Raises if the worker was revoked, or if the policy does not admit what it attested."""
    try:
        claimed = admission.check_certificate(certificate, name, who)
    except HandshakeError as error:
        error.peer = name.rank
        raise
    return JudgedPeer(admission, certificate, name, claimed)
