"""Trust: what the verifiers of evidence rely on beside the evidence itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime

from cryptography import x509

from sealring.attest.evidence.chains import AMD_ROOTS, INTEL_ROOTS, NVIDIA_ROOTS
from sealring.attest.evidence.intel_collateral import Collateral
from sealring.attest.evidence.nvidia_reference import Reference
from sealring.attest.evidence.revocation import ChainContext


@dataclass(frozen=True, slots=True)
class Trust(ChainContext):
    """Everything that a verifier of evidence may rely on: roots, lists, references, the time."""

    amd: Mapping[str, str] = field(default_factory=lambda: AMD_ROOTS)
    """Fingerprint of a root to the product line that it stands for."""
    intel: frozenset[str] = INTEL_ROOTS
    nvidia: frozenset[str] = NVIDIA_ROOTS
    tpm: frozenset[str] = frozenset()
    """Fingerprints of TPM makers' roots: none, unless a policy names some."""
    simulated: frozenset[str] = frozenset()
    """Fingerprints of SIMULATED roots: none, unless a policy names some."""
    collateral: tuple[Collateral, ...] = ()
    """Intel's statements about its platforms, as they were fetched."""
    references: tuple[Reference, ...] = ()
    """NVIDIA's reference measurements, their signatures verified."""
    issuers: tuple[bytes, ...] = ()
    """Certificates (DER) that complete chains, for guests that do not send them. Not believed for
    being here: a chain ends at a pinned root all the same."""

    @classmethod
    def pinned(
        cls,
        simulated: frozenset[str] = frozenset(),
        lists: tuple[x509.CertificateRevocationList, ...] = (),
        now: datetime | None = None,
        tpm: frozenset[str] = frozenset(),
    ) -> Trust:
        return cls(now or datetime.now(UTC), simulated=simulated, lists=lists, tpm=tpm)
