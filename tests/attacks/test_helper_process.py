"""Attacks on the process that seals a checkpoint in the background and holds its key."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from sealring.core.settings import with_settings
from sealring.errors import WorkerFailed
from sealring.vault import CheckpointReader, CheckpointWriter, Vault, keys
from sealring.vault.children import Door
from tests.attacks.false_helper import ANSWERS
from tests.attacks.unprivileged import CHECKOUT, needs_unprivileged, start
from tests.workers import SECRET

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")
WORDS = {
    "no commitment": "gave an answer that is none",
    "a commitment that is none": "gave an answer that is none",
    "terminal codes": "?[2JAAA",
    "killed": "did not answer",
    "four gigabytes": "a message has 4294967295 bytes",
    "no json": "a message cannot be read",
    "nested": "a message cannot be read",
    "many keys": "a message is not of the form that is sent",
}
_PTRACE_SEIZE = 0x4206
_LAST_NUMBER = Path("/proc/sys/kernel/ns_last_pid")
_LEAVES_ITS_CONNECTION = """
import os, socket, sys
here = socket.socket(socket.AF_UNIX)
here.connect(b"\\0" + sys.argv[1].encode())
if os.fork() == 0:
    print("connected", flush=True)
    while taken := here.recv(1024):
        here.sendall(taken)
"""


@pytest.fixture
def vault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Vault:
    monkeypatch.setenv("SEALRING_SECRET", SECRET)
    monkeypatch.setenv("SEALRING_JOB", "tests")
    keys.make_key_file(tmp_path / "key")
    return Vault.create(tmp_path / "vault", keys.key_file(tmp_path / "key"), "owner")


def save(vault: Vault) -> None:
    dcp.save({"x": torch.ones(3)}, storage_writer=CheckpointWriter(vault, "run", helper=True))


@needs_unprivileged
@pytest.mark.threat("P8")
def test_another_process_of_the_user_takes_neither_key_nor_plaintext() -> None:
    victim = start(
        [sys.executable, "-m", "tests.attacks.helper_thief", "victim"],
        cwd=CHECKOUT,
        env=os.environ | {**with_settings({}, allow_debuggers=False), "TMPDIR": "/tmp"},
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
    assert told["EBADF"] + told.get("EPERM", 0) > 0  # the thief saw the helper
    assert told["closed"] > 0  # it connected to the worker, which closed the connection


def started_as(number: int) -> subprocess.Popen[bytes]:
    """Starts a process with this number, as an attacker can who starts many processes."""
    for _ in range(100):
        try:
            _LAST_NUMBER.write_text(str(number - 1))
        except OSError as problem:
            pytest.skip(f"the next process's number cannot be chosen: {problem.strerror}")
        process = subprocess.Popen(["sleep", "60"])
        if process.pid == number:
            return process
        process.kill()
        process.wait()
    pytest.skip("other processes took the number each time")


@pytest.mark.threat("P8")
def test_a_process_that_had_the_helpers_number_does_not_pass_for_it() -> None:
    """The thief connects, leaves the connection to a child and ends before the helper starts."""
    door = Door()
    command = [sys.executable, "-c", _LEAVES_ITS_CONNECTION, door.address]
    thief = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert thief.stdout is not None
    assert thief.stdout.readline() == b"connected\n"
    thief.wait()
    helper = started_as(thief.pid)
    try:
        with pytest.raises(TimeoutError):
            door.accept(lambda pid: pid == helper.pid, helper.poll, 1.0)
    finally:
        door.close()
        helper.kill()
        helper.wait()
        thief.stdout.close()


@pytest.mark.threat("P8")
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


@pytest.mark.threat("P8")
def test_a_helper_that_is_traced_gets_nothing(
    vault: Vault, monkeypatch: pytest.MonkeyPatch
) -> None:
    real: Any = subprocess.Popen
    libc = ctypes.CDLL(None, use_errno=True)

    def traced(*arguments: Any, **options: Any) -> Any:
        process = real(*arguments, **options)
        assert libc.ptrace(_PTRACE_SEIZE, process.pid, None, None) == 0, ctypes.get_errno()
        return process

    monkeypatch.setattr("subprocess.Popen", traced)
    with pytest.raises(CheckpointException) as raised:
        save(vault)
    ((problem, _),) = raised.value.failures.values()
    assert type(problem) is WorkerFailed
    assert "ended with status 1" in str(problem)


@pytest.mark.threat("P8")
def test_a_helper_that_hangs_is_ended(vault: Vault, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []
    real: Any = subprocess.Popen

    def sleeping(command: list[str], **options: Any) -> Any:
        started.append(real([sys.executable, "-c", "import time; time.sleep(600)"], **options))
        return started[-1]

    monkeypatch.setattr("subprocess.Popen", sleeping)
    monkeypatch.setattr("sealring.vault.children.START_SECONDS", 0.3)
    monkeypatch.setattr("sealring.vault.children.END_SECONDS", 0.1)
    with pytest.raises(CheckpointException) as raised:
        save(vault)
    ((problem, _),) = raised.value.failures.values()
    assert type(problem) is WorkerFailed
    assert "did not connect" in str(problem)
    assert started[0].returncode == -9


def in_place_of_helpers(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> list[subprocess.Popen[bytes]]:
    """Starts false helpers in place of real ones from now on; returns those that were started."""
    started: list[subprocess.Popen[bytes]] = []
    real: Any = subprocess.Popen

    def false(command: list[str], **options: Any) -> Any:
        module = ["-m", "tests.attacks.false_helper", kind]
        started.append(real([sys.executable, *module, command[-1]], cwd=CHECKOUT, **options))
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", false)
    monkeypatch.setattr("sealring.vault.children.END_SECONDS", 0.1)
    return started


@pytest.mark.parametrize("kind", [*ANSWERS, "killed", "four gigabytes"])
@pytest.mark.threat("P7", "P20")
def test_what_a_helper_answers_ends_the_save_by_name(
    kind: str, vault: Vault, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such an answer once raised a bare ValueError, TypeError or KeyError, or filled the memory."""
    save(vault)
    with monkeypatch.context() as patch:
        started = in_place_of_helpers(kind, patch)
        with pytest.raises(CheckpointException) as raised:
            save(vault)
    ((problem, _),) = raised.value.failures.values()
    assert type(problem) is WorkerFailed
    assert WORDS.get(kind, "") in str(problem)
    assert str(problem).isprintable()
    assert len(str(problem)) < 1000
    assert [one.returncode is None for one in started] == [False]
    save(vault)
    dcp.load({"x": torch.zeros(3)}, storage_reader=CheckpointReader(vault, "run"))
    assert vault.find("run").manifest.object_version > 1


@pytest.mark.parametrize("kind", ["stopped", "a byte at a time"])
@pytest.mark.threat("P7")
def test_a_helper_that_does_not_end_its_answer_is_ended(
    kind: str, vault: Vault, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There was once only a time limit for each byte, so a helper could delay a save for ever."""
    started = in_place_of_helpers(kind, monkeypatch)
    monkeypatch.setattr("sealring.vault.staging.WORK_SECONDS", 1.0)
    with pytest.raises(CheckpointException) as raised:
        save(vault)
    ((problem, _),) = raised.value.failures.values()
    assert type(problem) is WorkerFailed
    assert "timed out" in str(problem)
    # A helper that is still writing may end by itself, since its connection was closed.
    assert started[0].returncode in ([-9] if kind == "stopped" else [-9, 1])


@pytest.mark.threat("P7")
def test_saves_go_on_while_the_helper_of_another_hangs(
    vault: Vault, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One writer makes all these saves. A later save removes what the first has left."""
    real: Any = subprocess.Popen
    started = in_place_of_helpers("stopped", monkeypatch)
    false: Any = subprocess.Popen
    kinds = [false]
    monkeypatch.setattr(
        "subprocess.Popen",
        lambda *given, **options: (kinds.pop() if kinds else real)(*given, **options),
    )
    monkeypatch.setattr("sealring.vault.staging.WORK_SECONDS", 30.0)
    writer = CheckpointWriter(vault, "run", helper=True, keep=2)
    failures: list[BaseException] = []

    def hanging() -> None:
        try:
            dcp.save({"x": torch.zeros(3)}, storage_writer=writer)
        except CheckpointException as problem:
            failures.extend(one[0] for one in problem.failures.values())

    first = threading.Thread(target=hanging)
    first.start()
    while not started or stopped(started[0].pid) is False:
        time.sleep(0.02)
    for value in (2.0, 3.0, 4.0):
        dcp.save({"x": torch.full((3,), value)}, storage_writer=writer)
    assert first.is_alive()
    os.kill(started[0].pid, signal.SIGKILL)
    first.join()
    assert [type(one) for one in failures] == [WorkerFailed]
    into = {"x": torch.zeros(3)}
    dcp.load(into, storage_reader=CheckpointReader(vault, "run"))
    assert into["x"].tolist() == [4.0] * 3
    dcp.save({"x": torch.full((3,), 5.0)}, storage_writer=writer)
    found = [int(one.name) for one in vault.folder_of("run").local.iterdir()]
    assert sorted(found) == [4, 5]


def stopped(process: int) -> bool:
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "T"
