"""What came of one case of torch's suite, as it travels from the host process to the command."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Verdict = Literal["passed", "failed", "skipped"]


@dataclass(frozen=True, slots=True)
class Evidence:
    """What the ranks' own process groups say of themselves, summed over the ranks."""

    ranks: int = 0
    """Ranks whose default group was one of sealring's."""
    sealed_records: int = 0
    sealed_bytes: int = 0
    gloo_groups: int = 0
    """Groups that the test's code asked Gloo for by name, beside the default group."""


@dataclass(frozen=True, slots=True)
class Outcome:
    case: str
    world: int
    verdict: Verdict
    reason: str = ""
    """Of a skip, in torch's own words; of a failure, what the ranks ended with."""
    seconds: float = 0.0
    output: dict[str, str] = field(default_factory=dict)
    """What the ranks of a failed case printed, by rank."""
    evidence: Evidence = Evidence()

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(value: dict[str, Any]) -> Outcome:
        return Outcome(**{**value, "evidence": Evidence(**value["evidence"])})
