"""Runs cases on one backend: first in a world of 4, then in one of 8 what needs more ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.conformance.outcome import Outcome

WORLD, LARGE_WORLD = 4, 8
ROOT = Path(__file__).parents[2]

Choose = Callable[[list[str]], list[str]]
Report = Callable[[Outcome], None]


def run_backend(
    backend: str, choose: Choose, report: Report, *, jobs: int, limit_s: float
) -> dict[str, Outcome]:
    outcomes = _run_world(backend, WORLD, choose, report, jobs, limit_s)
    small = [case for case, outcome in outcomes.items() if _needs_more_ranks(outcome)]
    if small:
        # Twice the ranks: half the worlds at a time.
        jobs = max(1, jobs // 2)
        outcomes |= _run_world(backend, LARGE_WORLD, lambda _: small, report, jobs, limit_s)
    return outcomes


def _needs_more_ranks(outcome: Outcome) -> bool:
    return outcome.verdict == "skipped" and (
        "small world size" in outcome.reason or "requires world size" in outcome.reason
    )


def _run_world(
    backend: str, world: int, choose: Choose, report: Report, jobs: int, limit_s: float
) -> dict[str, Outcome]:
    outcomes: dict[str, Outcome] = {}
    with _host(backend, world, jobs, limit_s) as process:
        first = process.stdout.readline()
        if not first:
            raise RuntimeError(f"torch's suite could not be loaded for {backend}; see above")
        wanted = choose(json.loads(first)["cases"])
        process.stdin.write(json.dumps(wanted) + "\n")
        process.stdin.flush()
        for line in process.stdout:
            outcome = Outcome.from_json(json.loads(line))
            outcomes[outcome.case] = outcome
            report(outcome)
    # A host that ended early must not make its cases vanish from the count.
    for case in wanted:
        if case not in outcomes:
            outcomes[case] = Outcome(case, world, "failed", "the process that runs the cases ended")
            report(outcomes[case])
    return outcomes


@contextmanager
def _host(backend: str, world: int, jobs: int, limit_s: float) -> Iterator[Any]:
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "tests.conformance.host",
            backend,
            str(world),
            str(jobs),
            str(limit_s),
        ],
        cwd=ROOT,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
        process.wait()
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()
        process.stdin.close()
        process.stdout.close()
