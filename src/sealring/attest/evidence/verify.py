"""Turns evidence into an AttestedWorker. The tables list all kinds of evidence."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from sealring.attest.evidence import az_vtpm, intel, nvidia, simulated, snp
from sealring.attest.evidence.encoding import unknown_evidence
from sealring.attest.evidence.evidence import Challenge, DeviceEvidence, Evidence
from sealring.attest.evidence.rules import TableForm
from sealring.attest.evidence.tpm import verify as tpm
from sealring.attest.evidence.trust import SGX, TDX, Trust
from sealring.attest.evidence.worker import (
    SEAL,
    AttestedDevice,
    AttestedWorker,
    Claims,
    DescribedWorker,
    shown,
)

Verifier = Callable[[Evidence, Challenge | None, Trust], Claims]
DeviceVerifier = Callable[[DeviceEvidence, bytes | None, Trust], AttestedDevice]


@dataclass(frozen=True, slots=True)
class EvidenceKind:
    description: str
    verify: Verifier
    form: TableForm
    """The form of the policy's table for this kind."""
    hole: bool = False
    """Whether somebody whom the policy does not name can read such a worker's memory."""


@dataclass(frozen=True, slots=True)
class DeviceKind:
    verify: DeviceVerifier
    form: TableForm


KINDS: Final[Mapping[str, EvidenceKind]] = {
    snp.KIND: EvidenceKind("an AMD SEV-SNP guest", snp.verify_snp, snp.snp_form()),
    az_vtpm.SNP_KIND: EvidenceKind(
        "an Azure guest whose virtual TPM an SEV-SNP report vouches for",
        az_vtpm.verify_az_snp_vtpm,
        az_vtpm.SNP_FORM,
    ),
    az_vtpm.TDX_KIND: EvidenceKind(
        "an Azure guest whose virtual TPM a TDX quote vouches for",
        az_vtpm.verify_az_tdx_vtpm,
        az_vtpm.TDX_FORM,
    ),
    TDX: EvidenceKind("an Intel TDX guest", intel.verify_intel, intel.TDX_FORM),
    SGX: EvidenceKind("an Intel SGX enclave", intel.verify_intel, intel.SGX_FORM),
    tpm.KIND: EvidenceKind(
        "a machine with a TPM 2.0, whose owner can read its memory",
        tpm.verify_tpm,
        tpm.TPM_FORM,
        hole=True,
    ),
    simulated.KIND: EvidenceKind(
        "SIMULATED evidence, which proves nothing",
        simulated.verify_simulated,
        simulated.SIMULATED_FORM,
        hole=True,
    ),
}
DEVICE_KINDS: Final[Mapping[str, DeviceKind]] = {
    nvidia.KIND: DeviceKind(nvidia.verify_nvidia, nvidia.NVIDIA_FORM)
}


def verify_evidence(evidence: Evidence, challenge: Challenge, trust: Trust) -> AttestedWorker:
    """Verifies evidence for the caller's own challenge: its nonce, and the key it was shown."""
    return AttestedWorker(**_verified(evidence, challenge, trust), challenge=challenge, seal=SEAL)


def describe_evidence(evidence: Evidence, trust: Trust) -> DescribedWorker:
    """Verifies everything except the challenge: for trying a policy, never for admission.

    All signatures, chains and dates are verified, but recorded evidence can be replayed here.
    """
    return DescribedWorker(**_verified(evidence, None, trust))


def _verified(evidence: Evidence, challenge: Challenge | None, trust: Trust) -> dict[str, Any]:
    """The fields of a DescribedWorker."""
    kind = KINDS.get(evidence.kind)
    if kind is None:
        raise unknown_evidence(
            f"evidence of kind {evidence.kind} cannot be judged by this sealring"
        )
    claims = kind.verify(evidence, challenge, trust)
    nonce = challenge.device_nonce(evidence.kind) if challenge is not None else None
    devices = tuple(_device(device, nonce, trust) for device in evidence.devices)
    return shown(claims, evidence.kind, devices, trust.now)


def _device(evidence: DeviceEvidence, nonce: bytes | None, trust: Trust) -> AttestedDevice:
    kind = DEVICE_KINDS.get(evidence.kind)
    if kind is None:
        raise unknown_evidence(f"devices of kind {evidence.kind} cannot be judged by this sealring")
    return kind.verify(evidence, nonce, trust)
