"""Recorded runs of the demo: honest runs pass the audit, and the rank that lies is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from sealring.lab.demo.train import AuditedRun, perform_recorded, surprises
from sealring.record.audit.page import Beside


@pytest.mark.timeout(300)  # three worlds of workers, one after the other
def test_honest_runs_pass_and_the_liar_is_named(tmp_path: Path) -> None:
    costs = Beside("What it costs", ("backend", "step"), [("<plain>", "3 ms")])
    audited = [one for one in perform_recorded(2, tmp_path, costs) if isinstance(one, AuditedRun)]
    assert surprises(audited) == []
    assert [(one.name, one.ranks, one.status) for one in audited] == [
        ("honest", 2, 0), ("resumed", 2, 0), ("lying", 3, 1),
    ]  # fmt: skip
    for one in audited:
        page = one.page.read_text()
        assert page.startswith("<!")
        assert "<h2>The run</h2>" in page
        assert "The audit has not checked this table." in page
        assert "<td>&lt;plain&gt;</td><td>3 ms</td>" in page
    assert not list(tmp_path.glob("**/corpus"))  # the text is nowhere in plaintext


def test_audits_that_say_something_else_are_told() -> None:
    page = Path("page.html")
    blamed = AuditedRun("honest", 2, 1, ["rank 0: x"], page)
    unseen = AuditedRun("lying", 2, 0, [], page)
    wrong = AuditedRun("lying", 2, 1, ["rank 0: x"], page)
    assert len(surprises([blamed])) == len(surprises([unseen])) == len(surprises([wrong])) == 1
