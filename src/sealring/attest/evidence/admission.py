"""A worker's own check of its peers, by its own copy of the policy.

The broker has judged the peers already. The worker judges again, because the broker may have been
given another policy, or its key may have been stolen. With `[peers] evidence = true` a certificate
counts only together with evidence that hardware signed for the certificate's key.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from sealring.attest.evidence.cache import Cache
from sealring.attest.evidence.evidence import MAX_EVIDENCE_BYTES, Challenge, parse_evidence
from sealring.attest.evidence.policy import Policy, judge, parse_policy
from sealring.attest.evidence.trust import Trust
from sealring.attest.evidence.verify import verify_evidence
from sealring.attest.evidence.worker import ClaimedWorker, DescribedWorker, claims_in
from sealring.core.identity.certificates import claims_of
from sealring.core.identity.names import WorkerName
from sealring.errors import AttestationError, PeerNotAdmitted, named


@dataclass(frozen=True, slots=True)
class PolicyAdmission:
    policy: Policy
    trust: Callable[[], Trust]
    """Gives the roots, the lists and the present time."""
    keys_out: frozenset[str] = frozenset()
    """Keys that the broker has taken out of the job."""
    evidence: bytes = b""
    """This worker's own evidence, to show to peers."""

    @property
    def evidence_limit(self) -> int:
        """The most bytes of evidence to take from a peer. 0 if peers show none."""
        return MAX_EVIDENCE_BYTES if self.policy.peer_evidence else 0

    def check_certificate(
        self, certificate: x509.Certificate, name: WorkerName, who: str
    ) -> AdmittedPeer:
        """Judges a peer's certificate. Its signature, name and dates must be verified already."""
        if key_digest(certificate) in self.keys_out:
            raise PeerNotAdmitted(
                f"{who} was taken out of the job: `sealring broker audit` says when",
                code="handshake.certificate_revoked",
            )
        try:
            claimed = claims_in(certificate)
        except ValueError as problem:
            raise PeerNotAdmitted(
                f"the certificate of {who} cannot be judged: {problem}",
                code="handshake.not_attested",
            ) from None
        if claimed is None:
            raise PeerNotAdmitted(
                f"the certificate of {who} says nothing of an attestation, and this worker's "
                "policy demands one: have it join through the broker",
                code="handshake.not_attested",
            )
        self.judge(claimed, name, who)
        return AdmittedPeer(self, certificate, name, claimed)

    def judge(self, worker: DescribedWorker, name: WorkerName, who: str) -> None:
        try:
            judge(self.policy, worker, name.rank, name.job).require()
        except AttestationError as error:
            raise PeerNotAdmitted(f"{who}: {named(error)}: {error}") from error


@dataclass(frozen=True, slots=True)
class AdmittedPeer:
    """A peer whose certificate the policy admits."""

    admission: PolicyAdmission
    certificate: x509.Certificate
    name: WorkerName
    claimed: ClaimedWorker

    def check_evidence(self, evidence: bytes, who: str) -> None:
        """Verifies the evidence for the key that the peer has just used, and judges it."""
        if hashlib.sha256(evidence).hexdigest() != self.claimed.evidence_digest:
            raise PeerNotAdmitted(
                f"{who} shows other evidence than its certificate names",
                code="handshake.not_attested",
            )
        challenge = Challenge(self.claimed.nonce, public_key_of(self.certificate))
        try:
            trust = self.admission.trust()
            worker = verify_evidence(parse_evidence(evidence), challenge, trust)
        except AttestationError as error:
            raise PeerNotAdmitted(
                f"the evidence of {who} is not believed: {named(error)}: {error}",
                code="handshake.not_attested",
            ) from error
        self.admission.judge(worker, self.name, who)


def public_key_of(certificate: x509.Certificate) -> bytes:
    return certificate.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)


def key_digest(certificate: x509.Certificate) -> str:
    return hashlib.sha256(public_key_of(certificate)).hexdigest()


__all__ = ["claims_in", "judge_recorded", "parse_policy"]


def judge_recorded(
    policy: Policy, certificate: x509.Certificate, evidence: bytes | None, vendors: Cache | None
) -> None:
    """Raises unless the policy admits what the certificate claims, and what the evidence shows.

    The evidence is verified for the nonce in the certificate and for the certificate's key. A TPM's
    credential is taken from the evidence, because only the broker, which made it, can tell whether
    the TPM opened it. So only the broker vouches that an attestation key belongs to that TPM.
    """
    name, claimed = claims_of(certificate).name, claims_in(certificate)
    if claimed is None:
        raise PeerNotAdmitted(
            "the certificate says nothing of an attestation", code="handshake.not_attested"
        )
    trust = (vendors or Cache()).trust(policy, claimed.verified_at)
    judge(policy, claimed, name.rank, name.job).require()
    if evidence is None:
        return
    sent = parse_evidence(evidence)
    challenge = Challenge(claimed.nonce, public_key_of(certificate), sent.challenge.credential)
    worker = verify_evidence(sent, challenge, trust)
    judge(policy, worker, name.rank, name.job).require()
