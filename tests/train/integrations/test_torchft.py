"""torchft with a sealed group: a replica group that dies, and what sealed-only mode refuses."""

from __future__ import annotations

import importlib.util
import json
import os
import secrets
import subprocess
import sys
from pathlib import Path

import pytest

from tests.examples.test_commands import printed_by
from tests.train.integrations.frameworks import SCRIPTS, output_of


@pytest.fixture(autouse=True)
def installed() -> None:
    # The nightly builds have another name but install the same module.
    if importlib.util.find_spec("torchft") is None:
        pytest.skip("torchft is not installed: make integrations installs it")


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
@pytest.mark.threat("G4")
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


ALONE = """
import torch, torch.distributed as dist
from datetime import timedelta
from sealring.train.integrations.torchft import ReplicaProcessGroup
from torchft import process_group

store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
group = ReplicaProcessGroup(2, timedelta(seconds=30))

def form(quorum, replica_id):
    address = f"127.0.0.1:{store.port}/{quorum}"
    if hasattr(group, "set_rank_info"):  # after 0.2.0
        group.set_rank_info(replica_id, 0, 1, 0)
        process_group.reconfigure_with_store(group, address, 0, 1)
    else:
        group.configure(address, replica_id, 0, 1, quorum, 0, 1, [0])
"""


def run_alone(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", ALONE + code], capture_output=True, text=True,
        env={**os.environ, "SEALRING_SECRET": secrets.token_hex(32)},
    )  # fmt: skip


def test_each_quorum_of_the_installed_torchft_has_a_group() -> None:
    code = (
        "for quorum in (1, 2):\n"
        "    form(quorum, 'gpt_0')\n"
        "    group.allreduce([torch.ones(3)], dist.AllreduceOptions()).wait()\n"
        "    print(group.errored())\n"
    )
    done = run_alone(code)
    assert (done.stdout, done.returncode) == ("None\nNone\n", 0), done.stderr


def test_what_no_quorum_can_mend_is_raised_when_the_manager_asks() -> None:
    # Manager.should_commit() calls errored(). What forming a quorum raises is only logged.
    code = (
        "try:\n"
        "    form(1, 'gpt')\n"
        "except Exception:\n"
        "    print('the manager logs it')\n"
        "group.errored()\n"
    )
    done = run_alone(code)
    assert done.stdout == "the manager logs it\n"
    last = done.stderr.splitlines()[-1]
    assert last.startswith("sealring.errors.ConfigurationError: the Manager's replica_id is 'gpt'")
