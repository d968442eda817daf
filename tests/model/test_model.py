"""The models of set-up and of the broker hold; the document has the same table of checks."""

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
    alone = {row.checks[0] for row in REMOVALS if row.model is model and len(row.checks) == 1}
    assert alone == checks_in(model)


def test_the_document_has_a_row_for_every_removal() -> None:
    for row in REMOVALS:
        name = " + ".join(f"`{check}`" for check in row.checks)
        lines = [line for line in DOCUMENT.splitlines() if line.startswith(f"| {name} |")]
        assert lines, f"docs/model.md has no row for {name}"
        found = [line.split("|")[3] for line in lines]
        assert any(row.flaw in cell for cell in found), (name, row.flaw, found)


def test_files_that_the_document_names_exist() -> None:
    named = re.findall(r"`([\w/]+/\w+\.(?:py|maude))`", DOCUMENT)
    assert len(named) > 40
    for path in named:
        assert (ROOT / path).exists() or (ROOT / "src" / "sealring" / path).exists(), path
