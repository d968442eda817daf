"""The models of set-up and of the broker hold, and the table of removed checks is the documents'."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from model.check import check
from model.table import MODELS, REMOVALS, Model

ROOT = Path(__file__).parents[2]
DOCUMENT = (ROOT / "docs" / "model.md").read_text()


@pytest.mark.skipif(shutil.which("maude") is None, reason="maude is not installed")
def test_small_scenarios() -> None:
    """`make model` searches all of them."""
    found = check(quick=True)
    assert len(found) > 60
    assert not [str(each) for each in found if not each.as_expected]


def checks_in(model: Model) -> set[str]:
    """Every check that the model makes, and so can be removed."""
    text = (ROOT / "model" / model.file).read_text()
    text = re.sub(r"\*\*\*[^\n]*", "", text)
    named = re.findall(r"check\('([\w-]+)", text) + re.findall(r"'([\w-]+) off CS", text)
    return {*named, *re.findall(r"not-barred\(CS, '([\w-]+)", text)}


@pytest.mark.parametrize("model", MODELS, ids=[model.name for model in MODELS])
def test_every_check_of_a_model_is_removed_once(model: Model) -> None:
    removed = {row.checks[0] for row in REMOVALS if row.model is model and len(row.checks) == 1}
    together = {name for row in REMOVALS if row.model is model for name in row.checks}
    assert removed | together == checks_in(model)
    assert removed >= checks_in(model) - {"possession"} or "possession" in removed


def test_a_check_that_others_cover_for_is_removed_together_with_them_or_explained() -> None:
    for row in REMOVALS:
        if row.flaw == "none":
            [line] = [
                line for line in DOCUMENT.splitlines() if line.startswith(f"| `{row.checks[0]}` |")
            ]
            assert "none" in line, line


def test_the_document_has_a_row_for_every_removal() -> None:
    for row in REMOVALS:
        name = " + ".join(f"`{check}`" for check in row.checks)
        lines = [line for line in DOCUMENT.splitlines() if line.startswith(f"| {name} |")]
        assert lines, f"docs/model.md has no row for {name}"
        assert any(f"| {row.flaw}" in line or row.flaw in line for line in lines), (name, row.flaw)


def test_files_that_the_document_names_exist() -> None:
    for path in re.findall(r"`((?:src|native|model|tests)/[\w./-]+\.\w+)`", DOCUMENT):
        assert (ROOT / path).exists(), path
