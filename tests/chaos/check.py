"""Checks a history against its plan. docs/chaos.md says the rules in words."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Final

from sealring.limits import REKEY_BYTES
from tests.chaos.history import History, Hit, Outcome, SeenError, digest
from tests.chaos.messages import bits_after, bits_before
from tests.chaos.plan import PROBES, Call, FaultKind, Plan

SLACK_S: Final = 30.0
"""How much longer than the timeout a crowded machine may take. A hang takes longer."""


@dataclass(frozen=True, slots=True)
class Violation:
    rule: str
    text: str
    rank: int | None = None
    call: Call | None = None
    wanted: bytes | None = None
    came: bytes | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    violations: list[Violation]
    inconclusive: bool
    """The machine stood still for too long to blame a rank for a silence."""
    slowest_s: float
    """Seconds from the first strike to the last rank's error."""


ABOUT_SENDER: Final[dict[FaultKind, frozenset[str]]] = {
    FaultKind.FLIP: frozenset({"TamperedRecord"}),
    # Each sealing key counts its own records. If the next record is of another key and collective,
    # the sender looks like a rank that is ahead.
    FaultKind.DROP: frozenset({"MissingRecord", "OutOfStep"}),
    FaultKind.REPLAY: frozenset({"ReplayedRecord"}),
    FaultKind.REORDER: frozenset({"MissingRecord", "OutOfStep"}),
    FaultKind.TRUNCATE: frozenset({"TamperedRecord", "PeerLost"}),
    FaultKind.CUT: frozenset({"PeerLost"}),
    FaultKind.INTERRUPT: frozenset({"PeerLost"}),
    FaultKind.SCRIBBLE: frozenset({"TamperedRecord", "ReplayedRecord", "MissingRecord"}),
}
"""The errors that the attacked direction's receiver may get, about the sender."""
BOTH_WAYS: Final = frozenset({FaultKind.CUT, FaultKind.INTERRUPT, FaultKind.SCRIBBLE})
OVER_A_REKEYING: Final = frozenset({FaultKind.DROP, FaultKind.REPLAY, FaultKind.REORDER})
"""If keys change every few records, an old or early record has a key that no receiver tries."""
LOSES_A_RANK: Final = frozenset({FaultKind.KILL, FaultKind.LEAVE})


def check(plan: Plan, history: History) -> Verdict:
    wrong = _results(plan, history)
    if history.longest_stall_s > SLACK_S:
        return Verdict(wrong, not wrong, 0.0)  # nothing that depends on time can be judged
    violations = [Violation("no hang, no crash", text) for text in history.trouble]
    violations += wrong
    slowest = 0.0
    silence_unexplained = False
    for group, members in enumerate(plan.groups):
        judged = _Group(plan, history, group, members)
        found = judged.violations()
        if found and all(v.rule == UNEXPLAINED and "PeerSilent" in v.text for v in found):
            silence_unexplained = True
            if history.longest_stall_s > plan.timeout_s / 4:
                continue
        violations += found
        slowest = max(slowest, judged.slowest_s())
    stood_still = silence_unexplained and history.longest_stall_s > plan.timeout_s / 4
    return Verdict(violations, stood_still and not violations, slowest)


def _results(plan: Plan, history: History) -> list[Violation]:
    """A rank that returns without an error must have the reference engine's result, bit by bit."""
    by_call: dict[Call, list[Outcome]] = defaultdict(list)
    for outcome in history.outcomes:
        if not outcome.altered:
            by_call[outcome.call].append(outcome)
    violations = []
    for call, outcomes in by_call.items():
        members = plan.groups[call.group]
        what, world = call.case, len(members)
        before = bits_before(what, world, call.seed)
        finished = [outcome for outcome in outcomes if outcome.output is not None]
        wanted = {}
        if finished:
            topology = plan.topology(call.group)
            wanted = bits_after(what, world, call.seed, plan.record_bytes, topology)
        for outcome in outcomes:
            at = members.index(outcome.rank)
            if outcome.inputs != digest(before[at]):
                text = "the inputs are not the plan's"
                violations.append(Violation("inputs as planned", text, outcome.rank, call))
            if outcome.output is not None and outcome.output != b"".join(wanted[at]):
                right = b"".join(wanted[at])
                violations.append(
                    Violation(
                        "the reference's result, bit by bit",
                        f"rank {outcome.rank}: {call.case} came out wrong",
                        outcome.rank,
                        call,
                        right,
                        outcome.output,
                    )
                )
    return violations


UNEXPLAINED: Final = "every error has its cause"


class _Group:
    """The rules about the ranks of one group."""

    def __init__(self, plan: Plan, history: History, group: int, members: tuple[int, ...]) -> None:
        self._plan, self._history, self._group, self._members = plan, history, group, members
        self._hits = [
            hit
            for hit in history.hits
            if hit.fault.rank in members
            or (hit.fault.rank < 0 and hit.fault.group == group)
            or plan.makes_silence(hit.fault)
        ]
        self._calls: dict[int, list[Outcome]] = {
            rank: [o for o in history.outcomes if o.rank == rank and o.call.group == group]
            for rank in members
        }
        self._first: dict[int, Outcome] = {}
        for rank, outcomes in self._calls.items():
            failed = [outcome for outcome in outcomes if outcome.error is not None]
            if failed:
                self._first[rank] = min(failed, key=_end)
        self._gone = {rank for rank in members if rank in history.dead or rank in history.left}

    def violations(self) -> list[Violation]:
        return [
            *self._unfinished(),
            *self._not_ours(),
            *self._unexplained(),
            *self._unharmed(),
            *self._changed_their_mind(),
            *self._late(),
        ]

    def slowest_s(self) -> float:
        struck = [hit.at for hit in self._hits if hit.must_end]
        ended = [o.ended for o in self._first.values() if o.ended is not None]
        return max(0.0, max(ended) - min(struck)) if struck and ended else 0.0

    def _unfinished(self) -> list[Violation]:
        return [
            Violation("every call ends", f"rank {rank}'s call never ended", rank, outcome.call)
            for rank, outcomes in self._calls.items()
            if rank not in self._gone
            for outcome in outcomes
            if outcome.ended is None
        ]

    def _not_ours(self) -> list[Violation]:
        return [
            Violation("errors are sealring's", f"rank {rank}: {_words(error)}", rank, outcome.call)
            for rank, outcome in self._first.items()
            if (error := outcome.error) is not None and not error.of_the_group
        ]

    # ---- one cause, and every error names it or a result of it

    def _unexplained(self) -> list[Violation]:
        """Returns errors that no strike explains; explained ranks explain others."""
        left = dict(self._first)
        explained = set(self._gone)
        while found := {rank for rank, o in left.items() if self._explains(rank, o, explained)}:
            explained |= found
            for rank in found:
                del left[rank]
        return [
            Violation(UNEXPLAINED, f"rank {rank}: {_words(outcome.error)}", rank, outcome.call)
            for rank, outcome in left.items()
        ]

    def _explains(self, rank: int, outcome: Outcome, explained: set[int]) -> bool:
        error = outcome.error
        assert error is not None
        if error.reported_by is None:
            return self._sighting(rank, error) or self._followed(error, explained)
        witness = error.reported_by
        if witness in self._first:
            seen = self._first[witness].error
            assert seen is not None
            agrees = seen.reported_by is None and seen.agrees_with(error)
            return agrees and witness in explained
        # The witness died before its call returned its own error.
        return witness in self._gone and (
            self._sighting(witness, error) or self._followed(error, explained)
        )

    def _sighting(self, rank: int, error: SeenError) -> bool:
        """Tells whether this rank may have seen the error itself."""
        peer = error.peer
        name = error.name
        if name == "TamperedRecord" and self._plan.rekey_bytes < REKEY_BYTES:
            rekeyed = [hit for hit in self._hits if hit.fault.kind in OVER_A_REKEYING]
            if any((rank, peer) == (h.fault.receiver, h.fault.sender) for h in rekeyed):
                return True
        if name == "PeerSilent" and any(self._plan.makes_silence(hit.fault) for hit in self._hits):
            # All ranks wait, and the first to time out names the rank that it waited for.
            return True
        return any(_seen_of(hit, rank, peer, name) for hit in self._hits)

    def _followed(self, error: SeenError, explained: set[int]) -> bool:
        """Tells whether the peer left because of something that is explained already."""
        return error.name == "PeerLost" and error.peer is not None and error.peer in explained

    # ---- all or none

    def _unharmed(self) -> list[Violation]:
        """After the probes, either all ranks have failed or none has."""
        alive = [rank for rank in self._members if rank not in self._gone]
        unharmed = [rank for rank in alive if rank not in self._first]
        must = [hit for hit in self._hits if hit.must_end and self._concerns(hit)]
        if not unharmed or not (must or self._first):
            return []
        if not must and self._plan.transport == "shm" and self._seen_last_of_all():
            return []
        why = f"after {must[0].fault}" if must else f"when ranks {sorted(self._first)} had failed"
        return [
            Violation("all ranks fail, or none", f"rank {rank} went on {why}", rank)
            for rank in unharmed
        ]

    def _seen_last_of_all(self) -> bool:
        """Tells whether a cut was seen only in the last probe, after which no rank is asked again.

        In shared memory only the rank that sleeps on the socket sees the cut.
        """
        cut = any(hit.fault.kind is FaultKind.CUT and self._concerns(hit) for hit in self._hits)
        last = self._plan.probes(self._group, PROBES)
        return cut and all(outcome.call in last for outcome in self._first.values())

    def _concerns(self, hit: Hit) -> bool:
        fault = hit.fault
        return fault.rank in self._members if fault.rank >= 0 else fault.group == self._group

    def _changed_their_mind(self) -> list[Violation]:
        """A group that failed raises the same error at every later call.

        Calls that were already under way may still succeed, because messages do not wait for each
        other.
        """
        violations = []
        for rank, first in self._first.items():
            for outcome in self._calls[rank]:
                right = outcome.error is None and outcome.started < _end(first)
                if not right and (
                    outcome.error is None or outcome.error.facts != first.error.facts  # type: ignore[union-attr]
                ):
                    text = f"rank {rank}: {_words(first.error)}, then {_words(outcome.error)}"
                    violations.append(
                        Violation("a failed group stays failed", text, rank, outcome.call)
                    )
        return violations

    def _late(self) -> list[Violation]:
        limit = self._plan.timeout_s * (1 + len(self._plan.faults)) + SLACK_S
        violations = []
        for rank, outcome in self._first.items():
            if outcome.ended is None:
                continue
            cause = min((hit.at for hit in self._hits), default=outcome.started)
            took = outcome.ended - max(outcome.started, cause)
            if took > limit:
                text = f"rank {rank} knew after {took:.1f} s; the limit is {limit:.0f} s"
                violations.append(Violation("errors come in time", text, rank, outcome.call))
        return violations


def _end(outcome: Outcome) -> float:
    return float("inf") if outcome.ended is None else outcome.ended


def _seen_of(hit: Hit, rank: int, peer: int | None, name: str) -> bool:
    fault = hit.fault
    if fault.kind in LOSES_A_RANK:
        return name == "PeerLost" and peer == fault.rank
    if fault.kind is FaultKind.DISAGREE:
        return name == "OutOfStep"
    ends = (fault.receiver, fault.sender)
    ways = [ends, ends[::-1]] if fault.kind in BOTH_WAYS else [ends]
    return name in ABOUT_SENDER.get(fault.kind, ()) and (rank, peer) in ways


def _words(error: SeenError | None) -> str:
    if error is None:
        return "no error"
    by = "" if error.reported_by is None else f", reported by {error.reported_by}"
    where = f"collective {error.collective}" if error.collective else "a message"
    return f"{error.name} about {error.peer} in {where}{by}: {error.text}"
