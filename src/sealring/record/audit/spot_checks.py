"""Executes parts of a run again, so that what records state is also checked."""

from __future__ import annotations

import math
import secrets
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sealring.formats.log.checkpoints import SignedCheckpoint
from sealring.record.audit.findings import ClaimAnswer, Fault, Finding, Said, blame
from sealring.record.audit.records import AuditTrust, Records
from sealring.record.replay import (
    Compare,
    Outcome,
    Stretch,
    draw,
    replay,
    seed_of,
    stretches,
    unrepeatable,
)
from sealring.record.statements.forms import CheckpointRef, Interval
from sealring.record.statements.run_folder import RunFolder

NAME = "replay"


@dataclass(frozen=True, slots=True)
class Repetition:
    """What an auditor wants to be repeated."""

    count: int
    arguments: Sequence[str] = ()
    """Arguments of the script. They name a copy of the vault."""
    timeout: float = 600.0
    """The time limit in seconds for each part."""
    tolerance: float = 0.0
    """How far numbers may be from the recorded ones. 0: exactly the same bits."""
    compare: Compare | None = None
    """The comparison that a tolerance needs."""
    seed: bytes = field(default_factory=lambda: secrets.token_bytes(32))
    """Chooses the parts, together with the witnesses' cosignatures. The same seed repeats a
    choice."""


@dataclass(frozen=True, slots=True)
class Repetitions:
    """Parts of the run that were executed again."""

    seed: str
    """The seed with which another audit repeats the same parts, as long as the log is unchanged."""
    tolerance: float
    parts: int
    """The number of parts that could have been drawn."""
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
    # JSON has no infinite number, so a difference that cannot be measured has no size.
    size = None if found is None or not math.isfinite(found.size) else found.size
    return {
        "first_step": part.first_step,
        "end_step": part.end.step,
        "checkpoint": part.end.name,
        "verdict": outcome.verdict,
        "difference": size,
        "largest_in": None if found is None else found.where,
    }


def spot_check(
    wanted: Repetition, records: Records, run: RunFolder, log: SignedCheckpoint | None,
    trust: AuditTrust, stage: Callable[[str], None],
) -> tuple[ClaimAnswer, list[Finding], Repetitions | None]:  # fmt: skip
    """Draws parts and executes each of them again."""
    if log is None:
        text = "the log is not believed, so that nothing says which parts to repeat"
        return ClaimAnswer(NAME, Said.NOT_SHOWN, text), [], None
    stated = {rank: [turn.interval for turn in chain] for rank, chain in records.chains.items()}
    chains = list(stated.values())
    parts = _parts(chains)
    drawn = draw(parts, wanted.count, seed_of(log, wanted.seed))
    if not drawn:
        text = "no checkpoint of the run names its content, so that no part can be compared"
        return ClaimAnswer(NAME, Said.NOT_SHOWN, text), [], None
    outcomes = []
    with tempfile.TemporaryDirectory(prefix="sealring-replay-") as folder:
        for number, part in enumerate(drawn):
            stage(f"by repeating {_words(part)} ({number + 1} of {len(drawn)})")
            outcomes.append(replay(
                part, run, stated, trust.authorities, Path(folder) / str(number),
                arguments=wanted.arguments, timeout=wanted.timeout, compare=wanted.compare,
                tolerance=wanted.tolerance,
            ))  # fmt: skip
    seen = Repetitions(wanted.seed.hex(), wanted.tolerance, len(parts), tuple(outcomes))
    findings = [_finding(one, records, wanted) for one in outcomes if one.verdict == "different"]
    left = [one for chain in chains for one in unrepeatable(chain)]
    return _answer(outcomes, len(parts), left, wanted), findings, seen


def _parts(chains: Sequence[Sequence[Interval]]) -> list[Stretch]:
    """The parts of all ranks that say that they saved. So no single rank limits what is drawn."""
    found: dict[tuple[object, ...], Stretch] = {}
    for part in (part for chain in chains for part in stretches(chain)):
        start = None if part.start is None else part.start.content
        found.setdefault((part.first_step, start, part.end.step, part.end.content), part)
    return sorted(found.values(), key=lambda part: (part.end.step, part.first_step))


def _answer(
    outcomes: Sequence[Outcome], parts: int, left: Sequence[CheckpointRef], wanted: Repetition
) -> ClaimAnswer:
    wrong = [one for one in outcomes if one.verdict == "different"]
    if wrong:
        text = f"{_words(wrong[0].stretch)} do not lead to {wrong[0].stretch.end.name}"
        return ClaimAnswer(NAME, Said.NO, f"{text}{_apart(wrong[0], wanted)}")
    failed = [one for one in outcomes if one.verdict == "failed"]
    if failed:
        last = failed[0].said.strip().splitlines()[-1:] or ["it said nothing"]
        text = f"{_words(failed[0].stretch)} could not be repeated: {last[0][-300:]}"
        return ClaimAnswer(NAME, Said.NOT_SHOWN, text)
    text = f"{len(outcomes)} of {parts} parts were executed again and came to the same bits"
    near = [one for one in outcomes if one.difference is not None]
    if near:
        far = max(near, key=lambda one: one.difference.size if one.difference else 0.0)
        text += f", but for {len(near)} of them{_apart(far, wanted)}"
    if left:
        text += (
            f". To {left[0].name} (step {left[0].step}) no part leads: its content, or that of "
            "what the run went on from, is not named"
        )
        return ClaimAnswer(NAME, Said.NOT_SHOWN, text)
    return ClaimAnswer(NAME, Said.YES, text)


def _apart(outcome: Outcome, wanted: Repetition) -> str:
    found = outcome.difference
    if found is None:
        return ""
    return f": {found.where} differs by {found.size:.3g}, and {wanted.tolerance:g} was allowed"


def _finding(outcome: Outcome, records: Records, wanted: Repetition) -> Finding:
    part = outcome.stretch
    turns = [turn for turn in records.turns if part.overlaps(turn.interval)]
    return blame(
        Fault.REPLAY,
        f"{_words(part)} were executed again and came to the content "
        f"{str(outcome.content)[:12]}, and {part.end.name} has {str(part.end.content)[:12]}"
        f"{_apart(outcome, wanted)}: a rank did something else than it states, or the steps do "
        "not come to the same numbers on this machine",
        *turns,
    )


def _words(part: Stretch) -> str:
    return f"steps {part.first_step} to {part.end.step}"
