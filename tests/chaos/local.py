"""A world of engines inside this process: thousands of them in minutes, with men in the middle."""

from __future__ import annotations

import time
from concurrent.futures import FIRST_EXCEPTION, wait
from dataclasses import replace

from sealring.engine.datatypes import DType, ReduceKind
from sealring.schedule import Algorithm, Operation
from tests.chaos.history import History, Outcome, SeenError, digest
from tests.chaos.plan import PROBES, Call, Fault, FaultKind, Plan
from tests.chaos.scribbler import Scribbler
from tests.chaos.streams import STRIKES, Stream
from tests.engine.cases import Case, Tensors
from tests.engine.local_world import Change, LocalWorld

BEYOND_THE_TIMEOUT_S = 1.5
"""A rank that is stopped comes back when all others have given up on it."""
HANG_S = 60.0
"""So long after the timeout, with all its slack, a world that has not ended never will."""


def run_local(plan: Plan) -> History:
    history = History()
    last = plan.last(0)
    strikes = {
        (fault.sender, fault.receiver): STRIKES[fault.kind](fault, last, history)
        for fault in plan.faults
        if fault.kind in STRIKES
    }
    middle: dict[tuple[int, int], Change] = {way: Stream(each) for way, each in strikes.items()}
    local = LocalWorld(
        plan.world,
        plan.transport,
        plan.record_bytes,
        plan.rekey_bytes,
        middle=middle,
        keys_seed=f"{plan.seed} {plan.name}".encode(),
    )
    for way, strike in strikes.items():
        strike.inject = local.middles[way].inject
    scribblers = [
        Scribbler(fault, local, history)
        for fault in plan.faults
        if fault.kind is FaultKind.SCRIBBLE
    ]
    ranks = [_Rank(plan, rank, local, history, scribblers) for rank in range(plan.world)]
    try:
        if not _together(local, plan, [rank.traffic for rank in ranks], history):
            return history
        for scribbler in scribblers:
            scribbler.end()
        for turn in range(1, PROBES + 1):
            if not _together(local, plan, [rank.probe(turn) for rank in ranks], history):
                return history
    finally:
        history.ended = time.monotonic()
    local.close()
    return history


def _together(local: LocalWorld, plan: Plan, parts: list, history: History) -> bool:  # type: ignore[type-arg]
    """All ranks at once; False if one hangs, which no rank may."""
    futures = [local.pool.submit(part) for part in parts]
    limit = (len(plan.faults) + 1) * plan.timeout_s + HANG_S
    _, hanging = wait(futures, limit, FIRST_EXCEPTION)
    for future in futures:
        if future.done() and (problem := future.exception()):
            history.trouble.append(f"the harness failed: {problem!r}")
            hanging.add(future)
    if hanging:
        history.trouble.append(f"{len(hanging)} ranks still hung after {limit:.0f} s")
        for engine in local.engines:
            engine.interrupt()
    return not hanging


class _Rank:
    def __init__(
        self,
        plan: Plan,
        rank: int,
        local: LocalWorld,
        history: History,
        scribblers: list[Scribbler],
    ) -> None:
        self._plan, self._rank, self._history = plan, rank, history
        self._engine = local.engines[rank]
        self._scribblers = scribblers
        self._fault = next((fault for fault in plan.faults if fault.rank == rank), None)

    def traffic(self) -> None:
        for call in self._plan.calls:
            for scribbler in self._scribblers:
                if call.number >= scribbler.fault.at:
                    scribbler.begin()
            altered = False
            if self._fault is not None and self._fault.at == call.number:
                if not befall(self._fault, self._plan, self._history):
                    self._engine.close()
                    self._history.left.add(self._rank)
                    return
                altered = self._fault.kind is FaultKind.DISAGREE
            if not self._run(call, altered=altered):
                return

    def probe(self, turn: int):  # type: ignore[no-untyped-def]
        """Failed ranks call too: they must get the same error again."""
        call = self._plan.probe(0, turn)
        return (lambda: None) if self._rank in self._history.left else (lambda: self._run(call))

    def _run(self, call: Call, *, altered: bool = False) -> bool:
        case = other_case(call.case) if altered else call.case
        tensors = Tensors(case, self._plan.world, self._rank, call.seed)
        outcome = self._history.add(
            Outcome(self._rank, call, digest(tensors.bits()), time.monotonic(), altered=altered)
        )
        try:
            self._engine.run(call.number, tensors.collective(), self._plan.timeout_s)
        except BaseException as error:
            outcome.error = SeenError.of(error)
        else:
            outcome.output = b"".join(tensors.bits())
        outcome.ended = time.monotonic()
        return outcome.error is None


def befall(fault: Fault, plan: Plan, history: History) -> bool:
    """What happens to a rank before it calls; False if it leaves."""
    if fault.kind is FaultKind.LEAVE:
        history.hit(fault, "said goodbye and left", must_end=True)
        return False
    if fault.kind is FaultKind.DISAGREE:
        history.hit(fault, "called another collective than the others", must_end=False)
    elif fault.kind is FaultKind.PAUSE:
        history.hit(fault, "came late", must_end=False)
        time.sleep(0.3 * fault.amount)
    elif fault.kind is FaultKind.STOP:
        history.hit(fault, "stood still", must_end=False)
        time.sleep(plan.timeout_s + BEYOND_THE_TIMEOUT_S)
    return True


def other_case(case: Case) -> Case:
    """What a rank that disagrees calls: the same with one element more, or an all-reduce."""
    if case.operation is Operation.BARRIER:
        return Case(Operation.ALL_REDUCE, Algorithm.DIRECT, 5, DType.FLOAT32, ReduceKind.SUM)
    return replace(case, elements=case.elements + 1)
