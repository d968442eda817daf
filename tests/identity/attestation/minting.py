"""What the attestation tests bend: evidence of our own making (src/sealring/bench/minting)."""

from __future__ import annotations

from sealring.bench.minting import CHALLENGE, DAY, NOW
from sealring.bench.minting.amd import CHIP, MEASUREMENT, PLAIN_POLICY, TCB, Amd

__all__ = ["CHALLENGE", "CHIP", "DAY", "MEASUREMENT", "NOW", "PLAIN_POLICY", "TCB", "Amd"]
