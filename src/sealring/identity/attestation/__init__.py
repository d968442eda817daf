"""What a worker runs, shown by evidence that hardware signed.

evidence    the envelope in which evidence travels, and what it must be bound to
roots       the vendors' roots, pinned by fingerprint, and the stated time of a check
chains      certificates verified whole: links, dates, revocation
worker      AttestedWorker, the value that only a verifier can make
snp         AMD SEV-SNP
simulated   for laptops and tests; says SIMULATED wherever it appears
verify      evidence in, AttestedWorker out
policy      what may join, and why something may not
policy_file the policy as TOML; files reads it, and the vendors' lists
claims      what a certificate says of its holder's attestation
admission   a worker's own judgement of its peers
"""

from sealring.identity.attestation.evidence import Challenge, Evidence, parse_evidence
from sealring.identity.attestation.policy import Policy, Verdict, judge
from sealring.identity.attestation.policy_file import parse_policy
from sealring.identity.attestation.roots import Trust
from sealring.identity.attestation.verify import verify_evidence
from sealring.identity.attestation.worker import AttestedWorker

__all__ = [
    "AttestedWorker",
    "Challenge",
    "Evidence",
    "Policy",
    "Trust",
    "Verdict",
    "judge",
    "parse_evidence",
    "parse_policy",
    "verify_evidence",
]
