"""Children of a sealed-only process are sealed-only, even if they lose its variable."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.core.sealed_only import children

SEALED = "SealedProcessGroup sealring, PlaintextGroup"


def run(*names: str) -> Any:
    environ = {**os.environ, "PYTHONPATH": "."}
    environ.pop("SEALRING_ONLY", None)
    done = subprocess.run(
        [sys.executable, children.__file__, *names], env=environ, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    (line,) = (each for each in done.stdout.splitlines() if each.startswith("GOT "))
    return json.loads(line.removeprefix("GOT "))


@pytest.mark.parametrize("name", children.WAYS)
@pytest.mark.threat("G8")
def test_a_child_that_lost_the_variable_runs_no_plaintext_group(name: str) -> None:
    assert run(name) == {name: SEALED}


@pytest.mark.threat("G8")
def test_a_child_of_a_server_that_loaded_torch_before_the_mode_was_on() -> None:
    name = "a server that had loaded torch"
    assert run(name) == {name: SEALED}


SERVER = """
import os, sys
import torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
print("READY", flush=True)
sys.stdin.readline()
if os.fork() == 0:
    try:
        dist.ProcessGroupGloo(dist.HashStore(), 0, 1)
    except Exception as error:
        print(type(error).__name__, flush=True)
    os._exit(0)
os.wait()
"""
PARENT = f"""
import subprocess, sys
pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
server = subprocess.Popen([sys.executable, "-c", {SERVER!r}], **pipes)
assert server.stdout.readline() == "READY\\n"
import sealring
sealring.require_sealed()
print("GOT", server.communicate("go on")[0])
"""


@pytest.mark.threat("G8")
def test_a_child_of_a_server_that_had_a_plaintext_group_before_the_mode_was_on() -> None:
    done = subprocess.run([sys.executable, "-c", PARENT], capture_output=True, text=True)
    assert done.stdout.strip() == "GOT PlaintextGroup"
    assert "Exception ignored" not in done.stderr
