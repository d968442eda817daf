"""The vendors' roots, pinned by fingerprint, and what else a check stands on.

Evidence brings its whole chain; a root is believed because its SHA-256 is here, and for nothing
else. The fingerprints are of AMD's public ARK certificates as its key distribution service serves
them (kdsintf.amd.com/vcek/v1/<product>/cert_chain). Each was computed from a copy whose
self-signature verified; compare them with your own download before relying on them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Final

from cryptography import x509

AMD_ROOTS: Final[Mapping[str, str]] = {
    "69d063b45344d26a2e94e1f4210de49ef555308287d4c174445c95639a540bcd": "Milan",
    "4c6598d19c18719c5dfd4a7d335f674e5bfe1d8f800cea2cf270c10d103db2f1": "Genoa",
    "1f084161a44bb6d93778a904877d4819cafa5d05ef4193b2ded9dd9c73dd3f6a": "Turin",
}


@dataclass(frozen=True, slots=True)
class Trust:
    """Which roots, which revocation lists, and the time at which all dates are judged."""

    now: datetime
    amd: Mapping[str, str] = field(default_factory=lambda: AMD_ROOTS)
    """Fingerprint of a root to the product line that it stands for."""
    simulated: frozenset[str] = frozenset()
    """Fingerprints of SIMULATED roots: none, unless a policy names some."""
    lists: tuple[x509.CertificateRevocationList, ...] = ()

    @classmethod
    def pinned(
        cls,
        simulated: frozenset[str] = frozenset(),
        lists: tuple[x509.CertificateRevocationList, ...] = (),
        now: datetime | None = None,
    ) -> Trust:
        return cls(now or datetime.now(UTC), simulated=simulated, lists=lists)
