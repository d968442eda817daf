"""Tests, settings, errors and commands in the documents exist in the code."""

from __future__ import annotations

import ast
import re
import tomllib
from functools import cache
from pathlib import Path

import pytest
from tools import errors_page, settings_page, threats

from sealring import errors
from sealring.core import settings

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
BUILD_OPTIONS = set(re.findall(r"\bSEALRING_[A-Z_]+\b", (ROOT / "CMakeLists.txt").read_text()))
TEST = re.compile(r"`((?:native/)?tests/[\w/]+\.(?:py|cpp))::(\w+)`")

CLAIMS = (ROOT / "docs" / "claims.md").read_text()

each_document = pytest.mark.parametrize("path", DOCUMENTS, ids=[path.name for path in DOCUMENTS])


@cache
def named_in(file: str) -> frozenset[str]:
    """Returns the names of a file's tests, without running them."""
    path = ROOT / file
    if not path.exists():
        return frozenset()
    source = path.read_text()
    if path.suffix == ".cpp":
        return frozenset(re.findall(r"^TEST\((\w+)\)", source, re.MULTILINE))
    functions = (node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef))
    return frozenset(node.name for node in functions if node.name.startswith("test_"))


def rows(document: str) -> list[list[str]]:
    """Returns the cells of every table row, without the heads."""
    lines = document.splitlines()
    return [
        [cell.strip() for cell in line.strip().strip("|").split("|")]
        for line, following in zip(lines, [*lines[1:], ""], strict=True)
        if line.startswith("|") and not line.startswith("|--") and not following.startswith("|--")
    ]


def between(document: str, start: str, end: str) -> str:
    return document[document.index(start) : document.index(end)]


@each_document
def test_every_test_that_a_document_names_exists(path: Path) -> None:
    missing = [
        f"{file}::{name}"
        for file, name in TEST.findall(path.read_text())
        if name not in named_in(file)
    ]
    assert not missing


def test_every_row_of_the_threat_model_has_a_test_that_bears_its_mark() -> None:
    listed = threats.ROW.findall(threats.PAGE.read_text())
    assert len(listed) > 250
    assert len(listed) == len(set(listed))
    marked = threats.tests_by_row()
    assert set(listed) == marked.keys(), "rows without a test, or marks without a row"


def test_rows_that_the_claims_name_are_in_the_threat_model() -> None:
    named = re.findall(
        r"\b[A-Z]\d{1,2}\b", between(CLAIMS, "## What is promised", "## What is not")
    )
    assert len(named) > 10
    assert set(named) <= set(threats.ROW.findall(threats.PAGE.read_text()))


def test_the_site_names_the_tests_of_each_row() -> None:
    page = threats.with_tests(threats.PAGE.read_text())
    heads = [line for line in page.splitlines() if line.startswith("| | attack |")]
    assert set(heads) == {"| | attack | what happens | shown by |"}
    (row,) = [line for line in page.splitlines() if line.startswith("| W1 |")]
    assert "`tests/core/engine/test_attacks.py::test_nothing_of_the_tensor_is_seen`" in row


@each_document
def test_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)#][^)]*)\)", path.read_text()):
        if not target.startswith("https://"):
            assert (path.parent / target.partition("#")[0]).exists(), target


@each_document
def test_no_path_of_one_machine(path: Path) -> None:
    text = path.read_text()
    assert not re.findall(r"(?<![\w.])/(?:home|root|work|tmp|mnt|Users|opt|var|data)\b", text)
    assert not re.findall(r"\b[A-Z]:\\", text)


@pytest.mark.parametrize(
    "path", sorted((ROOT / "docs" / "results").iterdir()), ids=lambda p: p.name
)
def test_no_path_of_the_machine_that_was_measured(path: Path) -> None:
    test_no_path_of_one_machine(path)


def test_every_setting_is_documented_and_no_other() -> None:
    sources = [path.read_text() for path in (ROOT / "src").rglob("*.py")]
    known = set(re.findall(r"\bSEALRING_[A-Z_]+\b", "\n".join(sources)))
    page = (ROOT / "docs" / "configuration.md").read_text()
    assert set(re.findall(r"\bSEALRING_[A-Z_]+\b", page)) == known


def test_no_document_names_a_setting_that_does_not_exist() -> None:
    page = (ROOT / "docs" / "configuration.md").read_text()
    known = set(re.findall(r"\bSEALRING_[A-Z_]+\b", page)) | BUILD_OPTIONS
    for path in DOCUMENTS:
        if path.name != "CHANGELOG.md":  # the changelog names removed settings
            assert set(re.findall(r"\bSEALRING_[A-Z_]+\b", path.read_text())) <= known, path.name


def test_the_page_on_installing_lists_every_extra() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    page = between((ROOT / "docs" / "install.md").read_text(), "| extra |", "There are two wheels")
    listed = {name for row in rows(page) for name in re.findall(r"`([\w-]+)`", row[0])}
    assert listed == project["optional-dependencies"].keys()


def test_the_readme_is_read_to_the_end() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 130


def test_the_tables_of_settings_are_written_from_the_module() -> None:
    assert settings_page.PAGE.read_text() == settings_page.page(), (
        "tools/settings_page.py writes them"
    )
    assert settings_page.meanings().keys() == settings.TABLE.keys()


def test_the_page_of_errors_is_written_from_the_module() -> None:
    assert errors_page.PAGE.read_text() == errors_page.page(), "tools/errors_page.py writes it"


def test_every_code_is_of_one_error_and_every_raised_one_is_known() -> None:
    known = [each.code for each in errors.every_class()]
    for each in errors.every_class():
        known += each.codes
    assert len(known) == len(set(known))
    sources = "\n".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))
    raised = set(re.findall(r'\bcode="([a-z]+\.[a-z_.]+)"', sources))
    assert raised <= set(known)
    assert len(raised) > 5


def test_the_table_of_algorithms_is_the_shipped_one() -> None:
    from sealring.cli.bench.tables import as_markdown
    from sealring.core.schedule.table import shipped_table

    document = (ROOT / "docs" / "algorithms.md").read_text()
    shown = between(document, "--show -->\n", "\n<!-- end of table").partition("\n")[2]
    assert shown == as_markdown(shipped_table()), "`sealring.lab.bench algorithms --show` prints it"


WORKFLOWS = sorted((ROOT / ".github" / "workflows").iterdir())


@pytest.mark.parametrize("path", WORKFLOWS, ids=[path.name for path in WORKFLOWS])
def test_workflows_call_make_targets(path: Path) -> None:
    called = re.findall(r"\bmake ([a-z-]+(?: [a-z-]+)*)", path.read_text())
    assert called
    assert {target for one in called for target in one.split()} <= targets()


def targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


@each_document
def test_make_targets_are_in_the_makefile(path: Path) -> None:
    assert set(re.findall(r"(?:^|`)make ([a-z-]+)", path.read_text(), re.MULTILINE)) <= targets()


def test_files_that_the_page_on_extending_names_exist() -> None:
    page = (ROOT / "docs" / "extending.md").read_text()
    native = {path.name for path in [*(ROOT / "native").rglob("*"), *(ROOT / "src").rglob("*.hpp")]}
    named = re.findall(r"`((?:src|tests)/[\w/.]+)`", page)
    assert len(named) > 30
    assert not [name for name in named if not (ROOT / name).exists()]
    assert set(re.findall(r"`(\w+\.[ch]pp)`", page)) <= native
