"""Evidence in, AttestedWorker out. A kind that is not in kinds.py is refused."""

from __future__ import annotations

from sealring.attest.evidence.evidence import Challenge, DeviceEvidence, Evidence
from sealring.attest.evidence.kinds import DEVICE_KINDS, KINDS
from sealring.attest.evidence.trust import Trust
from sealring.attest.evidence.worker import (
    SEAL,
    AttestedDevice,
    AttestedWorker,
    Claims,
    DescribedWorker,
    attested,
    described,
)
from sealring.errors import UnknownEvidence


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
    kind = KINDS.get(evidence.kind)
    if kind is None:
        raise UnknownEvidence(f"evidence of kind {evidence.kind} cannot be judged by this sealring")
    claims = kind.verify(evidence, challenge, trust)
    nonce = challenge.device_nonce(evidence.kind) if challenge is not None else None
    return claims, tuple(_device(device, nonce, trust) for device in evidence.devices)


def _device(evidence: DeviceEvidence, nonce: bytes | None, trust: Trust) -> AttestedDevice:
    kind = DEVICE_KINDS.get(evidence.kind)
    if kind is None:
        raise UnknownEvidence(f"devices of kind {evidence.kind} cannot be judged by this sealring")
    return kind.verify(evidence, nonce, trust)
