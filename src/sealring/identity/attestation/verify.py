"""Evidence in, AttestedWorker out. A kind that is not in the tables is refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from sealring.errors import UnknownEvidence
from sealring.identity.attestation import az_vtpm, intel, simulated, snp
from sealring.identity.attestation.evidence import Challenge, DeviceEvidence, Evidence
from sealring.identity.attestation.nvidia import device as nvidia
from sealring.identity.attestation.roots import Trust
from sealring.identity.attestation.tpm import verify as tpm
from sealring.identity.attestation.worker import (
    SEAL,
    AttestedDevice,
    AttestedWorker,
    Claims,
    DescribedWorker,
    attested,
    described,
)

Verifier = Callable[[Evidence, Challenge | None, Trust], Claims]
DeviceVerifier = Callable[[DeviceEvidence, bytes | None, Trust], AttestedDevice]

VERIFIERS: Final[Mapping[str, Verifier]] = {
    snp.KIND: snp.verify_snp,
    az_vtpm.SNP_KIND: az_vtpm.verify_az_snp_vtpm,
    az_vtpm.TDX_KIND: az_vtpm.verify_az_tdx_vtpm,
    intel.TDX: intel.verify_intel,
    intel.SGX: intel.verify_intel,
    tpm.KIND: tpm.verify_tpm,
    simulated.KIND: simulated.verify_simulated,
}
DEVICE_VERIFIERS: Final[Mapping[str, DeviceVerifier]] = {nvidia.KIND: nvidia.verify_nvidia}


def verify_evidence(evidence: Evidence, challenge: Challenge, trust: Trust) -> AttestedWorker:
    """`challenge` is the caller's own: the nonce it gave out and the key it was shown."""
    claims, devices = _claims(evidence, challenge, trust)
    return attested(
        claims,
        kind=evidence.kind,
        challenge=challenge,
        devices=devices,
        verified_at=trust.now,
        seal=SEAL,
    )


def describe_evidence(evidence: Evidence, trust: Trust) -> DescribedWorker:
    """Everything but for whom the evidence was made: for trying a policy, never for admission.

    All signatures, chains and dates are verified. Recorded evidence can be replayed here.
    """
    claims, devices = _claims(evidence, None, trust)
    return described(claims, kind=evidence.kind, devices=devices, verified_at=trust.now)


def _claims(
    evidence: Evidence, challenge: Challenge | None, trust: Trust
) -> tuple[Claims, tuple[AttestedDevice, ...]]:
    verifier = VERIFIERS.get(evidence.kind)
    if verifier is None:
        raise UnknownEvidence(f"evidence of kind {evidence.kind} cannot be judged by this sealring")
    claims = verifier(evidence, challenge, trust)
    nonce = challenge.device_nonce(evidence.kind) if challenge is not None else None
    return claims, tuple(_device(device, nonce, trust) for device in evidence.devices)


def _device(evidence: DeviceEvidence, nonce: bytes | None, trust: Trust) -> AttestedDevice:
    verifier = DEVICE_VERIFIERS.get(evidence.kind)
    if verifier is None:
        raise UnknownEvidence(f"devices of kind {evidence.kind} cannot be judged by this sealring")
    return verifier(evidence, nonce, trust)
