"""What the attestation tests bend: evidence of our own making (src/sealring/bench/minting)."""

from __future__ import annotations

from sealring.bench.minting.amd import CHIP, MEASUREMENT, PLAIN_POLICY, TCB, Amd
from sealring.bench.minting.certificates import CHALLENGE, DAY, NOW

__all__ = ["CHALLENGE", "CHIP", "DAY", "MEASUREMENT", "NOW", "PLAIN_POLICY", "TCB", "Amd"]
