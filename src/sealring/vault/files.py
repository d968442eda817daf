"""Writes files and directories that survive a crash, and refuses paths that lead out of theirs.

Unfinished plaintext lies beside its output. If its process was killed, the next one removes it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import io
import os
import secrets
import shutil
import signal
import stat
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Any, Final

from sealring.errors import UnsafePath, VaultBusy, VaultError
from sealring.formats.files import (
    NEW_FILE,
    is_full,
    name_beside,
    not_written,
    sync_directory,
    write_whole,
)

_AT_FDCWD: Final = -100
_RENAME_NOREPLACE: Final = 1
LONGEST_WAIT: Final = 300.0
"""How many seconds to wait for another process that holds the vault."""
_MARK: Final = ".sealring-unfinished-"
_RANDOM_BYTES: Final = 8
_NOT_HANDLED: Final = frozenset(
    {
        # They cannot be handled, or do not end a process.
        signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD, signal.SIGCONT, signal.SIGTSTP,
        signal.SIGTTIN, signal.SIGTTOU, signal.SIGURG, signal.SIGWINCH,
        # A program that caused one of these cannot go on, not even to clean up.
        signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT,
        signal.SIGTRAP, signal.SIGSYS,
    }
)  # fmt: skip
_LARGE_FILE: Final = 1 << 20
_MOST_HELD: Final = 256
"""The most descriptors that one removal opens. Further files are freed as they are removed."""
not_for_children: Final[set[int]] = set()
"""Descriptors that a forked child closes: its copies would keep locks held and files unfreed."""
_under_way: Final[set[threading.Event]] = set()


def write_new(path: Path, content: bytes) -> None:
    """Writes a new file without syncing it. The caller syncs it before anything depends on it."""
    with named(path), open(os.open(path, NEW_FILE, 0o600), "wb") as file:
        file.write(content)


@contextlib.contextmanager
def named(path: Path) -> Iterator[None]:
    """Turns a full disk into `DiskFull`; adds the path to all other errors of a write."""
    try:
        yield
    except OSError as problem:
        if is_full(problem):
            raise not_written(path, problem) from problem
        problem.filename = problem.filename or str(path)
        raise


def sync_together(paths: Sequence[Path]) -> None:
    """Syncs files and directories at the same time, so that one transaction can write them all."""
    with ThreadPoolExecutor(len(paths), "sealring-sync") as threads:
        list(threads.map(_sync, paths))


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_file(path: Path, content: bytes, *, lasting: bool = True) -> None:
    """Writes a file, which appears whole or not at all and replaces an older one.

    If `lasting`, it survives a power cut; else the older file may be there afterwards.
    """
    with named(path):
        write_whole(path, content, 0o600, lasting=lasting)


def beside(path: Path) -> Path:
    """A new name in the same directory, for a file that is not finished."""
    return path.with_name(name_beside(path.name, f".{secrets.token_hex(8)}"))


def move_into_place(finished: Path, target: Path) -> None:
    """Renames a file or a directory. Raises VaultError if something has the target's name."""
    done = ctypes.CDLL(None, use_errno=True).renameat2(
        _AT_FDCWD, os.fsencode(finished), _AT_FDCWD, os.fsencode(target), _RENAME_NOREPLACE
    )
    problem = ctypes.get_errno()
    if done != 0 and problem in (errno.EINVAL, errno.ENOSYS):
        done, problem = _move_by_parts(finished, target)
    if done != 0 and problem == errno.EEXIST:
        raise in_the_way(target)
    if done != 0:
        raise OSError(problem, f"{target} cannot be written: {os.strerror(problem)}")
    sync_directory(target.parent)


def _move_by_parts(finished: Path, target: Path) -> tuple[int, int]:
    """Moves without RENAME_NOREPLACE, for file systems such as NFS, and overwrites nothing.

    Returns -1 and the error's number if it fails, else zeros.
    """
    try:
        if finished.is_dir():
            target.mkdir(mode=0o700)  # takes the name; the rename replaces an empty directory
            finished.rename(target)
        else:
            os.link(finished, target, follow_symlinks=False)
            finished.unlink()
    except OSError as failed:
        return -1, failed.errno or errno.EIO
    return 0, 0


def remove_directory(root: Path, path: Path, first: str | None = None) -> None:
    """Removes a directory below `root`, if it is there. No symlink on the way to it is followed.

    `first`: a file in it whose removal reaches the disk before anything else is removed. A thread
    gives back the space of large files: see `freed_later`.
    """
    *way, last = path.relative_to(root).parts
    with contextlib.ExitStack() as stack, contextlib.suppress(FileNotFoundError):

        def step(name: str | Path, inside: int | None) -> int:
            follow = 0 if inside is None else os.O_NOFOLLOW
            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | follow
            try:
                opened = os.open(name, flags, dir_fd=inside)
            except NotADirectoryError:
                raise UnsafePath(f"{path}: {name} is a symlink, or no directory") from None
            stack.callback(os.close, opened)
            return opened

        parent = step(root, None)
        for name in way:
            parent = step(name, parent)
        directory = step(last, parent)
        if first is not None:
            # If a directory has that name, rmtree removes it below.
            with contextlib.suppress(FileNotFoundError, IsADirectoryError):
                os.unlink(first, dir_fd=directory)
                os.fsync(directory)
        with freed_later(directory):
            shutil.rmtree(last, ignore_errors=True, dir_fd=parent)
        os.stat(last, dir_fd=parent, follow_symlinks=False)  # FileNotFoundError: it is gone
        wait_until_freed()  # NFS keeps names of open files
        shutil.rmtree(last, ignore_errors=True, dir_fd=parent)


def _in_child() -> None:
    _under_way.clear()
    while not_for_children:
        os.close(not_for_children.pop())


os.register_at_fork(after_in_child=_in_child)


@contextlib.contextmanager
def freed_later(directory: int) -> Iterator[None]:
    """Lets a thread free the large files that the block removes from this directory.

    A file system frees a file's space when its last name and its last descriptor are gone. With
    the mount option `discard` this takes as long as writing: 0.3 s for 256 MiB. So a descriptor
    stays open while the name is removed, and a thread closes it. If the process is killed, the
    kernel closes it.
    """
    held = _held(directory)
    try:
        yield
    finally:
        # An event, not the thread: others may wait before the thread has started.
        done = threading.Event()
        _under_way.add(done)
        work = held, done
        try:
            threading.Thread(
                target=_give_back, args=work, name="sealring-free", daemon=True
            ).start()
        except RuntimeError:  # no more threads are allowed here
            _give_back(*work)


def wait_until_freed() -> None:
    """Waits until the space of all removed files is given back."""
    for done in list(_under_way):
        done.wait()


def _held(directory: int) -> list[int]:
    held: list[int] = []
    with contextlib.suppress(OSError), os.scandir(directory) as found:
        for one in found:
            status = one.stat(follow_symlinks=False)
            if (
                stat.S_ISREG(status.st_mode)
                and status.st_size >= _LARGE_FILE
                and len(held) < _MOST_HELD
            ):
                # O_PATH: the descriptor can neither read nor write the file.
                flags = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
                held.append(os.open(one.name, flags, dir_fd=directory))
                not_for_children.add(held[-1])
    return held


def _give_back(held: list[int], done: threading.Event) -> None:
    try:
        _close_all(held)
    finally:
        _under_way.discard(done)
        done.set()


def _close_all(held: list[int]) -> None:
    for descriptor in held:
        if descriptor in not_for_children:
            not_for_children.remove(descriptor)
            os.close(descriptor)


def check_output(path: Path) -> None:
    if os.path.lexists(path):
        raise in_the_way(path)


def in_the_way(path: object) -> VaultError:
    return VaultError(
        f"{path} is there already and will not be overwritten: move it away, or choose another "
        "place",
        code="vault.output_exists",
    )


def check_inside(path: str) -> PurePosixPath:
    """Returns a path from a manifest if it stays inside its directory; else raises UnsafePath."""
    pure = PurePosixPath(path)
    if not path or "\0" in path or pure.is_absolute() or ".." in pure.parts or str(pure) != path:
        raise UnsafePath(f"{path[:200]!r} leads out of its directory: nothing was written")
    return pure


def make_folders(path: Path) -> None:
    """Makes a folder and its missing parents, all of mode 0700.

    pathlib would make the parents readable for other users.
    """
    for folder in reversed((path, *path.parents)):
        if not folder.is_dir():
            folder.mkdir(mode=0o700, exist_ok=True)


@contextlib.contextmanager
def _lockable(path: Path, flags: int) -> Iterator[int]:
    """Opens a descriptor whose lock ends with the context, even if forked children have copies."""
    try:
        with named(path):
            descriptor = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as problem:
        if problem.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO, errno.ENOTDIR):
            raise UnsafePath(f"{path} is not what a lock is held on: remove it") from None
        raise
    not_for_children.add(descriptor)  # a child would keep the lock if this process were killed
    try:
        yield descriptor
    finally:
        if descriptor in not_for_children:
            not_for_children.remove(descriptor)
            with contextlib.suppress(OSError):  # some file systems have no locks
                fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)


@contextlib.contextmanager
def claim(folder: Path) -> Iterator[None]:
    """Marks a directory as in use by this process, until the context or the process ends."""
    with _lockable(folder, os.O_RDONLY | os.O_DIRECTORY) as descriptor:
        with contextlib.suppress(OSError):  # some network file systems lock no directories
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        yield


def claimed(folder: Path) -> bool:
    """Whether a running process has claimed the directory."""
    with _lockable(folder, os.O_RDONLY | os.O_DIRECTORY) as descriptor:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return False
        except BlockingIOError:
            return True
        except OSError:
            return False


@contextlib.contextmanager
def locked(path: Path, *, shared: bool, wait: bool = True) -> Iterator[None]:
    """Locks a vault: shared to add objects, exclusive to change its keys or to remove objects."""
    seconds = LONGEST_WAIT if wait else 0.0
    deadline = time.monotonic() + seconds
    with _lockable(path, os.O_RDWR | os.O_CREAT) as descriptor:
        while True:
            try:
                fcntl.flock(
                    descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB
                )
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise VaultBusy(
                        f"{path} was held by another process for {seconds:.0f} seconds: wait "
                        "until that has finished, and try again"
                    ) from None
                time.sleep(0.02)
        yield


@contextlib.contextmanager
def unfinished(out: Path) -> Iterator[Path]:
    """Gives a name for the output inside a new directory, which is always removed afterwards.

    In the main thread a signal that ends the process removes it too. What killed processes have
    left of this output is removed first.
    """
    _remove_left(out)
    folder = out.with_name(_name_of(out) + secrets.token_hex(_RANDOM_BYTES))
    with _Ending() as ending:
        try:
            try:
                folder.mkdir(mode=0o700)
                with claim(folder):
                    yield folder / "content"
            finally:
                ending.begin()
        finally:
            # No signal interrupts this: a signal has already raised, or `begin` was called.
            shutil.rmtree(folder, ignore_errors=True)


class _Output(io.FileIO):
    """A file that remembers the error of a failed write."""

    problem: OSError | None = None

    def write(self, data: Any) -> Any:
        try:
            return super().write(data)
        except OSError as problem:
            self.problem = problem
            raise


@contextlib.contextmanager
def new_output(path: Path, out: Path) -> Iterator[Any]:
    """Opens a new file for a library to write, and syncs it. `out`: its later name, for errors.

    On a full disk libraries raise errors of their own; this raises the write's own error instead.
    """
    raw = _Output(os.open(path, NEW_FILE, 0o600), "wb")
    try:
        with io.BufferedWriter(raw) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
    except Exception:
        if raw.problem is None:
            raise
        raise not_written(out, raw.problem) from raw.problem


def _name_of(out: Path) -> str:
    """The start of the names of all unfinished directories of this output."""
    random = "0" * 2 * _RANDOM_BYTES
    return name_beside(out.name, _MARK + random).removesuffix(random)


def _remove_left(out: Path) -> None:
    """Removes this output's directories that no process has locked: their processes have ended."""
    if not out.parent.is_dir():
        return
    for name in os.listdir(out.parent):
        if not name.startswith(_name_of(out)):
            continue
        # It may be another user's, or gone meanwhile, or anyone's file in place of a directory.
        with contextlib.suppress(OSError, UnsafePath):
            if not claimed(out.parent / name):
                shutil.rmtree(out.parent / name, ignore_errors=True)


class _Ending:
    """Turns the first signal that would end the process into an exception.

    Later signals wait until what was written is removed.
    """

    def __init__(self) -> None:
        self._before: dict[int, Any] = {}
        self._begun = False
        self._waiting = 0

    def __enter__(self) -> _Ending:
        if threading.current_thread() is threading.main_thread():
            for one in signal.valid_signals() - _NOT_HANDLED:
                handler = signal.getsignal(one)
                if handler in (signal.SIG_DFL, signal.default_int_handler):
                    self._before[one] = handler
            try:
                for number in self._before:
                    signal.signal(number, self._handle)
            except BaseException:
                self._restore()
                raise
        return self

    def begin(self) -> None:
        """Says that the removal of what was written begins: from now on signals wait."""
        self._begun = True

    def __exit__(self, kind: type[BaseException] | None, *others: object) -> None:
        self._restore()
        if self._waiting and (kind is None or issubclass(kind, Exception)):
            raise _exception(self._waiting)

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: Any) -> None:
        if self._begun:
            self._waiting = self._waiting or number
            return
        self._begun = True
        raise _exception(number)


def _exception(number: int) -> BaseException:
    return KeyboardInterrupt() if number == signal.SIGINT else SystemExit(128 + number)
