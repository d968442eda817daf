"""Which parts are repeated, and what their outcomes are answered with.

`test_whole_way.py` repeats a real part; here the outcomes are given.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sealring.audit import spot_checks
from sealring.audit.audit import Question, audit
from sealring.audit.findings import Fault
from sealring.audit.result import AuditResult, Said, Status
from sealring.audit.spot_checks import Repetition
from sealring.provenance.replay import Outcome, Stretch, Verdict
from tests.audit.folder_lies import changed_entry, witnessed
from tests.audit.made_runs import MadeRun


def ask(
    made: MadeRun, path: Path, verdict: Verdict, monkeypatch: pytest.MonkeyPatch, count: int = 2
) -> tuple[AuditResult, list[Stretch]]:
    repeated: list[Stretch] = []

    def outcome(part: Stretch, *rest: Any, **options: Any) -> Outcome:
        repeated.append(part)
        return Outcome(part, verdict, "ab" * 32, None, "Traceback\nValueError: no vault\n")

    monkeypatch.setattr(spot_checks, "replay", outcome)
    return audit(path, made.trust, Question(replay=Repetition(count))), repeated


@pytest.mark.parametrize(
    ("verdict", "said", "status"),
    [
        ("equal", Said.YES, Status.SHOWN),
        ("failed", Said.NOT_SHOWN, Status.NOT_SHOWN),
        ("different", Said.NO, Status.REFUTED),
    ],
)
def test_outcomes(
    verdict: Verdict, said: Said, status: Status, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = MadeRun(world=2, count=3)
    result, repeated = ask(made, made.write(tmp_path / "run").path, verdict, monkeypatch)
    (answer,) = result.answers
    assert (answer.claim, answer.said, result.status) == ("replay", said, status)
    assert len(repeated) == 2
    if verdict == "failed":
        assert "no vault" in answer.text
    if verdict == "different":
        first = next(one for one in result.findings if one.fault is Fault.REPLAY)
        turn = repeated[0].first_step // 10
        assert first.parties == ("rank 0", "rank 1")
        assert set(first.records) == {made.digests[0, turn], made.digests[1, turn]}


def test_the_witnesses_cosignatures_choose_the_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = MadeRun(world=2, count=12)
    run = made.write(tmp_path / "run")
    trust = witnessed(made, run)
    chosen = []
    for _ in range(2):
        repeated: list[int] = []
        monkeypatch.setattr(
            spot_checks, "replay",
            lambda part, *rest, into=repeated, **options: (
                into.append(part.first_step) or Outcome(part, "equal", None, None, "")
            ),
        )  # fmt: skip
        audit(run.path, trust, Question(replay=Repetition(3)))
        chosen.append(repeated)
    assert chosen[0] == chosen[1]
    assert len(set(chosen[0])) == 3


def test_without_a_believed_log_nothing_is_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = MadeRun(world=2, count=2)
    run = made.write(tmp_path / "run")
    changed_entry(made, run)
    result, repeated = ask(made, run.path, "equal", monkeypatch)
    assert (result.answers[0].said, repeated) == (Said.NOT_SHOWN, [])
