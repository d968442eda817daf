"""Another process of the workers' user reaches neither their memory nor their files."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sealring.core.settings import with_settings
from tests.attacks.neighbour import ATTEMPTS
from tests.attacks.unprivileged import CHECKOUT, needs_unprivileged, start
from tests.workers import SECRET


def last_line_of(module: str, debuggers: str) -> str:
    """Runs the module as a user without privileges and returns the last line that it prints."""
    neighbour = start(
        [sys.executable, "-m", module],
        cwd=CHECKOUT,
        env=os.environ | {**with_settings({}, allow_debuggers=debuggers == "1"), "TMPDIR": "/tmp"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        out, err = neighbour.communicate(timeout=100)
    finally:
        neighbour.kill()
    assert neighbour.returncode == 0, err
    last: str = out.splitlines()[-1]
    return last


def attacked(debuggers: str) -> dict[str, Any]:
    told: dict[str, Any] = json.loads(last_line_of("tests.attacks.neighbour", debuggers))
    assert told["user"] != 0
    return told


@needs_unprivileged
@pytest.mark.threat("R7", "K16")
def test_a_neighbour_reaches_no_memory_and_no_descriptor_of_a_worker() -> None:
    told = attacked("0")
    assert told["training"] == dict.fromkeys(ATTEMPTS, "PermissionError")
    # This counts the race for a link's memory between its creation and its sealing.
    assert "reached" not in told["during set-up"], told
    assert told["during set-up"]["PermissionError"] > 0


def _ptrace_scope() -> int:
    try:
        with open("/proc/sys/kernel/yama/ptrace_scope") as file:
            return int(file.read())
    except OSError:
        return 0


@needs_unprivileged
@pytest.mark.skipif(_ptrace_scope() != 0, reason="Yama keeps neighbours out in any case here")
@pytest.mark.threat("K16")
def test_the_setting_lets_debuggers_in() -> None:
    assert attacked("1")["training"] == dict.fromkeys(ATTEMPTS, "reached")


@needs_unprivileged
def test_torch_shares_tensors_between_processes_all_the_same() -> None:
    """Covers data loaders and queues; only sharing by `pidfd_getfd` needs the setting."""
    user, *taken = last_line_of("tests.attacks.bystander", "0").split()
    assert user != "0"
    assert taken == ["PermissionError"]


CRASHES = """
import os, resource
from sealring.core.settings import with_settings
from sealring.core.identity.secret import read_secret

limit = resource.getrlimit(resource.RLIMIT_CORE)[1]
resource.setrlimit(resource.RLIMIT_CORE, (limit, limit))
assert read_secret(os.environ)
os.abort()
"""


def leaves_core(debuggers: str, folder: Path) -> bool:
    env = os.environ | {
        "SEALRING_SECRET": SECRET,
        **with_settings({}, allow_debuggers=debuggers == "1"),
    }
    command = [sys.executable, "-c", f"import os; os.chdir({str(folder)!r}){CRASHES}"]
    pid = os.posix_spawn(sys.executable, command, env)
    _, status = os.waitpid(pid, 0)
    assert os.WTERMSIG(status) == signal.SIGABRT
    return os.WCOREDUMP(status)


@pytest.mark.threat("K16")
def test_a_process_that_holds_keys_leaves_no_core_file(tmp_path: Path) -> None:
    if not leaves_core("1", tmp_path):
        pytest.skip("this machine writes no core files")
    assert not leaves_core("0", tmp_path)
