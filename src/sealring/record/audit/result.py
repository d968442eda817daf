"""What an audit says: answers to claims, findings, the graph, and one status for programs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import Any

from sealring.record.audit.findings import Fault, Finding
from sealring.record.audit.graph import Graph
from sealring.record.audit.records import LogSeen
from sealring.record.replay import Outcome


class Said(StrEnum):
    YES = "yes"
    NO = "no"
    NOT_SHOWN = "not shown"


class Status(IntEnum):
    """The command's exit status."""

    SHOWN = 0
    """Every claim is answered with yes, and nothing contradicts anything."""
    REFUTED = 1
    """A claim is answered with no, or records contradict each other or are forged."""
    NOT_SHOWN = 2
    """A claim is not shown, or something cannot be read."""


@dataclass(frozen=True, slots=True)
class Answer:
    claim: str
    said: Said
    text: str
    records: tuple[str, ...] = ()
    """Digests of the statements that show it, where it is answered with no."""

    def as_json(self) -> dict[str, Any]:
        return {
            "claim": self.claim,
            "answer": self.said.value,
            "text": self.text,
            "records": list(self.records),
        }


@dataclass(frozen=True, slots=True)
class Repetitions:
    """Parts of the run that were executed again."""

    seed: str
    """By which another audit repeats the same ones, as long as the log stays as it is."""
    tolerance: float
    parts: int
    """That could have been."""
    outcomes: tuple[Outcome, ...]

    def as_json(self) -> dict[str, Any]:
        return {
            "seed": self.seed,
            "tolerance": self.tolerance,
            "parts": self.parts,
            "repeated": [_as_json(one) for one in self.outcomes],
        }


def _as_json(outcome: Outcome) -> dict[str, Any]:
    part, found = outcome.stretch, outcome.difference
    # JSON has no infinite number: what cannot be measured has no size.
    size = None if found is None or not math.isfinite(found.size) else found.size
    return {
        "first_step": part.first_step,
        "end_step": part.end.step,
        "checkpoint": part.end.name,
        "verdict": outcome.verdict,
        "difference": size,
        "largest_in": None if found is None else found.where,
    }


@dataclass(frozen=True, slots=True)
class AuditResult:
    run: str
    """The run's name."""
    jobs: tuple[str, ...]
    log: LogSeen | None
    """None: the log cannot be believed, a finding says why."""
    payloads: Mapping[str, str]
    """Digest of every statement that was verified, and what it says, as JSON."""
    graph: Graph
    findings: tuple[Finding, ...]
    answers: tuple[Answer, ...]
    ranks: int
    intervals: int
    repetitions: Repetitions | None = None
    """None: nothing was executed again."""

    @property
    def status(self) -> Status:
        unread = [one for one in self.findings if one.fault is Fault.UNREADABLE]
        if len(unread) < len(self.findings) or any(one.said is Said.NO for one in self.answers):
            return Status.REFUTED
        if unread or any(one.said is Said.NOT_SHOWN for one in self.answers):
            return Status.NOT_SHOWN
        return Status.SHOWN

    @property
    def verdict(self) -> str:
        """The status in words, for the terminal and the page."""
        if self.status is Status.REFUTED:
            return "Something is refuted: see what is answered with no, and the findings."
        if self.status is Status.NOT_SHOWN:
            return "Something is not shown: see which claims, what cannot be read, and why."
        shown = "Every claim is shown" if self.answers else "No claims were given, so none is shown"
        return f"{shown}, and no record contradicts another."

    def as_json(self) -> dict[str, Any]:
        log = self.log
        return {
            "run": self.run,
            "jobs": list(self.jobs),
            "status": self.status.value,
            "statements": len(self.payloads),
            "ranks": self.ranks,
            "intervals": self.intervals,
            "log": None
            if log is None
            else {"origin": log.origin, "size": log.size, "cosigned_by": list(log.cosigned)},
            "claims": [one.as_json() for one in self.answers],
            "findings": [one.as_json() for one in self.findings],
            "replay": None if self.repetitions is None else self.repetitions.as_json(),
        }
