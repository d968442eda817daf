"""Evidence of what a worker runs, signed by its hardware.

evidence       the envelope in which evidence travels, and what it must be bound to
encoding       reads fixed structures, DER, base64 and signatures, each in one accepted form
chains         verifies certificate chains: links, dates, revocation; the vendors' pinned roots
trust          what a check relies on: roots, lists, references, Intel's statements, the time
worker         what a worker has shown: AttestedWorker, which only verify can make, and the claims
               of a certificate
rules          rules of a policy: how each is read, checked, described in words and written
snp            AMD SEV-SNP
tpm/           TPM 2.0: evidence from this machine's TPM, and its verification
intel          Intel TDX and SGX
az_vtpm        a virtual TPM that an SNP report or a TDX quote vouches for: Azure's form
nvidia         GPUs and switches inside any of these machines; nvidia_reference has NVIDIA's
               reference measurements
simulated      for laptops and tests; says SIMULATED wherever it appears
verify         the tables of all kinds; turns evidence into an AttestedWorker
policy         a whole policy: read, checked, described in words, and written from evidence
guest          this guest's own SNP report or TDX quote, also on Azure
agent_evidence  guest-components' JSON form of evidence, and evidence from their agent
attesters      makes evidence on a worker's machine
cache          the vendors' lists and statements, fetched beforehand and read again when they change
admission      a worker's own check of its peers, and an auditor's of recorded evidence
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
