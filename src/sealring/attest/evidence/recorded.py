"""Evidence in the records of a run, judged as of its own date: for auditors, by `hooks.py`."""

from __future__ import annotations

from cryptography import x509

from sealring.attest.evidence.admission import public_key_of
from sealring.attest.evidence.cache import Cache
from sealring.attest.evidence.claims import claims_in
from sealring.attest.evidence.evidence import Challenge, parse_evidence
from sealring.attest.evidence.policy import Policy, judge
from sealring.attest.evidence.policy_file import parse_policy
from sealring.attest.evidence.verify import verify_evidence
from sealring.core.identity.certificates import claims_of
from sealring.errors import NotAttested

__all__ = ["claims_in", "judge_recorded", "parse_policy"]


def judge_recorded(
    policy: Policy, certificate: x509.Certificate, evidence: bytes | None, vendors: Cache | None
) -> None:
    """Raises unless the policy admits what the certificate claims, and what the evidence shows.

    The evidence is verified for the nonce in the certificate and for the certificate's key. A TPM's
    credential is taken from the evidence: only the broker, which made it, could tell that the TPM
    opened it. So that an attestation key is of that TPM is the broker's word.
    """
    name, claimed = claims_of(certificate).name, claims_in(certificate)
    if claimed is None:
        raise NotAttested("the certificate says nothing of an attestation")
    trust = (vendors or Cache()).trust(policy, claimed.verified_at)
    judge(policy, claimed, name.rank, name.job).require()
    if evidence is None:
        return
    sent = parse_evidence(evidence)
    challenge = Challenge(claimed.nonce, public_key_of(certificate), sent.challenge.credential)
    worker = verify_evidence(sent, challenge, trust)
    judge(policy, worker, name.rank, name.job).require()
