"""Verifies evidence as received over the wire, and checks the exact error of a refusal."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from sealring.attest.evidence import (
    AttestedWorker,
    Challenge,
    Evidence,
    Trust,
    parse_evidence,
    parse_policy,
    verify_evidence,
)
from sealring.attest.evidence.policy import toml
from sealring.attest.evidence.rules import Rules
from sealring.errors import AttestationError

UNTRUE = (
    "evidence.forged_evidence",
    "evidence.malformed_evidence",
    "evidence.not_bound",
    "evidence.unknown_evidence",
)
"""The codes of evidence of which a byte was changed."""


@dataclass(frozen=True)
class Judge:
    """One verifier's challenge, and whom it trusts unless a test says otherwise."""

    challenge: Callable[[], Challenge]
    trust: Callable[[], Trust]

    def verify(self, evidence: Evidence, trust: Trust | None = None) -> AttestedWorker:
        received = parse_evidence(evidence.encode())
        return verify_evidence(received, self.challenge(), trust or self.trust())

    def refused(self, error: str, evidence: Evidence, trust: Trust | None = None) -> str:
        return refusal(error, lambda: self.verify(evidence, trust))


def refusal(error: str, verify: Callable[[], object]) -> str:
    """Requires exactly this error. Returns its text."""
    with pytest.raises(AttestationError) as caught:
        verify()
    assert caught.value.code == error, caught.value
    return str(caught.value)


def device_rules(**values: int) -> Rules:
    """The rules of a [nvidia] table with these fields."""
    table = "".join(f"{name} = {toml(value)}\n" for name, value in values.items())
    devices = parse_policy(
        f'version = 1\n[simulated]\nroots = ["{"ab" * 32}"]\nmeasurements = ["ab"]\n'
        f"[nvidia]\n{table}"
    ).devices
    assert devices is not None
    return devices
