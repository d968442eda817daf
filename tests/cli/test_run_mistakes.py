"""`sealring run` with a wrong option or variable ends with one sentence that says what to do.

A run changes its process to sealed groups for good. Whole runs are therefore separate processes
here, and single checks are called as functions.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from sealring.cli.run import (
    broker_environment,
    check_passed_on,
    check_workers,
    errors_folder,
    identity_environment,
)
from sealring.core.settings import unknown_variables
from sealring.errors import ConfigurationError
from tests.cli.test_commands import sealring


def refused(check: Callable[[], object]) -> str:
    with pytest.raises(ConfigurationError) as refusal:
        check()
    return str(refusal.value)


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("PET_TEE", "x", "3 for both"),
        ("PET_REDIRECTS", "4", "3 for both"),
        ("PET_LOCAL_RANKS_FILTER", "one", "local ranks of workers: 0,1"),
    ],
)
def test_a_variable_that_torchrun_does_not_take(name: str, value: str, told: str) -> None:
    message = refused(lambda: check_passed_on({name: value}))
    assert message.startswith(f"{name} is {value!r}; set it to ")
    assert told in message


@pytest.mark.parametrize(
    ("name", "value"),
    [("PET_TEE", "3"), ("PET_REDIRECTS", "0:3,1:2"), ("PET_LOCAL_RANKS_FILTER", "0,1")],
)
def test_a_variable_that_torchrun_takes(name: str, value: str) -> None:
    check_passed_on({name: value})


def test_workers_for_gpus_that_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "torch finds no GPU here: pass a number" in refused(lambda: check_workers("gpu"))


@pytest.mark.parametrize("other", ["SEALRING_SECRET", "SEALRING_CERTIFICATE"])
def test_a_secret_file_beside_another_identity(
    other: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = tmp_path / "job.secret"
    secret.touch(mode=0o600)
    secret.write_text(os.urandom(32).hex())
    monkeypatch.delenv("SEALRING_SECRET", raising=False)
    monkeypatch.setenv(other, "something")
    message = refused(lambda: identity_environment(1, secret))
    assert f"--secret-file is given and {other} is set" in message


@pytest.mark.parametrize("option", ["--authority", "--policy"])
def test_what_judges_peers_of_a_broker_is_refused_without_one(option: str) -> None:
    done = sealring("run", option, "judge.pem", __file__)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith(
        f"configuration: {option} is for workers that join through a broker, and there is "
        "none: pass --broker too, or leave it out"
    )


def test_a_secret_file_beside_a_broker(tmp_path: Path) -> None:
    secret = tmp_path / "job.secret"
    message = refused(lambda: broker_environment("https://127.0.0.1:8443", None, None, secret))
    assert message.startswith("--secret-file is given and there is a broker: a worker has one")


def test_a_secret_file_without_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SEALRING_SECRET", raising=False)
    monkeypatch.setenv("SEALRING_SECRET_FILE", "")
    assert "SEALRING_SECRET_FILE is set and empty" in refused(lambda: identity_environment(1, None))


def test_nowhere_to_write_temporary_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", "/proc/no-such-folder")
    assert "set TMPDIR to a folder" in refused(errors_folder)


def test_a_run_names_a_misspelled_variable_and_a_wrong_value() -> None:
    done = sealring("run", __file__, SEALRING_TRANSPRT="tcp", PET_TEE="x")
    assert done.returncode == 2
    told = " ".join(done.stderr.split())
    assert "sealring: SEALRING_TRANSPRT is set, but sealring does not read it" in told
    assert "configuration: PET_TEE is 'x'; set it to 1 for standard output" in told


def test_a_machine_that_there_is_not() -> None:
    done = sealring("run", "--node-rank", "1", __file__)
    assert done.returncode == 2
    told = "--node-rank is 1, and --nnodes is 1: machines are numbered from 0 to 0"
    assert told in " ".join(done.stderr.split())


def test_torchruns_own_variables_reach_it(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("print('from a worker')")
    done = sealring("run", str(script), PET_LOG_DIR=str(tmp_path / "logs"), PET_REDIRECTS="3")
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    (log,) = (tmp_path / "logs").glob("**/stdout.log")
    assert log.read_text() == "from a worker\n"


@pytest.mark.parametrize("code", [0, 3])
def test_a_run_leaves_no_temporary_folder(code: int, tmp_path: Path) -> None:
    script, folder = tmp_path / "train.py", tmp_path / "temporary"
    script.write_text(f"raise SystemExit({code})")
    folder.mkdir()
    done = sealring("run", "-n", "2", str(script), TMPDIR=str(folder))
    assert done.returncode == min(code, 1), done.stderr
    assert list(folder.iterdir()) == []


def test_a_misspelled_variable_is_named() -> None:
    assert list(unknown_variables({"SEALRING_SECRETFILE": "x", "SEALRING_JOB": "gpt"})) == [
        "SEALRING_SECRETFILE is set, but sealring does not read it: SEALRING_SECRET_FILE is the "
        "nearest name that it reads"
    ]


def test_what_kubernetes_or_a_user_sets_is_left_alone() -> None:
    names = ("BROKER_PORT", "BROKER_SERVICE_HOST", "BROKER_PORT_8443_TCP", "PORT", "MY_OWN")
    assert list(unknown_variables({f"SEALRING_{name}": "x" for name in names})) == []
