"""How the documented errors depend on the case that gives turn_s, and on when ranks move."""

from __future__ import annotations

from pathlib import Path

import pytest

from sealring.lab.plan import fit, layouts
from sealring.lab.plan import validate as validating
from sealring.lab.plan.profiles import Way
from sealring.lab.results import CollectiveCase, Results, read_results

DOCS = Path(__file__).parents[3] / "docs"
FILES = ("xeon-2-cores", "neoverse-2-cores")


def documented(row: str) -> str:
    """Returns the one row of planning.md that begins with this text."""
    text = (DOCS / "planning.md").read_text()
    (line,) = [line for line in text.splitlines() if line.startswith(f"| {row}")]
    return line


def row_of_errors() -> str:
    """Returns both files' errors in the form of a row."""
    found = [validating.validate(read_results(DOCS / "results" / f"{name}.json")) for name in FILES]
    return " | ".join(f"{100 * (each.median_error('all_reduce') or 0):.1f} %" for each in found)


@pytest.mark.parametrize(
    ("row", "case"),
    [
        ("4 KiB, 3 ranks (as it is) ", (3, 4 << 10, "shm")),
        ("64 KiB, 4 ranks ", (4, 64 << 10, "shm")),
        ("1 MiB, 3 ranks, ", (3, 1 << 20, "shm")),
    ],
)
def test_a_turn_can_be_learnt_from_another_case(
    row: str, case: tuple[int, int, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = fit.turns_from

    def turns_from(results: Results, way: Way) -> list[CollectiveCase]:
        if way != "sealed":
            return usual(results, way)
        sealed = [each for each in results.allreduce if each.variant == "sealed"]
        return [each for each in sealed if (each.ranks, each.bytes, each.transport) == case]

    monkeypatch.setattr(fit, "turns_from", turns_from)
    monkeypatch.setattr(validating, "turns_from", turns_from)
    assert row_of_errors() in documented(row)


@pytest.mark.parametrize(
    ("row", "seconds"),
    [
        ("as it is, and ranks never move", 1e9),
        ("as it is, and ranks move at once", 0.0),
    ],
)
def test_ranks_move_after_a_while(
    row: str, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layouts, "MOVED_AFTER_S", seconds)
    assert row_of_errors() in documented(row)
