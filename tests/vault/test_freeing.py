"""Removed files: their names are gone at once, and their space is given back by a thread."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sealring.vault import files
from sealring.vault.files import remove_directory

LARGE = bytes(1 << 20)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "folder"
    made.mkdir()
    (made / "part").write_bytes(LARGE)
    (made / "small").write_bytes(b"small")
    (made / "manifest").write_bytes(b"manifest")
    return made


@pytest.fixture
def go_on(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Until it is set, nothing is given back."""
    event, run = threading.Event(), threading.Thread.run

    def waiting(self: threading.Thread) -> None:
        if self.name == "sealring-free":
            event.wait()
        run(self)

    monkeypatch.setattr(threading.Thread, "run", waiting)
    yield event
    event.set()
    files.wait_until_freed()


def deleted(inside: Path) -> list[str]:
    """Files below that have no name any more, and are open here."""
    links = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
    found = [os.readlink(link) for link in links if os.path.islink(link)]
    return [one for one in found if one.startswith(str(inside)) and one.endswith("(deleted)")]


def test_a_large_file_is_freed_after_the_removal_has_returned(
    folder: Path, go_on: threading.Event
) -> None:
    held = set(files.not_for_children)
    remove_directory(folder.parent, folder, first="manifest")
    assert not folder.exists()
    assert deleted(folder) == [f"{folder / 'part'} (deleted)"]
    go_on.set()
    files.wait_until_freed()
    assert not deleted(folder)
    assert files.not_for_children == held


def test_a_forked_child_does_not_keep_the_space(folder: Path, go_on: threading.Event) -> None:
    remove_directory(folder.parent, folder)
    child = os.fork()
    if child == 0:
        files.wait_until_freed()  # for no thread of its parent
        os._exit(len(deleted(folder)))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert deleted(folder)


def test_a_file_system_that_keeps_names_of_open_files(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As NFS does: the directory cannot be removed until the file is closed."""
    rmtree, left = shutil.rmtree, []

    def not_while_open(name: str, **options: Any) -> None:
        left.append(len(files.not_for_children))
        if not left[-1]:
            rmtree(name, **options)

    monkeypatch.setattr(shutil, "rmtree", not_while_open)
    remove_directory(folder.parent, folder)
    assert left == [1, 0]
    assert not folder.exists()


def test_where_no_thread_can_start_it_is_freed_at_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refused)
    remove_directory(folder.parent, folder)
    assert not folder.exists()
    assert not deleted(folder)
    files.wait_until_freed()
