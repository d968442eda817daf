"""One rank: runs the cases that it is told to run, and reports differences."""

from __future__ import annotations

import faulthandler
import gc
import os
import signal
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import sealring
from sealring.errors import GroupError, PeerSilent
from tests.fuzz_api.leaks import held, left_behind, resident_bytes
from tests.fuzz_api.operations import Call
from tests.fuzz_api.plan import Case, Step, plan
from tests.fuzz_api.tensors import same

_TIMEOUT = timedelta(seconds=100)


@dataclass(slots=True)
class Report:
    counts: Counter[str] = field(default_factory=Counter)
    findings: list[tuple[str, str]] = field(default_factory=list)
    """The kind and the description of each finding of this rank in this case."""
    resident: int = 0


def run(rank: int, world: int, seed: int, env: Mapping[str, str], pipe: Any) -> None:
    os.environ.update(env)
    faulthandler.register(signal.SIGUSR1, file=sys.stderr, all_threads=True)
    torch.set_num_threads(1)
    # This small group stays; torch uses it to make the groups of the cases.
    dist.init_process_group("gloo", rank=rank, world_size=world)
    pipe.send("ready")
    while (number := pipe.recv()) is not None:
        report = Report()
        try:
            _run_case(plan(seed, number, world), rank, report)
        except Exception:
            report.findings.append(("error", traceback.format_exc()))
        gc.collect()
        report.resident = resident_bytes()
        pipe.send(report)


def _run_case(case: Case, rank: int, report: Report) -> None:
    before = held()
    gloo = dist.new_group(list(case.members), backend="gloo", timeout=_TIMEOUT)
    ours = dist.new_group(list(case.members), backend="sealring", timeout=_TIMEOUT)
    if rank in case.members:
        runner = _Runner(case, case.members.index(rank), report)
        apart = runner.make_apart()
        side = threading.Thread(target=runner.use, args=(apart, 20)) if case.threads else None
        if side is not None:
            side.start()
        for batch, waits in zip(case.batches, case.waits, strict=True):
            runner.compare(batch, waits, ours, gloo)
            if report.findings:
                break
        if side is not None:
            side.join()
        runner.end(apart)
        del apart
        dist.destroy_process_group(ours)
        dist.destroy_process_group(gloo)
        del runner
    del ours, gloo
    if left := left_behind(before):
        report.findings.append(("leak", left))


class _Runner:
    def __init__(self, case: Case, rank: int, report: Report) -> None:
        self._case = case
        self._rank = rank
        self._report = report

    def compare(
        self, batch: tuple[Step, ...], waits: tuple[int, ...], ours: Any, gloo: Any
    ) -> None:
        calls = [self._call(ours, step, views=True) for step in batch]
        problems = [_begin(call) for call in calls]
        for index in waits:
            problems[index] = problems[index] or _finish(calls[index])
        for step, call, problem in zip(batch, calls, problems, strict=True):
            self._report.counts[step.operation] += 1
            if step.operation == "barrier":
                # A barrier is not repeated on Gloo: there is nothing to compare. On a loaded
                # machine Gloo's own barrier sometimes never returns, even without a sealring group.
                if problem is not None:
                    self._finding("difference", step, f"a barrier failed: {problem!r}")
                continue
            reference = self._call(gloo, step, views=False)
            refusal = _begin(reference) or _finish(reference)
            if problem is None and refusal is None:
                self.judge(step, call, reference)
            elif problem is None:
                self._report.counts["only sealring can"] += 1
            elif isinstance(problem, GroupError):
                self._finding("difference", step, f"the group ended: {problem!r}")
            elif refusal is not None:
                self._report.counts["both refuse"] += 1
            else:
                # Gloo got a contiguous copy; it may refuse the view as well.
                viewed = self._call(gloo, step, views=True)
                if _begin(viewed) or _finish(viewed):
                    self._report.counts["both refuse"] += 1
                else:
                    self._finding("difference", step, f"Gloo can, and sealring not: {problem!r}")

    def _call(self, group: Any, step: Step, *, views: bool) -> Call:
        return Call(group, self._case.members, self._rank, step, views)

    def judge(self, step: Step, ours: Call, theirs: Call) -> None:
        for index, (mine, other) in enumerate(zip(ours.outputs, theirs.outputs, strict=True)):
            if not same(mine, other, step):
                self._finding(
                    "difference",
                    step,
                    f"tensor {index}: {_shown(mine)}, and Gloo has {_shown(other)}",
                )
                return
        self._report.counts["equal"] += 1

    def _finding(self, kind: str, step: Step, what: str) -> None:
        self._report.findings.append((kind, f"{step}: {what}"))

    # ---- a group that torch does not know, and the ways to end it

    def make_apart(self) -> Any:
        store = dist.PrefixStore(
            f"apart/{self._case.number}", dist.distributed_c10d._get_default_store()
        )
        timeout = timedelta(seconds=2) if self._case.ending == "timeout" else _TIMEOUT
        return sealring.create_group(store, self._rank, len(self._case.members), timeout=timeout)

    def use(self, group: Any, times: int) -> list[Any]:
        works = []
        for number in range(times):
            tensor = torch.full((1 << (number % 14),), float(self._rank + 1))
            works.append(group.allreduce([tensor]))
            if number % 3 == 0:
                works[-1].wait()
        size = len(self._case.members)
        works[-1].wait()
        if tensor[-1].item() != size * (size + 1) / 2:
            self._report.findings.append(("difference", f"a group apart: sum {tensor[-1]}"))
        return works

    def end(self, group: Any) -> None:
        ending = self._case.ending
        self._report.counts[f"end: {ending}"] += 1
        if ending == "timeout" and len(self._case.members) > 1:
            self._run_out_of_time(group)
            return
        works = self.use(group, 3)
        if ending == "drop with works":
            works.append(group.allreduce([torch.ones(50000)]))
            del group
            works[-1].wait()
            return
        if ending == "drop in a cycle":
            cycle = [group, works]
            cycle.append(cycle)
            return
        if ending == "shutdown":
            group.shutdown()
        elif ending == "abort":
            group.abort()

    def _run_out_of_time(self, group: Any) -> None:
        late = self._case.number % len(self._case.members)
        if self._rank == late:
            time.sleep(3)
        try:
            for _ in range(2):
                group.allreduce([torch.ones(10)]).wait()
        except PeerSilent:
            return
        except Exception as error:
            self._report.findings.append(("difference", f"late ranks: {error!r}"))
            return
        self._report.findings.append(("difference", "a rank came late and no other was told"))


def _begin(call: Call) -> Exception | None:
    try:
        call.begin()
    except Exception as problem:
        return problem
    return None


def _finish(call: Call) -> Exception | None:
    try:
        for work in call.works:
            work.wait()
    except Exception as problem:
        return problem
    return None


def _shown(value: object) -> str:
    return repr(value).replace("\n", " ")[:300]
