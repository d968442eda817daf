"""The evidence that the attestation tests alter (tests/attest/minting)."""

from __future__ import annotations

from tests.attest.minting import CHALLENGE, DAY, NOW
from tests.attest.minting.amd import CHIP, MEASUREMENT, PLAIN_POLICY, TCB, Amd

__all__ = ["CHALLENGE", "CHIP", "DAY", "MEASUREMENT", "NOW", "PLAIN_POLICY", "TCB", "Amd"]
