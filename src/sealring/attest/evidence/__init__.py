"""What a worker runs, shown by evidence that hardware signed.

evidence       the envelope in which evidence travels, and what it must be bound to
roots          the vendors' roots, pinned by fingerprint
trust          what a check relies on: roots, lists, references, the time
chains         certificates verified whole: links, dates, revocation
cursor         binary evidence, read from front to back
worker         AttestedWorker, the value that only verify can make
snp            AMD SEV-SNP
tpm/           TPM 2.0, and evidence from this machine's
az_vtpm        a virtual TPM that an SNP report or a TDX quote vouches for: Azure's form;
               paravisor its report as bytes
intel          Intel TDX and SGX; intel_collateral Intel's statements on platforms, as a file;
               ccel a TDX guest's event log
nvidia/        GPUs and switches, inside any of these machines; nvidia_reference NVIDIA's reference
               measurements
simulated      for laptops and tests; says SIMULATED wherever it appears
agent_evidence  guest-components' JSON form of evidence; guest_challenge what it is bound to
tsm            this guest's own SNP report or TDX quote; azure_guest the same on Azure, coco the
               same from a confidential container's agent
attesters      what makes evidence on a worker's machine
kinds          the table of all kinds of evidence and of all attesters
verify         evidence in, AttestedWorker out
policy         what may join, and why something may not; policy_devices the same for GPUs
policy_ima     the same for the files measured since boot
policy_file    the policy as TOML: policy_kinds a table for each kind, policy_broker the broker's
               part, policy_openings the rules that must be stated, policy_reader the fields
policy_words   what a policy lets in, in words
policy_writing a strict policy made from evidence
revocation     lists and OCSP answers of a chain's issuers
cache          what vendors say of their hardware, fetched beforehand
files          policy and cache, read
claims         what a certificate says of its holder's attestation
admission      a worker's own judgement of its peers
recorded       an auditor's judgement of evidence in a run's records
"""

from sealring.attest.evidence.cache import Cache, read_cache
from sealring.attest.evidence.evidence import Challenge, Evidence, parse_evidence
from sealring.attest.evidence.policy import Policy, Verdict, judge
from sealring.attest.evidence.policy_file import parse_policy
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
