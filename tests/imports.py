from __future__ import annotations

import ast
from pathlib import Path
from types import ModuleType


def packages_imported_by(module: ModuleType) -> set[str]:
    """Returns the names of the packages that the module's source imports."""
    assert module.__file__ is not None
    found = set()
    for node in ast.walk(ast.parse(Path(module.__file__).read_text())):
        if isinstance(node, ast.ImportFrom):
            found.add((node.module or "").split(".")[0])
        elif isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
    return found
