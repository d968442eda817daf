"""Prints how large the project is.

    python tools/house.py [--json]

Code lines are the lines of src/ without comments, docstrings, blank lines and imports. Private
names are names with a leading underscore that a test takes from other code. tests/test_house.py
limits all counts except code lines and files.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from typer.main import get_command

ROOT: Final = Path(__file__).resolve().parent.parent
SRC: Final = ROOT / "src" / "sealring"
LAYOUT_TOKENS: Final = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
    tokenize.ENDMARKER,
}  # fmt: skip


def code_lines(source: str) -> int:
    left_out: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if (text and isinstance(node.value.value, str)) or isinstance(  # type: ignore[attr-defined]
            node, ast.Import | ast.ImportFrom
        ):
            left_out.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))  # type: ignore[attr-defined]
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in LAYOUT_TOKENS:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - left_out)


def commands(command: Any) -> Iterator[Any]:
    for each in getattr(command, "commands", {}).values():
        yield from commands(each)
    if not hasattr(command, "commands") or command.invoke_without_command:
        yield command


def private_names() -> set[str]:
    found: set[str] = set()
    for path in (ROOT / "tests").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute):
                own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
                names = [] if own else [node.attr]
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sealring"):
                names = [each.name for each in node.names]
            else:
                continue
            found.update(name for name in names if re.match(r"_(?!_)", name))
    return found - {"_native", "_stand_ins"}


def counts() -> dict[str, int]:
    from sealring.cli import app

    top = get_command(app)
    sources = {path: path.read_text() for path in SRC.rglob("*.py")}
    every = list(commands(top))
    variables = {
        name for text in sources.values() for name in re.findall(r'"(SEALRING_[A-Z_]+)"', text)
    }
    errors = ast.parse(sources[SRC / "errors.py"])
    return {
        "code lines": sum(map(code_lines, sources.values())),
        "files": len(sources),
        "packages": sum(path.is_dir() and path.name != "__pycache__" for path in SRC.iterdir()),
        "verbs": len(top.commands),  # type: ignore[attr-defined]
        "commands": len(every),
        "options": sum(len(command.params) for command in every),
        "variables": len(variables),
        "errors": sum(isinstance(node, ast.ClassDef) for node in errors.body),
        "private names in tests": len(private_names()),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    found = counts()
    if given.json:
        print(json.dumps(found))
    else:
        for name, number in found.items():
            print(f"{name:24} {number:7,}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
