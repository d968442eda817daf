"""The bindings use only Python's stable ABI, so that one wheel serves Python 3.12 and later.

A build for Python 3.11 would not notice another name, because its module does not use the stable
ABI.
"""

from __future__ import annotations

import re
import subprocess
import sysconfig
from pathlib import Path

BINDINGS = Path(__file__).parents[2] / "native" / "bindings"


def _declared() -> set[str]:
    """Returns every name that Python's headers declare to a module of the stable ABI."""
    headers = sysconfig.get_paths()["include"]
    seen = subprocess.run(
        ["g++", "-E", "-dD", "-DPy_LIMITED_API=0x030C0000", f"-I{headers}", "-x", "c++", "-"],
        input="#include <Python.h>\n",
        capture_output=True,
        text=True,
        check=True,
    )
    return set(re.findall(r"\b_?Py\w+", seen.stdout))


def _used() -> dict[str, str]:
    names: dict[str, str] = {}
    for file in sorted(BINDINGS.glob("*.[ch]pp")):
        code = re.sub(r"//[^\n]*", "", file.read_text())
        names |= dict.fromkeys(re.findall(r"\b_?Py[A-Z_]\w+", code), file.name)
    return names


def test_the_headers_tell_the_stable_abi_from_the_rest() -> None:
    declared = _declared()
    assert "PyByteArray_AsString" in declared
    assert "PyByteArray_AS_STRING" not in declared


def test_the_bindings_use_the_stable_abi_alone() -> None:
    used, declared = _used(), _declared()
    assert len(used) > 10
    assert {name: file for name, file in used.items() if name not in declared} == {}
