"""A file is replaced as a whole: its name shows either the new file or the earlier one."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest

from sealring.errors import ConfigurationError, DiskFull
from sealring.formats.files import (
    DurableFiles,
    replace_private,
    write_private,
    write_public,
    write_whole,
)


def names(folder: Path) -> list[str]:
    return sorted(one.name for one in folder.iterdir())


@pytest.mark.parametrize(
    ("write", "mode"), [(write_private, 0o600), (replace_private, 0o600), (write_public, 0o644)]
)
def test_the_mode_does_not_depend_on_the_umask(tmp_path: Path, write: object, mode: int) -> None:
    before = os.umask(0o077 if mode == 0o644 else 0)
    try:
        write(tmp_path / "x", b"content")  # type: ignore[operator]
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "x").stat().st_mode) == mode
    assert names(tmp_path) == ["x"]


def test_a_new_private_file_replaces_nothing(tmp_path: Path) -> None:
    write_private(tmp_path / "key", b"first")
    with pytest.raises(ConfigurationError, match="will not be overwritten"):
        write_private(tmp_path / "key", b"second")
    assert (tmp_path / "key").read_bytes() == b"first"
    assert names(tmp_path) == ["key"]


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_on_a_full_disk_the_older_file_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    write_public(tmp_path / "x", b"older")
    with monkeypatch.context() as patch:
        patch.setattr(os, step, full)
        with pytest.raises(DiskFull, match="Free some space"):
            write_public(tmp_path / "x", b"newer")
    assert (tmp_path / "x").read_bytes() == b"older"
    assert names(tmp_path) == ["x"]


def test_what_is_no_file_is_not_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigurationError, match="not a regular file"):
        write_public(tmp_path / "pipe", b"")


def test_a_name_as_long_as_names_can_be(tmp_path: Path) -> None:
    name = "ü" * 127
    write_whole(tmp_path / name, b"content")
    assert names(tmp_path) == [name]


def test_of_two_writers_of_a_new_file_the_first_one_stays(tmp_path: Path) -> None:
    assert DurableFiles(tmp_path).write_new("a/b", b"first")
    assert not DurableFiles(tmp_path).write_new("a/b", b"second")
    assert (tmp_path / "a" / "b").read_bytes() == b"first"
    assert names(tmp_path / ".new") == []
