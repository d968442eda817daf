"""Writes the tables of settings in docs/configuration.md from src/sealring/core/settings.py.

python tools/settings_page.py
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Final

from sealring.core import settings

PAGE: Final = Path(__file__).resolve().parent.parent / "docs" / "configuration.md"
TABLE: Final = re.compile(r"<!-- (.*), written by tools/settings_page.py -->\n(\|.*\n)*")


def meanings() -> dict[str, str]:
    """Maps each setting's name to the string below its row."""
    found = {}
    for row, below in pairwise(ast.parse(inspect.getsource(settings)).body):
        if not isinstance(row, ast.Assign | ast.AnnAssign):
            continue
        target = row.target if isinstance(row, ast.AnnAssign) else row.targets[0]
        known = getattr(settings, target.id, None) if isinstance(target, ast.Name) else None
        if isinstance(known, settings.Setting) and isinstance(below, ast.Expr):
            found[known.name] = " ".join(ast.literal_eval(below.value).split())
    return found


def table(chapter: str) -> Iterator[str]:
    rows = [row for row in settings.TABLE.values() if row.chapter == chapter]
    members = not rows[0].is_variable
    yield f"<!-- {chapter}, written by tools/settings_page.py -->"
    yield "| setting | value | the same on all ranks |" if members else "| variable | value |"
    yield "|---|---|---|" if members else "|---|---|"
    said = meanings()
    for row in rows:
        alike = f" {'yes' if row.alike else 'no'} |" if members else ""
        yield f"| `{row.name}` | {said[row.name]} |{alike}"


def page() -> str:
    return TABLE.sub(lambda found: "\n".join([*table(found[1]), ""]), PAGE.read_text())


if __name__ == "__main__":
    PAGE.write_text(page())
