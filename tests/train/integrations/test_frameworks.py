"""Frameworks' scripts that name Gloo, or none, are sealed under `sealring run`, and bit-equal."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.train.integrations.frameworks import CASES, TOLERANCE, compare, version_of


def skip_without(framework: str) -> None:
    if version_of(framework) is None:
        pytest.skip(f"{framework} is not installed: make integrations installs it")


@pytest.mark.parametrize("name", CASES)
def test_a_framework_is_sealed_and_computes_the_same(name: str) -> None:
    skip_without(CASES[name].framework)
    found = compare(name)
    assert found.groups == ["SealedProcessGroup"]
    assert found.difference <= TOLERANCE


@pytest.mark.parametrize("builder", ["ShareMemCommBuilder", "CCLCommBuilder"])
@pytest.mark.threat("G3")
def test_operators_of_deepspeed_that_move_plaintext_are_refused(builder: str) -> None:
    skip_without("deepspeed")
    code = (
        "import sealring; sealring.require_sealed()\n"
        f"from deepspeed.ops.op_builder.cpu import {builder}; {builder}().load()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "PlaintextGroup: " in done.stderr.splitlines()[-1]
    assert "loads DeepSpeed's operator" in done.stderr.splitlines()[-1]
