"""What the attestation tests bend: evidence of our own making (src/sealring/lab/bench/minting)."""

from __future__ import annotations

from sealring.lab.bench.minting import CHALLENGE, DAY, NOW
from sealring.lab.bench.minting.amd import CHIP, MEASUREMENT, PLAIN_POLICY, TCB, Amd

__all__ = ["CHALLENGE", "CHIP", "DAY", "MEASUREMENT", "NOW", "PLAIN_POLICY", "TCB", "Amd"]
