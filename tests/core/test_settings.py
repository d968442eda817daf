"""Values of variables and of SEALRING_SETTINGS, and the files that may hold the settings."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from sealring.core import settings
from sealring.core.settings import ALLOW_DEBUGGERS, CUDA_WAIT, THREADS, TRACE, with_settings
from sealring.errors import ConfigurationError


def of(file: Path, mode: int = 0o600, **members: object) -> dict[str, str]:
    file.write_text(json.dumps(members))
    file.chmod(mode)
    return {"SEALRING_SETTINGS": str(file)}


def test_every_default_is_what_an_empty_environment_gives() -> None:
    for row in settings.TABLE.values():
        assert row.read({}) == row.default
        if row.empty_is_unset and row.is_variable:
            assert row.read({row.name: ""}) == row.default


def test_there_are_nineteen_variables() -> None:
    assert sum(row.is_variable for row in settings.TABLE.values()) == 19


@pytest.mark.parametrize("mode", [0o600, 0o444, 0o644])
def test_a_file_says_what_the_variable_could(tmp_path: Path, mode: int) -> None:
    environ = of(tmp_path / "settings.json", mode, threads=1, cuda_wait="host")
    assert (THREADS.read(environ), CUDA_WAIT.read(environ)) == (1, "host")
    assert with_settings(environ, cuda_wait="stream") == {
        "SEALRING_SETTINGS": '{"threads": 1, "cuda_wait": "stream"}'
    }


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "is not a JSON object: write it as"),
        ("{]", "is not a JSON object: write it as"),
        ('{"threads": 1, "threads": 2}', "is not a JSON object"),
        ('{"threads": NaN}', "is not a JSON object"),
        ('{"thread": 1}', "there is no setting 'thread', only algorithm, algorithm_table"),
        ('{"SEALRING_JOB": "x"}', "there is no setting 'SEALRING_JOB', only"),
        ('{"threads": "2"}', "\"threads\" in SEALRING_SETTINGS is '2'; it must be a number"),
        ('{"allow_debuggers": 1}', "set it to true or false"),
        ('{"host": ""}', "set it to a text"),
    ],
)
def test_what_is_no_setting_is_refused_by_every_reader(text: str, said: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        ALLOW_DEBUGGERS.read({"SEALRING_SETTINGS": text})
    assert said in str(refused.value)


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666, 0o777])
def test_a_file_that_others_can_write_to_lets_no_debugger_in(tmp_path: Path, mode: int) -> None:
    environ = of(tmp_path / "settings.json", mode, allow_debuggers=True)
    with pytest.raises(ConfigurationError, match=r"can be written to by others .*chmod go-w"):
        ALLOW_DEBUGGERS.read(environ)


def test_a_file_of_another_user_lets_no_debugger_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environ = of(tmp_path / "settings.json", allow_debuggers=True)
    if os.geteuid() == 0:
        os.chown(tmp_path / "settings.json", 65534, 65534)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(ConfigurationError, match=r"belongs to user .* or root's"):
        ALLOW_DEBUGGERS.read(environ)


def test_what_is_no_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "long").write_text(" " * (settings.MAX_BYTES + 1))
    for name, said in {
        "none": "cannot be read: No such file",
        "pipe": "is not a regular file",
        "long": "is longer than 65536 bytes",
        ".": "is not a regular file",
    }.items():
        with pytest.raises(ConfigurationError, match=said):
            THREADS.read({"SEALRING_SETTINGS": str(tmp_path / name)})


def test_a_trace_has_a_folder_and_perhaps_a_signal() -> None:
    assert TRACE.read({"SEALRING_TRACE": "/tmp/x"}) == ("/tmp/x", "")
    assert TRACE.read({"SEALRING_TRACE": "x:USR2"}) == ("x", "USR2")
