"""A forked child has copies of its parent's locks and outlives the parent's use of them."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from sealring.vault import Vault, keys
from sealring.vault.files import claim, claimed

FORKS: dict[str, Callable[[], int]] = {
    "Python's": os.fork,
    # A library forks in this way; Python does not know of such a child.
    "a library's": lambda: int(ctypes.PyDLL(None).fork()),
}


@contextmanager
def child(fork: Callable[[], int]) -> Iterator[None]:
    """Forks a child, like a data loader's worker, that lives until the context ends."""
    read, write = os.pipe()
    process = fork()
    if process == 0:
        os.close(write)
        os.read(read, 1)
        os._exit(0)
    os.close(read)
    try:
        yield
    finally:
        os.close(write)
        assert os.waitpid(process, 0) == (process, 0)


@pytest.mark.parametrize("fork", FORKS)
@pytest.mark.threat("V16")
def test_a_child_does_not_hold_what_its_parent_has_released(
    fork: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sealring.vault.files.LONGEST_WAIT", 0.0)
    keys.make_key_file(tmp_path / "key")
    vault = Vault.create(tmp_path / "vault", keys.key_file(tmp_path / "key"), "owner")
    draft = tmp_path / "draft"
    draft.mkdir()
    with vault.held(alone=False), claim(draft):
        running = child(FORKS[fork])
        running.__enter__()
        assert claimed(draft)  # the child's existence has not released the parent's lock
    try:
        assert vault.rekey().versions == 0
        assert not claimed(draft)
    finally:
        running.__exit__(None, None, None)


@pytest.mark.threat("V16")
def test_a_child_does_not_hold_what_a_killed_parent_held(tmp_path: Path) -> None:
    draft = tmp_path / "draft"
    draft.mkdir()
    ready, forked = os.pipe()
    alive, end = os.pipe()
    parent = os.fork()
    if parent == 0:
        with claim(draft):
            if os.fork() == 0:
                os.close(end)
                os.write(forked, b"x")
                os.read(alive, 1)
                os._exit(0)
            signal.pause()
        os._exit(1)
    os.read(ready, 1)
    assert claimed(draft)
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)
    assert not claimed(draft)
    for one in (ready, forked, alive, end):
        os.close(one)
