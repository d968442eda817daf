"""Runs cases until the time is up; keeps the findings and the commands that repeat them."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from tests.fuzz_api.world import World, WorldEnded

WARM_UP_CASES: Final = 20
"""Allocators and caches fill during so many cases; after them memory must not grow."""
WINDOW: Final = 20
"""The number of cases of which the smallest memory counts: a dropped group gives its memory back a
little later, so a single case may still show some of it.
"""
GROWTH_BYTES: Final = 256 << 20


@dataclass(slots=True)
class Finding:
    kind: str
    case: int
    rank: int | None
    what: str


@dataclass(slots=True)
class Result:
    seed: int
    world: int
    cases: int = 0
    seconds: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)
    findings: list[Finding] = field(default_factory=list)
    resident: list[int] = field(default_factory=list)
    """The resident memory after each case, of the rank that has the most."""

    def as_json(self) -> dict[str, Any]:
        return {
            "seed": self.seed,
            "world": self.world,
            "cases": self.cases,
            "seconds": round(self.seconds, 1),
            "counts": dict(self.counts),
            "resident_bytes": {"first": self.resident[:1], "last": self.resident[-1:]},
            "findings": [
                {"kind": f.kind, "case": f.case, "rank": f.rank, "what": f.what}
                for f in self.findings
            ],
        }

    def again(self, finding: Finding) -> str:
        return f"make fuzz-api SEED={self.seed} CASE={finding.case} WORLD={self.world}"


def fuzz(
    seed: int,
    world: int,
    seconds: float,
    only: int | None,
    patience_s: float,
    on_case: Callable[[Result], None],
) -> Result:
    result = Result(seed, world)
    began = time.monotonic()
    running: World | None = None
    number = 0 if only is None else only
    try:
        while True:
            try:
                running = running or World(world, seed, patience_s)
                _one(result, running, number)
            except WorldEnded as ended:
                result.findings.append(Finding(ended.args[0], number, None, ended.args[1]))
                if running is not None:
                    running.close()
                running = None
                result.resident.clear()
            result.cases += 1
            result.seconds = time.monotonic() - began
            on_case(result)
            number += 1
            if only is not None or result.seconds >= seconds:
                return result
    finally:
        if running is not None:
            running.close()


def _one(result: Result, running: World, number: int) -> None:
    reports = running.run(number)
    for rank, report in enumerate(reports):
        result.counts.update(report.counts)
        result.findings += [Finding(kind, number, rank, what) for kind, what in report.findings]
    result.resident.append(max(report.resident for report in reports))
    after = result.resident[WARM_UP_CASES:]
    if len(after) >= 2 * WINDOW:
        grown = min(after[-WINDOW:]) - min(after[:WINDOW])
        if grown > GROWTH_BYTES:
            what = f"{grown >> 20} MiB more than after {WARM_UP_CASES} cases"
            result.findings.append(Finding("leak", number, None, what))
            del result.resident[: WARM_UP_CASES + WINDOW]
