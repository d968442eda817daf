"""What a worker runs, shown by evidence that hardware signed.

evidence       the envelope in which evidence travels, and what it must be bound to
trust          what a check relies on: roots, lists, references, the time
chains         certificates verified whole: links, dates, revocation; the vendors' pinned roots
encoding       binary evidence read from front to back, and spelled in one way
worker         AttestedWorker, the value that only verify can make
snp            AMD SEV-SNP
tpm/           TPM 2.0, and evidence from this machine's
az_vtpm        a virtual TPM that an SNP report or a TDX quote vouches for: Azure's form
intel          Intel TDX and SGX, and a TDX guest's event log; intel_collateral Intel's statements
               on platforms, as a file
nvidia         GPUs and switches, inside any of these machines; nvidia_reference NVIDIA's reference
               measurements
simulated      for laptops and tests; says SIMULATED wherever it appears
agent_evidence  guest-components' JSON form of evidence, and evidence from their agent
guest          this guest's own SNP report or TDX quote, also on Azure
rules          rules of a policy: how each is read, judged, told in words and written
kinds          the table of all kinds of evidence: a verifier of each, and its rules
verify         evidence in, AttestedWorker out
policy         a whole policy: what may join, and why something may not
policy_writing a strict policy made from evidence
attesters      what makes evidence on a worker's machine
revocation     lists and OCSP answers of a chain's issuers
cache          what vendors say of their hardware, fetched beforehand and read again as it changes
claims         what a certificate says of its holder's attestation
admission      a worker's own judgement of its peers, and an auditor's of recorded evidence
"""

from sealring.attest.evidence.cache import Cache, read_cache
from sealring.attest.evidence.evidence import Challenge, Evidence, parse_evidence
from sealring.attest.evidence.policy import Policy, Verdict, judge, parse_policy
from sealring.attest.evidence.trust import Trust
from sealring.attest.evidence.verify import describe_evidence, verify_evidence
from sealring.attest.evidence.worker import AttestedWorker

__all__ = [
    "AttestedWorker",
    "Cache",
    "Challenge",
    "Evidence",
    "Policy",
    "Trust",
    "Verdict",
    "describe_evidence",
    "judge",
    "parse_evidence",
    "parse_policy",
    "read_cache",
    "verify_evidence",
]
