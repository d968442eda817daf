"""Nothing that is stored, signed or compared may depend on the CPU.

Other tests check the values where they are made, for instance tests/vault/datasets/test_fields.py.
These tests keep out numpy's default types, and casts whose result differs between CPUs.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path
from typing import Final

import numpy as np
import pytest

from tests.workers import Workers

ROOT: Final = Path(__file__).parents[1]
# How many arguments come before the type; without a type numpy chooses one by the values.
MAKERS: Final = {
    "array": 1, "asarray": 1, "empty": 1, "zeros": 1, "ones": 1,
    "full": 2, "fromiter": 1, "frombuffer": 1, "fromfile": 1, "arange": 3, "linspace": 5,
}  # fmt: skip
# These functions keep the type of the array that they get.
KEEPERS: Final = {"src/sealring/vault/datasets/fields.py": {"asarray"}}


def untyped_arrays(path: Path) -> list[str]:
    name = str(path.relative_to(ROOT))
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        module, maker = node.func.value, node.func.attr
        if not isinstance(module, ast.Name) or module.id not in ("np", "numpy"):
            continue
        if maker not in MAKERS or maker in KEEPERS.get(name, ()):
            continue
        typed = len(node.args) > MAKERS[maker] or any(one.arg == "dtype" for one in node.keywords)
        if not typed:
            found.append(f"{name}:{node.lineno} np.{maker}")
    return found


def test_every_array_names_its_type() -> None:
    files = sorted((ROOT / "src").rglob("*.py"))
    assert len(files) > 100
    assert [one for path in files for one in untyped_arrays(path)] == []


def cast_out_of_range(*_: object) -> int:
    return int(np.array([2.0**70]).astype(np.int64)[0])


def test_a_cast_out_of_range_is_an_error_here() -> None:
    with pytest.raises(RuntimeWarning, match="invalid value encountered in cast"):
        cast_out_of_range()


def test_a_cast_out_of_range_is_an_error_in_a_worker(workers: Workers) -> None:
    for error in workers.run(cast_out_of_range, world=2, group=False, errors=True):
        assert isinstance(error, RuntimeWarning)
        assert "invalid value encountered in cast" in str(error)


def test_a_cast_out_of_range_is_an_error_in_a_program_that_a_test_starts() -> None:
    script = "import tests.test_every_cpu as here; here.cast_out_of_range()"
    ended = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, env=dict(os.environ), capture_output=True,
        text=True,
    )  # fmt: skip
    assert ended.returncode == 1
    assert "RuntimeWarning: invalid value encountered in cast" in ended.stderr.splitlines()[-1]
