"""Modules import what docs/architecture.md and the contracts in pyproject.toml allow."""

from __future__ import annotations

import os
import re
import secrets
import subprocess
import sys
import tomllib
from collections import defaultdict
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "architecture.md").read_text().partition("## How a call")[0]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
LAYERS = [one["layers"] for one in PROJECT["contracts"] if one["type"] == "layers"]
ALL_MAY_IMPORT = {"errors", "limits", "version"}


@cache
def imports() -> dict[str, set[str]]:
    """Returns the imports by module; `sealring` stands for the unreadable native module."""
    graph = grimp.build_graph("sealring", cache_dir=None)
    return {
        module: graph.find_modules_directly_imported_by(module) - {"sealring"}
        for module in graph.modules
        if module != "sealring"
    }


def test_no_module_imports_itself_through_others() -> None:
    (siblings,) = (one for one in PROJECT["contracts"] if one["type"] == "acyclic_siblings")
    known = {tuple(one.split(" -> ")) for one in siblings["ignore_imports"]}
    graph = {
        module: {one for one in imported if (module, one) not in known}
        for module, imported in imports().items()
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as found:
        pytest.fail(" -> ".join(found.args[1]))


def test_the_table_of_rooms_says_what_the_code_imports() -> None:
    real: dict[str, set[str]] = defaultdict(set)
    for module, imported in imports().items():
        if module == "sealring.lab.__main__":  # never imported, and its options are the CLI's
            continue
        room = module.split(".")[1]
        real[room] |= {one.split(".")[1] for one in imported} - {room} - ALL_MAY_IMPORT
    rooms = PAGE.partition("### Inside the core")[0]
    rows = re.findall(r"^\| `(\w+)/` \| .* \| ([\w, ]*?) ?\|$", rooms, re.MULTILINE)
    table = {room: set(cell.split(", ")) - {""} for room, cell in rows}
    assert table == {name: found for name, found in real.items() if name not in ALL_MAY_IMPORT}


def test_the_layers_of_the_page_are_those_of_the_contracts() -> None:
    for layers in LAYERS:
        assert "```\n" + "\n".join(layers) + "\n```" in PAGE


def test_from_the_package_itself_only_the_native_module_is_imported() -> None:
    # The contracts ignore imports of `sealring`, so only the native module may use that name.
    modules = {path.stem for path in (ROOT / "src" / "sealring").iterdir()}
    for path in (ROOT / "src" / "sealring").rglob("*.py"):
        text = path.read_text()
        for names in re.findall(r"^\s*from sealring import \(?([^)\n]*)", text, re.MULTILINE):
            assert set(names.split(", ")) <= modules | {"_native"}, path
        assert not re.search(r"^\s*import sealring$", text, re.MULTILINE), path


def test_import_torch_loads_only_the_registration_and_the_guard() -> None:
    code = (
        "import sys, torch; print(sorted(m for m in sys.modules if m.split('.')[0] == 'sealring'))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    guard = [f".sealed_only{name}" for name in ("", ".groups", ".setting")]
    core = [f".core{name}" for name in ("", ".devices", ".registration", *guard)]
    names = ["", *core, ".errors", ".version"]
    assert done.stdout.strip() == str([f"sealring{name}" for name in names])


FIRST_GROUP = """
import sys, torch, torch.distributed as dist

before = set(sys.modules)
dist.init_process_group("sealring", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
print(*set(sys.modules) - before)
dist.destroy_process_group()
"""
MOST_OF_THE_CORE = 110
"""The most modules of the core: each one adds a millisecond or two to a rank's first group."""
BESIDE_PYTHONS_OWN = {"OpenSSL", "_cffi_backend", "_openssl", "cryptography", "sealring"}
OF_THE_LIVE_VIEW = {"", ".directory", ".metrics", ".process", ".server"}


def test_a_first_group_loads_the_core_and_of_the_satellites_the_live_view_alone(
    tmp_path: Path,
) -> None:
    environ = {
        **{name: value for name, value in os.environ.items() if not name.startswith("SEALRING_")},
        "SEALRING_SECRET": secrets.token_hex(32),
        "SEALRING_LIVE": str(tmp_path / "live"),
    }
    done = subprocess.run(
        [sys.executable, "-c", FIRST_GROUP, str(tmp_path / "store")],
        env=environ, capture_output=True, text=True, check=True,
    )  # fmt: skip
    loaded = set(done.stdout.split())
    rooms = {name.split(".")[1] for name in loaded if name.startswith("sealring.")}
    assert rooms <= {"core", "formats", "limits", "observe", "_native"}
    observe = {name for name in loaded if name.startswith("sealring.observe")}
    assert observe == {f"sealring.observe{name}" for name in OF_THE_LIVE_VIEW}
    assert len([name for name in loaded if name.startswith("sealring.core.")]) <= MOST_OF_THE_CORE
    foreign = {name.split(".")[0] for name in loaded} - sys.stdlib_module_names
    # OpenTelemetry's API is loaded if somebody wants metrics.
    assert foreign - {"opentelemetry"} == BESIDE_PYTHONS_OWN
