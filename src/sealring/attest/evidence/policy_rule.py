"""One rule of a policy, judged: what was wanted, what was found, and which error refuses it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from sealring.errors import AttestationError


@dataclass(frozen=True, slots=True)
class Rule:
    name: str
    wanted: str
    found: str
    refusal: type[AttestationError] | None
    """None if it passed."""


def judged(
    name: str, passed: bool, wanted: str, found: str, refusal: type[AttestationError]
) -> Rule:
    return Rule(name, wanted, found, None if passed else refusal)


def any_of(names: Collection[str]) -> str:
    return " or ".join(sorted(names)) or "nothing"


def bits(value: int) -> str:
    """bits 6 9; no bits"""
    found = [str(at) for at in range(value.bit_length()) if value >> at & 1]
    return f"bits {' '.join(found)}" if found else "no bits"


def shown(value: int | None) -> str:
    return "not stated" if value is None else str(value)
