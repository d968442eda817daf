"""Runs cases on one backend: in a world of 4, and once more those that ask for another setting."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from tests.conformance.outcome import Outcome
from tests.conformance.suite import LIKE, LIKE_FOR_ALL_TO_ALL

WORLD, LARGE_WORLD = 4, 8
ROOT = Path(__file__).parents[2]

Choose = Callable[[list[str]], list[str]]
Report = Callable[[Outcome], None]


class Setting(NamedTuple):
    """How the suite is loaded; its cases skip themselves for one that does not suit them."""

    world: int = WORLD
    like: str = LIKE


def run_backend(
    backend: str, choose: Choose, report: Report, *, jobs: int, limit_s: float
) -> dict[str, Outcome]:
    outcomes: dict[str, Outcome] = {}
    tried: set[Setting] = set()
    waiting: dict[Setting, Choose] = {Setting(): choose}
    while waiting:
        setting, chosen = waiting.popitem()
        tried.add(setting)
        # Twice the ranks: half the worlds at a time.
        at_a_time = max(1, jobs * WORLD // setting.world)
        done = _run_suite(backend, setting, chosen, report, at_a_time, limit_s)
        outcomes |= done
        for other in {_better(outcome, setting) for outcome in done.values()} - tried:
            cases = [case for case, outcome in done.items() if _better(outcome, setting) == other]
            waiting[other] = lambda _, cases=cases: cases
    return outcomes


def _better(outcome: Outcome, setting: Setting) -> Setting:
    """The setting that a skipped case asks for; the same if there is no other."""
    if outcome.verdict != "skipped":
        return setting
    if "small world size" in outcome.reason or "requires world size" in outcome.reason:
        return setting._replace(world=LARGE_WORLD)
    if "Only MPI supports" in outcome.reason:
        return setting._replace(like=LIKE_FOR_ALL_TO_ALL)
    return setting


def _run_suite(
    backend: str, setting: Setting, choose: Choose, report: Report, jobs: int, limit_s: float
) -> dict[str, Outcome]:
    outcomes: dict[str, Outcome] = {}
    with _host(backend, *setting, jobs, limit_s) as process:
        first = process.stdout.readline()
        if not first:
            raise RuntimeError(f"torch's suite could not be loaded for {backend}; see above")
        wanted = choose(json.loads(first)["cases"])
        process.stdin.write(json.dumps(wanted) + "\n")
        process.stdin.flush()
        for line in process.stdout:
            outcome = Outcome.from_json(json.loads(line))
            outcomes[outcome.case] = outcome
            if _better(outcome, setting) == setting:
                report(outcome)
    # A host that ended early must not make its cases vanish from the count.
    for case in wanted:
        if case not in outcomes:
            reason = "the process that runs the cases ended"
            outcomes[case] = Outcome(case, setting.world, "failed", reason)
            report(outcomes[case])
    return outcomes


@contextmanager
def _host(*arguments: object) -> Iterator[Any]:
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.conformance.host", *map(str, arguments)],
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
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                stream.close()
