"""Parts of the run are executed again: what records state becomes what was checked."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from sealring.audit.findings import Fault, Finding
from sealring.audit.records import Records, Turn
from sealring.audit.result import Answer, LogSeen, Said
from sealring.audit.trust import AuditTrust
from sealring.provenance.replay import Outcome, Stretch, draw, replay, seed_of, stretches
from sealring.provenance.runs import RunFolder

NAME = "replay"


@dataclass(frozen=True, slots=True)
class Repetition:
    """What an auditor wants repeated."""

    count: int
    arguments: Sequence[str] = ()
    """Of the script: they name a copy of the vault."""
    timeout: float = 600.0
    """Seconds, for each part."""


def spot_check(
    wanted: Repetition, records: Records, run: RunFolder, log: LogSeen | None, trust: AuditTrust,
    stage: Callable[[str], None],
) -> tuple[Answer, list[Finding]]:  # fmt: skip
    """Draws parts by the witnesses' cosignatures, and executes each of them again."""
    if log is None:
        text = "the log is not believed, so that nothing says which parts to repeat"
        return Answer(NAME, Said.NOT_SHOWN, text), []
    parts = stretches(turn.interval for turn in _saving_chain(records))
    drawn = draw(parts, wanted.count, seed_of(log.signed))
    if not drawn:
        text = "no checkpoint of the run names its content, so that no part can be compared"
        return Answer(NAME, Said.NOT_SHOWN, text), []
    outcomes = []
    with tempfile.TemporaryDirectory(prefix="sealring-replay-") as folder:
        for number, part in enumerate(drawn):
            stage(f"by repeating {_words(part)} ({number + 1} of {len(drawn)})")
            work = Path(folder) / str(number)
            outcomes.append(
                replay(
                    part, run, trust.authorities, work, arguments=wanted.arguments,
                    timeout=wanted.timeout,
                )
            )  # fmt: skip
    return _answer(outcomes, len(parts)), [
        _finding(outcome, records) for outcome in outcomes if outcome.verdict == "different"
    ]


def _saving_chain(records: Records) -> list[Turn]:
    """Of the rank that completes the checkpoints' manifests."""
    return max(
        records.chains.values(),
        key=lambda chain: sum(len(turn.interval.checkpoints_out) for turn in chain),
        default=[],
    )


def _answer(outcomes: Sequence[Outcome], parts: int) -> Answer:
    wrong = [one for one in outcomes if one.verdict == "different"]
    if wrong:
        text = f"{_words(wrong[0].stretch)} do not lead to {wrong[0].stretch.end.name}"
        return Answer(NAME, Said.NO, text)
    failed = [one for one in outcomes if one.verdict == "failed"]
    if failed:
        last = failed[0].said.strip().splitlines()[-1:] or ["it said nothing"]
        text = f"{_words(failed[0].stretch)} could not be repeated: {last[0][-300:]}"
        return Answer(NAME, Said.NOT_SHOWN, text)
    text = f"{len(outcomes)} of {parts} parts were executed again and came to the same bits"
    return Answer(NAME, Said.YES, text)


def _finding(outcome: Outcome, records: Records) -> Finding:
    part = outcome.stretch
    turns = [
        turn
        for turn in records.turns
        if turn.interval.first_step < part.end.step and turn.interval.end_step > part.first_step
    ]
    return Finding(
        Fault.REPLAY, tuple(dict.fromkeys(turn.party for turn in turns)),
        f"{_words(part)} were executed again and came to the content "
        f"{str(outcome.content)[:12]}, and {part.end.name} has {str(part.end.content)[:12]}: a "
        "rank did something else than it states",
        tuple(turn.digest for turn in turns),
    )  # fmt: skip


def _words(part: Stretch) -> str:
    return f"steps {part.first_step} to {part.end.step}"
