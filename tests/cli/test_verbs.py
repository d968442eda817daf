"""A command imports only what it needs: no other command, and torch only to compute."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from sealring.cli.verbs import VERBS

_MODULES = "import json, sys; {}; print(json.dumps(sorted(sys.modules)))"


def modules_after(statements: str) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-c", _MODULES.format(statements)],
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    )
    return set(json.loads(done.stdout))


def test_no_verb_imports_torch_before_it_is_called() -> None:
    imports = "; ".join(f"import sealring.cli.{verb}" for verb in VERBS)
    loaded = modules_after(imports)
    assert {f"sealring.cli.{verb}" for verb in VERBS} <= loaded
    assert not {"torch", "pyarrow", "fsspec"} & loaded


@pytest.mark.parametrize("verb", ["audit", "top"])
def test_a_command_imports_no_other_verb(verb: str) -> None:
    loaded = modules_after(
        "import typer, sealring.cli; "
        f"typer.main.get_command(sealring.cli.app).commands[{verb!r}].get_short_help_str()"
    )
    assert {name for name in VERBS if f"sealring.cli.{name}" in loaded} == {verb}
