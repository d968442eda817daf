"""Removed files: their names are gone at once, and a thread gives their space back.

A file system gives space back when the last name and the last descriptor of a file are gone, and on
a disk that is told of it (the mount option `discard`) this takes as long as writing: 0.3 s for
256 MiB. So the names are removed while a descriptor is open, which a thread closes. If the process
is killed, the kernel closes it.
"""

from __future__ import annotations

import contextlib
import os
import stat
import threading
from collections.abc import Iterator
from typing import Final

_LARGE: Final = 1 << 20
_MOST: Final = 256
"""Descriptors that one removal opens. Further files are freed when they are removed."""
not_for_children: Final[set[int]] = set()
"""Descriptors of this process that a forked child closes: its copies would keep what they hold."""
_under_way: Final[set[threading.Event]] = set()


def _in_child() -> None:
    _under_way.clear()
    while not_for_children:
        os.close(not_for_children.pop())


os.register_at_fork(after_in_child=_in_child)


@contextlib.contextmanager
def later(directory: int) -> Iterator[None]:
    """Large files that the block removes from this directory are freed after it."""
    held = _held(directory)
    try:
        yield
    finally:
        # Not the thread: others may wait before it has started.
        done = threading.Event()
        _under_way.add(done)
        work = held, done
        try:
            threading.Thread(target=_free, args=work, name="sealring-free", daemon=True).start()
        except RuntimeError:  # no more threads are allowed here
            _free(*work)


def wait() -> None:
    """Until all is given back."""
    for done in list(_under_way):
        done.wait()


def _held(directory: int) -> list[int]:
    held: list[int] = []
    with contextlib.suppress(OSError), os.scandir(directory) as found:
        for one in found:
            status = one.stat(follow_symlinks=False)
            if stat.S_ISREG(status.st_mode) and status.st_size >= _LARGE and len(held) < _MOST:
                # O_PATH: nothing of the file can be read or written by it.
                flags = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
                held.append(os.open(one.name, flags, dir_fd=directory))
                not_for_children.add(held[-1])
    return held


def _free(held: list[int], done: threading.Event) -> None:
    try:
        _close(held)
    finally:
        _under_way.discard(done)
        done.set()


def _close(held: list[int]) -> None:
    for descriptor in held:
        if descriptor in not_for_children:
            not_for_children.remove(descriptor)
            os.close(descriptor)
