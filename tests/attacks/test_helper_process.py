"""The process that seals a checkpoint in the background, and those who want its key."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from sealring.errors import WorkerFailed
from sealring.vault import CheckpointWriter, Vault, keys
from tests.attacks.unprivileged import CHECKOUT, needs_unprivileged, start
from tests.workers import SECRET

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")
_PTRACE_SEIZE = 0x4206


@pytest.fixture
def vault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Vault:
    monkeypatch.setenv("SEALRING_SECRET", SECRET)
    monkeypatch.setenv("SEALRING_JOB", "tests")
    keys.make_key_file(tmp_path / "key")
    return Vault.create(tmp_path / "vault", keys.key_file(tmp_path / "key"), "owner")


def save(vault: Vault) -> None:
    dcp.save({"x": torch.ones(3)}, storage_writer=CheckpointWriter(vault, "run", helper=True))


@needs_unprivileged
def test_another_process_of_the_user_takes_neither_key_nor_plaintext() -> None:
    victim = start(
        [sys.executable, "-m", "tests.attacks.helper_thief", "victim"],
        cwd=CHECKOUT,
        env=os.environ | {"SEALRING_ALLOW_DEBUGGERS": "0", "TMPDIR": "/tmp"},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        out, _ = victim.communicate(timeout=100)
    finally:
        victim.kill()
    found = json.loads(out.splitlines()[-1])
    assert found["user"] != 0
    assert found["loaded"] == 42
    told = found["told"]
    assert not {"socket", "/memfd", "bytes"} & told.keys(), told
    assert told["EBADF"] + told.get("EPERM", 0) > 0  # it saw the helper, and tried
    assert told["closed"] > 0  # it connected to the worker, which closed the connection


def test_modules_of_the_working_directory_do_not_run_in_it(
    vault: Vault, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    for module in ("json", "mmap", "sealring"):
        (shared / f"{module}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\n")
    monkeypatch.chdir(shared)
    save(vault)
    assert not (tmp_path / "ran").exists()


def test_a_helper_that_is_traced_gets_nothing(
    vault: Vault, monkeypatch: pytest.MonkeyPatch
) -> None:
    real: Any = subprocess.Popen
    libc = ctypes.CDLL(None, use_errno=True)

    def traced(*arguments: Any, **options: Any) -> Any:
        process = real(*arguments, **options)
        assert libc.ptrace(_PTRACE_SEIZE, process.pid, None, None) == 0, ctypes.get_errno()
        return process

    monkeypatch.setattr("sealring.vault.staging.subprocess.Popen", traced)
    with pytest.raises(CheckpointException) as raised:
        save(vault)
    ((problem, _),) = raised.value.failures.values()
    assert type(problem) is WorkerFailed
    assert "ended with status 1" in str(problem)


def test_a_helper_that_hangs_is_ended(vault: Vault, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []
    real: Any = subprocess.Popen

    def sleeping(command: list[str], **options: Any) -> Any:
        started.append(real([sys.executable, "-c", "import time; time.sleep(600)"], **options))
        return started[-1]

    monkeypatch.setattr("sealring.vault.staging.subprocess.Popen", sleeping)
    monkeypatch.setattr("sealring.vault.staging._START_SECONDS", 0.3)
    monkeypatch.setattr("sealring.vault.staging._END_SECONDS", 0.1)
    with pytest.raises(CheckpointException) as raised:
        save(vault)
    ((problem, _),) = raised.value.failures.values()
    assert type(problem) is WorkerFailed
    assert "did not connect" in str(problem)
    assert started[0].returncode == -9
