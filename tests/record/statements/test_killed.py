"""A writer killed at any step leaves a complete log, which can be continued."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import pytest

from sealring.errors import ConfigurationError
from tests.crashes import killed_at
from tests.record.statements.logs import new_log, numbered


@pytest.mark.parametrize("before", [0, 250])
@pytest.mark.threat("L21")
def test_killed_before_every_step_of_an_append(tmp_path: Path, before: int) -> None:
    log = new_log(tmp_path, numbered(before))
    step = outcomes = 0
    while True:
        step += 1
        size = log.opened().size
        # The batch differs each time, so a file left by a killed writer is never the right one.
        more = [b"step %d: %d" % (step, number) for number in range(10)]
        killed = killed_at(step, functools.partial(log.append, more))
        found = log.check()
        assert found in (size, size + 10)
        outcomes |= 1 << (found > size)
        if found > size:
            assert log.entries()[size:] == more
        if not killed:
            break
        assert log.append([b"after step %d" % step]) == range(found, found + 1)
        assert log.check() == found + 1
    assert step > 20
    assert outcomes == 3
    assert not list((log.folder / ".new").iterdir())


@pytest.mark.threat("L21")
def test_everything_is_durable_before_the_checkpoint_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = new_log(tmp_path, numbered(250))
    unsynced: set[str] = set()
    published = []
    names: dict[int, str] = {}
    real_open, real_fsync, real_replace = os.open, os.fsync, os.replace

    def opened(path: Any, *arguments: Any, **options: Any) -> int:
        fd = real_open(path, *arguments, **options)
        names[fd] = os.fspath(path)
        return fd

    def fsync(fd: int) -> None:
        unsynced.discard(names[fd])
        real_fsync(fd)

    def replace(source: Any, target: Any) -> None:
        if Path(target).name == "checkpoint":
            published.append(sorted(unsynced))
        unsynced.add(str(Path(target).parent))
        real_replace(source, target)

    monkeypatch.setattr(os, "open", opened)
    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replace)
    log.append(numbered(10, 250))
    assert published == [[]]
    # A power cut may lose the remembered checkpoint, and an older one is read then.
    assert unsynced <= {str(tmp_path)}


@pytest.mark.parametrize("last", [True, False])
@pytest.mark.threat("L21")
def test_a_commit_that_fails_half_way_is_not_followed_by_another_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last: bool
) -> None:
    """The disk fails once the new checkpoint is visible. Its size must not be signed again."""
    log = new_log(tmp_path, numbered(3))
    real, replaced = os.fsync, []
    real_replace = os.replace

    def replace(source: Any, target: Any) -> None:
        if last and Path(target).name == "remembered":
            raise OSError(5, "Input/output error")
        real_replace(source, target)
        if not last and Path(target).name == "checkpoint":
            replaced.append(target)

    def fsync(fd: int) -> None:
        if replaced:
            raise OSError(5, "Input/output error")
        real(fd)

    with log.writer() as writer:
        with monkeypatch.context() as patched:
            patched.setattr(os, "replace", replace)
            patched.setattr(os, "fsync", fsync)
            with pytest.raises(ConfigurationError, match="Input/output error"):
                writer.append([b"visible"])
        for again in (lambda: writer.append([b"other"]), lambda: writer.add_cosignatures([])):
            with pytest.raises(ConfigurationError, match="open the log again"):
                again()
    assert log.check() == 4
    assert log.append([b"next"]) == range(4, 5)
    assert log.entries()[3:] == [b"visible", b"next"]
