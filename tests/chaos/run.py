"""Runs worlds for a given time and counts their results."""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from tests.chaos.check import Verdict, check
from tests.chaos.history import Heartbeat, History
from tests.chaos.light import run_light
from tests.chaos.local import run_local
from tests.chaos.messages import Message
from tests.chaos.plan import Call, FaultKind, Plan, Where, make_plan
from tests.chaos.processes import Hands, run_processes
from tests.chaos.report import command, page
from tests.core.engine.cases import Case

LANES: Final[dict[Where, int]] = {"local": 3, "light": 2, "processes": 1}
"""How many worlds run at a time; they mostly wait."""


@dataclass
class Counts:
    seed: int
    worlds: Counter[str] = field(default_factory=Counter)
    calls: Counter[str] = field(default_factory=Counter)
    """Calls that at least one rank began, by operation and algorithm."""
    results: int = 0
    """How many ranks' results were compared with the reference, bit by bit."""
    faults: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)
    """How groups ended: without an error, or with the error of the rank that saw it first."""
    errors: Counter[str] = field(default_factory=Counter)
    """The error with which each rank ended."""
    silences: Counter[str] = field(default_factory=Counter)
    """Ranks that gave up on a stopped rank: whether they named that rank or another."""
    inconclusive: int = 0
    slowest_s: float = 0.0
    violations: int = 0
    pages: list[str] = field(default_factory=list)
    commands: list[str] = field(default_factory=list)
    sentences: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def add(self, plan: Plan, history: History, verdict: Verdict) -> None:
        self.worlds[f"{plan.where} {plan.transport}"] += 1
        self.calls.update(map(_kind_of_call, {outcome.call for outcome in history.outcomes}))
        self.results += sum(o.output is not None for o in history.outcomes)
        self.faults.update(hit.fault.kind.value for hit in history.hits)
        kinds = {hit.fault.kind for hit in history.hits}
        only_stopped = kinds <= {FaultKind.STOP, FaultKind.PAUSE}
        stopped = {hit.fault.rank for hit in history.hits if only_stopped}
        for group in range(len(plan.groups)):
            failed: dict[int, Any] = {}
            for outcome in history.outcomes:
                if outcome.call.group == group and outcome.error is not None:
                    failed.setdefault(outcome.rank, outcome)
            self.errors.update(outcome.error.name for outcome in failed.values())
            roots = [o for o in failed.values() if o.error.reported_by is None]
            first = min(roots or failed.values(), key=lambda o: o.ended or 0.0, default=None)
            self.outcomes["no error" if first is None else first.error.name] += 1
            if stopped and first is not None and first.error.name == "PeerSilent":
                # A receive from anyone that no rank served cannot name a rank.
                named = first.error.peer
                word = "no rank" if named is None else "it" if named in stopped else "another"
                self.silences[f"named {word}"] += 1
        self.inconclusive += verdict.inconclusive
        self.slowest_s = max(self.slowest_s, verdict.slowest_s)
        self.violations += len(verdict.violations)


def _kind_of_call(call: Call) -> str:
    case = call.case
    if isinstance(case, Case):
        return f"{case.operation.name} {case.algorithm.name}".lower()
    if isinstance(case, Message):
        return "message from anyone" if case.from_anyone else "message"
    return "greeting"


class Chaos:
    """One chaos run with its output folder, its counts and its callback."""

    def __init__(
        self, seed: int, out: Path, on_world: Callable[[Counts], None] = lambda counts: None
    ) -> None:
        self.counts = Counts(seed)
        self._out = out
        self._on_world = on_world
        self._heartbeat = Heartbeat()
        self._lock = threading.Lock()
        self._problems: list[BaseException] = []

    def local(self, seconds: float) -> None:
        self._lanes("local", seconds, run_local)

    def light(self, seconds: float) -> None:
        self._lanes("light", seconds, run_light)

    def _lanes(self, where: Where, seconds: float, run: Callable[[Plan], History]) -> None:
        numbers = itertools.count()
        end = time.monotonic() + seconds
        lanes = [
            threading.Thread(target=self._lane, args=(where, numbers, end, run))
            for _ in range(LANES[where])
        ]
        for lane in lanes:
            lane.start()
        for lane in lanes:
            lane.join()
        if self._problems:
            raise self._problems[0]

    def processes(self, seconds: float) -> None:
        hands = Hands()
        try:
            hands.wait_until_up()  # that time says nothing about sealring
            end = time.monotonic() + seconds
            self._lane("processes", itertools.count(), end, _with(hands))
        finally:
            hands.close()
        if self._problems:
            raise self._problems[0]

    def one(self, where: Where, number: int) -> None:
        """Runs one world again: the one that a page names."""
        hands = Hands() if where == "processes" else None
        try:
            in_process = run_light if where == "light" else run_local
            run = in_process if hands is None else _with(hands)
            self._world(make_plan(where, self.counts.seed, number), run)
        finally:
            if hands is not None:
                hands.close()

    def _lane(
        self,
        where: Where,
        numbers: Iterator[int],
        end: float,
        run: Callable[[Plan], History],
    ) -> None:
        began = time.monotonic()
        try:
            while time.monotonic() < end and not self._problems:
                self._world(make_plan(where, self.counts.seed, next(numbers)), run)
        except BaseException as problem:
            self._problems.append(problem)
        with self._lock:
            took = time.monotonic() - began
            self.counts.seconds += took / LANES[where]

    def _world(self, plan: Plan, run: Callable[[Plan], History]) -> None:
        history = run(plan)
        history.longest_stall_s = self._heartbeat.longest_since(history.began)
        verdict = check(plan, history)
        with self._lock:
            self.counts.add(plan, history, verdict)
            if verdict.violations:
                self._out.mkdir(parents=True, exist_ok=True)
                name = f"violation-{plan.seed}-{plan.name.replace('/', '-')}.html"
                (self._out / name).write_text(page(plan, history, verdict.violations))
                self.counts.pages.append(str(self._out / name))
                self.counts.commands.append(command(plan))
                self.counts.sentences += [
                    f"{each.rule}: {each.text}" for each in verdict.violations
                ]
            self._on_world(self.counts)


def _with(hands: Hands) -> Callable[[Plan], History]:
    return lambda plan: run_processes(plan, hands)
