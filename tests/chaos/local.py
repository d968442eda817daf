"""A world of engines or mailboxes in this process, with men in the middle.

Thousands of such worlds run in minutes.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, wait
from dataclasses import dataclass, field, replace
from typing import Any

from sealring import _native
from sealring.core.engine.collective import DType, ReduceKind
from sealring.core.engine.mailbox import ANYONE
from sealring.core.schedule import Algorithm, Operation
from tests.chaos.history import History, Outcome, SeenError, digest
from tests.chaos.messages import Greeting, Message, Nothing, Parcel, What, memory_of
from tests.chaos.plan import PROBES, Call, Fault, FaultKind, Plan
from tests.chaos.scribbler import Scribbler
from tests.chaos.streams import STRIKES, Stream, Strike
from tests.core.engine.cases import Case, Tensors
from tests.core.engine.local_world import Change, LocalMail, LocalWorld, receive, send, slot

BEYOND_THE_TIMEOUT_S = 1.5
"""A stopped rank continues when all others have given up on it."""
HANG_S = 60.0
"""A world that has not ended so long after the timeout and its slack never will."""


def run_local(plan: Plan) -> History:
    history = History()
    strikes = {
        (fault.sender, fault.receiver): STRIKES[fault.kind](fault, history)
        for fault in plan.faults
        if fault.kind in STRIKES
    }
    streams = {way: Stream(strike) for way, strike in strikes.items()}
    of_mail = plan.channels == {"messages"}
    local = (LocalMail if of_mail else LocalWorld)(
        plan.world,
        plan.transport,
        plan.record_bytes,
        plan.rekey_bytes,
        middle=dict[tuple[int, int], Change](streams),
        keys_seed=f"{plan.seed} {plan.name}".encode(),
        hosts=plan.hosts,
    )
    for way, stream in streams.items():
        stream.inject = local.middles[way].inject
    scribblers = [
        Scribbler(fault, local, history)
        for fault in plan.faults
        if fault.kind is FaultKind.SCRIBBLE
    ]
    run_ranks(plan, local, history, list(strikes.values()), scribblers)
    return history


def run_ranks(
    plan: Plan,
    world: Any,
    history: History,
    strikes: Sequence[Strike],
    scribblers: Sequence[Scribbler] = (),
) -> None:
    """Runs the traffic and the probes; `world` is a LocalWorld or has the same members."""
    kind = _Correspondent if plan.channels == {"messages"} else _Rank
    ranks = [kind(plan, rank, world, history, scribblers) for rank in range(plan.world)]
    try:
        if not _together(world, plan, [rank.traffic for rank in ranks], history):
            return
        for strike in strikes:
            strike.over = True
        for scribbler in scribblers:
            scribbler.end()
        for turn in range(1, PROBES + 1):
            if not _together(world, plan, [rank.probe(turn) for rank in ranks], history):
                return
    finally:
        history.ended = time.monotonic()
    world.close()


def _together(local: Any, plan: Plan, parts: list, history: History) -> bool:  # type: ignore[type-arg]
    """Runs all ranks' parts at once; returns False if a rank hangs."""
    futures = [local.pool.submit(part) for part in parts]
    limit = (len(plan.faults) + 1) * plan.timeout_s + HANG_S
    _, hanging = wait(futures, limit, FIRST_EXCEPTION)
    for future in futures:
        if future.done() and (problem := future.exception()):
            history.trouble.append(f"the harness failed: {problem!r}")
            hanging.add(future)
    if hanging:
        history.trouble.append(f"{len(hanging)} ranks still hung after {limit:.0f} s")
        for end in local.ends():
            end.close()
    return not hanging


class _Rank:
    """One rank of a world of engines."""

    def __init__(
        self,
        plan: Plan,
        rank: int,
        local: Any,
        history: History,
        scribblers: Sequence[Scribbler],
    ) -> None:
        self._plan, self._rank, self._history, self._local = plan, rank, history, local
        self._scribblers = scribblers
        self._fault = next((fault for fault in plan.faults if fault.rank == rank), None)

    def traffic(self) -> None:
        for batch in self._plan.batches:
            begun = []
            for call in batch:
                for scribbler in self._scribblers:
                    if self._plan.at(call) >= scribbler.fault.at:
                        scribbler.begin()
                altered = False
                if self._fault is not None and self._fault.at == self._plan.at(call):
                    altered = self._fault.kind is FaultKind.DISAGREE
                    if altered and not self._plan.takes_part(call, self._rank):
                        continue
                    if not befall(self._fault, self._plan, self._history):
                        self._local.ends()[self._rank].close()
                        self._history.left.add(self._rank)
                        return
                if not self._plan.takes_part(call, self._rank):
                    continue
                begun.append(self._begin(call, altered=altered))
                if begun[-1].outcome.error is not None:
                    break
            # Every call that began must end, even if the last one failed at once.
            well = [self._finish(each) for each in begun]
            if not all(well):
                return

    def probe(self, turn: int):  # type: ignore[no-untyped-def]
        """Failed ranks call too, because they must get the same error again."""
        if self._rank in self._history.left:
            return lambda: None
        return lambda: [
            self._finish(self._begin(call)) for call in self._plan.probes(group=0, turn=turn)
        ]

    def _begin(self, call: Call, *, altered: bool = False) -> _Begun:
        case = other_case(call.case) if altered else call.case
        memory = memory_of(case, self._plan.world, self._rank, call.seed)
        inputs = digest(memory.bits())
        outcome = self._history.add(
            Outcome(self._rank, call, inputs, time.monotonic(), altered=altered)
        )
        begun = _Begun(call, memory, outcome)
        try:
            self._call(case, begun)
        except BaseException as error:
            begun.fails(error)
        return begun

    def _call(self, case: What, begun: _Begun) -> None:
        assert isinstance(begun.memory, Tensors)
        engine = self._local.engines[self._rank]
        engine.run(begun.call.number, begun.memory.collective(), self._plan.timeout_s)

    def _finish(self, begun: _Begun) -> bool:
        """Waits for the call to end; returns False if it failed."""
        if begun.outcome.error is None:
            try:
                self._wait(begun)
            except BaseException as error:
                begun.fails(error)
            else:
                begun.outcome.output = b"".join(begun.memory.bits())
                begun.outcome.ended = time.monotonic()
        return begun.outcome.error is None

    def _wait(self, begun: _Begun) -> None:
        """Does nothing, because a collective has ended when its call returns."""


@dataclass
class _Begun:
    call: Call
    memory: Tensors | Parcel | Nothing
    outcome: Outcome
    messages: list[_native.Completion] = field(default_factory=list)

    def fails(self, error: BaseException) -> None:
        self.outcome.error = SeenError.of(error)
        self.outcome.ended = time.monotonic()


class _Correspondent(_Rank):
    """One rank of a world of mailboxes."""

    def _call(self, case: What, begun: _Begun) -> None:
        box, timeout_s = self._local.mailboxes[self._rank], self._plan.timeout_s
        nothing = (0, 0)
        if isinstance(case, Message):
            (memory,) = map(slot, begun.memory.slots)
            if self._rank == case.sender:
                message = send(box, case.receiver, case.tag, memory, timeout_s)
            else:
                source = ANYONE if case.from_anyone else case.sender
                message = receive(box, source, case.tag, memory, timeout_s)
            begun.messages.append(message)
        elif isinstance(case, Greeting):
            others = [rank for rank in range(self._plan.world) if rank != self._rank]
            for deal in (send, receive):
                begun.messages += [
                    deal(box, other, case.tag, nothing, timeout_s) for other in others
                ]

    def _wait(self, begun: _Begun) -> None:
        for message in begun.messages:
            self._local.mailboxes[self._rank].wait(message)


def befall(fault: Fault, plan: Plan, history: History) -> bool:
    """Does to a rank what the fault says before a call; returns False if the rank leaves."""
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


def other_case(case: What) -> What:
    """Returns what a disagreeing rank calls: one more element, or an all-reduce for a barrier."""
    if isinstance(case, Greeting):
        return case
    if isinstance(case, Case) and case.operation is Operation.BARRIER:
        return Case(Operation.ALL_REDUCE, Algorithm.DIRECT, 5, DType.FLOAT32, ReduceKind.SUM)
    return replace(case, elements=case.elements + 1)
