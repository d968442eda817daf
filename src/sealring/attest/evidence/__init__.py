"""What a worker runs, shown by evidence that hardware signed.

evidence       the envelope in which evidence travels, and what it must be bound to
encoding       fixed structures, DER, base64 and signatures, read from front to back and in one way
chains         certificates verified whole: links, dates, revocation; the vendors' pinned roots
trust          what a check relies on: roots, lists, references, Intel's statements, the time
worker         what a worker has shown: AttestedWorker, that only verify can make, and a
               certificate's word on it
rules          rules of a policy: how each is read, judged, told in words and written
snp            AMD SEV-SNP
tpm/           TPM 2.0, and evidence from this machine's
intel          Intel TDX and SGX
az_vtpm        a virtual TPM that an SNP report or a TDX quote vouches for: Azure's form
nvidia         GPUs and switches, inside any of these machines; nvidia_reference NVIDIA's reference
               measurements
simulated      for laptops and tests; says SIMULATED wherever it appears
verify         the tables of all kinds; evidence in, AttestedWorker out
policy         a whole policy: read, judged, told in words, and written from evidence
guest          this guest's own SNP report or TDX quote, also on Azure
agent_evidence  guest-components' JSON form of evidence, and evidence from their agent
attesters      what makes evidence on a worker's machine
cache          what vendors say of their hardware, fetched beforehand and read again as it changes
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
