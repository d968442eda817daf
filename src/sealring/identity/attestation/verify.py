"""Evidence in, AttestedWorker out. A kind that is not in the table is refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from sealring.errors import UnknownEvidence
from sealring.identity.attestation import simulated, snp
from sealring.identity.attestation.evidence import Challenge, Evidence
from sealring.identity.attestation.roots import Trust
from sealring.identity.attestation.worker import AttestedWorker

Verifier = Callable[[Evidence, Challenge, Trust], AttestedWorker]

VERIFIERS: Final[Mapping[str, Verifier]] = {
    snp.KIND: snp.verify_snp,
    simulated.KIND: simulated.verify_simulated,
}


def verify_evidence(evidence: Evidence, challenge: Challenge, trust: Trust) -> AttestedWorker:
    """`challenge` is the caller's own: the nonce it gave out and the key it was shown."""
    verifier = VERIFIERS.get(evidence.kind)
    if verifier is None:
        raise UnknownEvidence(f"evidence of kind {evidence.kind} cannot be judged by this sealring")
    return verifier(evidence, challenge, trust)
