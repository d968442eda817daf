"""torchft with a sealed group: a replica group that dies, and what sealed-only mode refuses."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
from pathlib import Path

import pytest

from tests.examples.test_commands import printed_by
from tests.integrations.frameworks import SCRIPTS, output_of
from tests.integrations.test_frameworks import skip_without


@pytest.fixture(autouse=True)
def installed() -> None:
    skip_without("torchft")


@pytest.mark.timeout(300)
def test_a_replica_group_that_died_returns_with_the_others_state(tmp_path: Path) -> None:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("SEALRING_")}
    environ = {
        **clean, "OMP_NUM_THREADS": "1", "SEALRING_ONLY": "1",
        "SEALRING_SECRET": secrets.token_hex(32),
    }  # fmt: skip
    command = [sys.executable, str(SCRIPTS / "replicas.py"), "--kill-at", "2"]
    # The script compares the weights of both replica groups bit by bit.
    printed = output_of(command, environ, str(tmp_path))
    found = json.loads(printed.splitlines()[-1].removeprefix("RESULT "))
    alone = json.loads(printed_by(sys.executable, "examples/gpt.py", "--steps", "4", "--json"))
    assert found["groups"] == ["SealedProcessGroup"]
    assert found["losses"] == pytest.approx(alone["losses"], rel=1e-5)


@pytest.mark.parametrize(
    ("module", "made"),
    [
        ("torchft", "ProcessGroupGloo()"),
        ("torchft", "ProcessGroupBabyNCCL()"),
        ("torchft.checkpointing", "HTTPTransport(timedelta(seconds=1), 0)"),
    ],
)
def test_what_moves_plaintext_is_refused_in_a_sealed_job(module: str, made: str) -> None:
    name = made.partition("(")[0]
    code = (
        "from datetime import timedelta\n"
        "import sealring; sealring.require_sealed()\n"
        f"from {module} import {name}\n"
        f"{made}\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    last = done.stderr.splitlines()[-1]
    assert last.startswith("sealring.errors.PlaintextGroup: <string>:4 uses torchft's " + name)
    assert "sealed_manager" in last


def test_without_a_sealed_job_nothing_of_torchft_is_changed() -> None:
    code = "import sealring, torchft; print(torchft.ProcessGroupGloo())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("ProcessGroupGloo(")
