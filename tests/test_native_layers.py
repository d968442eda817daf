"""Native folders include only what the table of native/README.md allows, without a cycle."""

from __future__ import annotations

import re
from pathlib import Path

NATIVE = Path(__file__).parent.parent / "native"
INCLUDE = re.compile(r'^#include "([^"]+)"', re.MULTILINE)
ROW = re.compile(r"^\| `([\w/]+)/` \|[^|]*\| ([^|]*) \|$", re.MULTILINE)
FROM_THE_PACKAGE = {"chacha20_poly1305.hpp"}
"""The GPU's own source (src/sealring/core/engine/cuda), which one stand-in compiles for the CPU."""


def allowed() -> dict[str, set[str]]:
    """Returns the table: each folder, and the folders that it may include."""
    rows = ROW.findall((NATIVE / "README.md").read_text())
    return {folder: set(re.findall(r"`([\w/]+)/`", may)) for folder, may in rows}


def includes() -> list[tuple[Path, str]]:
    """Returns each file with a path that it includes, except in tests and fuzz targets."""
    return [
        (path.relative_to(NATIVE), included)
        for path in sorted(NATIVE.rglob("*.[ch]pp"))
        if path.relative_to(NATIVE).parts[0] not in ("tests", "fuzz")
        for included in INCLUDE.findall(path.read_text())
        if included not in FROM_THE_PACKAGE
    ]


def test_every_include_names_an_existing_file_by_its_folder() -> None:
    missing = [(str(path), name) for path, name in includes() if not (NATIVE / name).is_file()]
    assert includes()
    assert missing == []


def test_no_folder_includes_one_that_the_table_does_not_allow() -> None:
    table = allowed()
    assert set(table) == {str(path.parent) for path, _ in includes()}
    wrong = [
        (str(path), included)
        for path, included in includes()
        if (other := str(Path(included).parent)) != str(path.parent)
        and other not in table[str(path.parent)]
    ]
    assert wrong == []


def test_the_table_and_the_headers_have_no_cycle() -> None:
    headers: dict[str, set[str]] = {}
    for path, included in includes():
        headers.setdefault(str(path), set()).add(included)
    for graph in (allowed(), headers):
        ordered: set[str] = set()
        left = {node for others in graph.values() for node in others} | set(graph)
        while left:
            ready = {node for node in left if graph.get(node, set()) <= ordered}
            assert ready, f"a cycle among {sorted(left)}"
            ordered |= ready
            left -= ready


def test_what_is_shipped_includes_no_stand_in() -> None:
    users = {str(path) for path, included in includes() if included.startswith("stand_ins/")}
    assert {each for each in users if not each.startswith("stand_ins/")} == {
        "bindings/stand_ins.cpp"
    }
