"""`sealring run` with a wrong option or variable: one sentence that says what to do."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from typer.testing import CliRunner

from sealring.cli import app
from sealring.cli.variables import KNOWN, unknown_variables
from sealring.errors import ConfigurationError
from tests.cli.test_commands import sealring
from tests.test_docs import BUILD_OPTIONS, ROOT


@pytest.fixture(autouse=True)
def own_environment() -> Iterator[None]:
    """`sealring run` sets variables for its workers, in this process."""
    with patch.dict(os.environ):
        yield


def refused(*arguments: str, **environment: str) -> str:
    clean: dict[str, str | None] = {
        name: None for name in os.environ if name.startswith("SEALRING_")
    }
    done = CliRunner().invoke(app, ["run", *arguments], env={**clean, **environment})
    assert type(done.exception) is ConfigurationError
    return str(done.exception)


@pytest.mark.parametrize(
    ("option", "value", "told"),
    [
        ("--tee", "x", "3 for both"),
        ("--redirects", "4", "3 for both"),
        ("--local-ranks-filter", "one", "local ranks of workers: 0,1"),
        ("--node-rank", "1", "--nnodes is 1: machines are numbered from 0 to 0"),
    ],
)
def test_an_option_that_cannot_be(option: str, value: str, told: str) -> None:
    message = refused(option, value, __file__)
    assert message.startswith(f"{option} is ")
    assert told in message


def test_workers_for_gpus_that_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "torch finds no GPU here: pass a number" in refused("-n", "gpu", __file__)


@pytest.mark.parametrize("other", ["SEALRING_SECRET", "SEALRING_CERTIFICATE"])
def test_a_secret_file_beside_another_identity(other: str, tmp_path: Path) -> None:
    secret = tmp_path / "job.secret"
    secret.touch(mode=0o600)
    secret.write_text(os.urandom(32).hex())
    message = refused("--secret-file", str(secret), __file__, **{other: "something"})
    assert f"--secret-file is given and {other} is set" in message


def test_a_secret_file_without_a_name() -> None:
    assert "SEALRING_SECRET_FILE is set and empty" in refused(__file__, SEALRING_SECRET_FILE="")


def test_nowhere_to_write_temporary_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", "/proc/no-such-folder")
    assert "set TMPDIR to a folder" in refused(__file__)


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
    done = CliRunner().invoke(app, ["run", "no-such.py"], env={"SEALRING_TRANSPRT": "tcp"})
    assert "sealring: SEALRING_TRANSPRT is set, but sealring does not read it" in done.output


def test_what_kubernetes_or_a_user_sets_is_left_alone() -> None:
    names = ("BROKER_PORT", "BROKER_SERVICE_HOST", "BROKER_PORT_8443_TCP", "PORT", "MY_OWN")
    assert list(unknown_variables({f"SEALRING_{name}": "x" for name in names})) == []


def test_every_setting_is_known() -> None:
    page = (ROOT / "docs" / "configuration.md").read_text()
    settings = set(re.findall(r"\bSEALRING_[A-Z_]+\b", page)) - BUILD_OPTIONS
    assert settings == KNOWN
