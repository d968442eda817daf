"""Finds which tests show which row of docs/threat-model.md, by the marks of the tests.

A Python test has `@pytest.mark.threat("W1")`, a C++ test has a line `// threat: W1` above it.
docs/conf.py adds the tests to the page when the site is built.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
PAGE: Final = ROOT / "docs" / "threat-model.md"
ROW: Final = re.compile(r"^\| ([A-Z]\d+) \|.*$", re.MULTILINE)
HEAD: Final = "| | attack | what happens |\n|---|---|---|"
NATIVE: Final = re.compile(r"^// threat: ([\w, ]+)\nTEST\((\w+)\)", re.MULTILINE)


def tests_by_row() -> dict[str, list[str]]:
    """Each row that a mark names, with the tests that have the mark."""
    found: dict[str, list[str]] = defaultdict(list)
    for path in sorted((ROOT / "tests").rglob("*.py")):
        source = path.read_text()
        if "mark.threat(" in source:
            for row, test in _marks_in(ast.parse(source)):
                found[row].append(f"{path.relative_to(ROOT)}::{test}")
    for path in sorted((ROOT / "native" / "tests").glob("*.cpp")):
        for rows, test in NATIVE.findall(path.read_text()):
            for row in rows.split(", "):
                found[row].append(f"{path.relative_to(ROOT)}::{test}")
    return found


def _marks_in(module: ast.Module) -> Iterator[tuple[str, str]]:
    for test in module.body:
        for mark in getattr(test, "decorator_list", ()):
            if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.threat":
                assert isinstance(test, ast.FunctionDef)
                for row in mark.args:
                    yield ast.literal_eval(row), test.name


def with_tests(page: str) -> str:
    """Returns the page with another column, which names the tests of each row."""
    tests = tests_by_row()
    page = page.replace(HEAD, "| | attack | what happens | shown by |\n|---|---|---|---|")
    return ROW.sub(
        lambda row: f"{row[0]} {', '.join(f'`{test}`' for test in tests[row[1]])} |", page
    )
