"""Plaintext that is not finished: beside its output, found again if its process was killed."""

from __future__ import annotations

import contextlib
import io
import os
import secrets
import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from sealring.errors import UnsafePath
from sealring.formats.files import NEW_FILE, name_beside, not_written
from sealring.vault.files import claim, claimed

_MARK: Final = ".sealring-unfinished-"
_RANDOM_BYTES: Final = 8
_OTHERS: Final = frozenset(
    {
        # They cannot be handled, or do not end a process.
        signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD, signal.SIGCONT, signal.SIGTSTP,
        signal.SIGTTIN, signal.SIGTTOU, signal.SIGURG, signal.SIGWINCH,
        # A program that caused one of these cannot go on, not even to clean up.
        signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT,
        signal.SIGTRAP, signal.SIGSYS,
    }
)  # fmt: skip


@contextlib.contextmanager
def unfinished(out: Path) -> Iterator[Path]:
    """A name for the output in a directory of its own, which is removed afterwards in any case.

    A signal that ends the process removes it too, in the main thread. What a process that was
    killed has left of this output is removed first.
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
            # No signal interrupts this: one has raised already, or `begin` was called.
            shutil.rmtree(folder, ignore_errors=True)


class _Output(io.FileIO):
    """Remembers why it could not be written."""

    problem: OSError | None = None

    def write(self, data: Any) -> Any:
        try:
            return super().write(data)
        except OSError as problem:
            self.problem = problem
            raise


@contextlib.contextmanager
def new_output(path: Path, out: Path) -> Iterator[Any]:
    """A new file for a library to write, then on the disk. `out`: what it will be called.

    On a full disk libraries raise errors of their own, about a format or about what they read.
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
    """How all names begin under which this output is not finished."""
    random = "0" * 2 * _RANDOM_BYTES
    return name_beside(out.name, _MARK + random).removesuffix(random)


def _remove_left(out: Path) -> None:
    """Removes the directories of this output whose processes have ended: they hold no lock."""
    if not out.parent.is_dir():
        return
    for name in os.listdir(out.parent):
        if not name.startswith(_name_of(out)):
            continue
        # It is another's, gone meanwhile, or no directory, which anyone may have put there.
        with contextlib.suppress(OSError, UnsafePath):
            if not claimed(out.parent / name):
                shutil.rmtree(out.parent / name, ignore_errors=True)


class _Ending:
    """Signals that would end the process at once raise an exception instead, the first of them.

    Those that follow wait until what was written is removed.
    """

    def __init__(self) -> None:
        self._before: dict[int, Any] = {}
        self._begun = False
        self._waiting = 0

    def __enter__(self) -> _Ending:
        if threading.current_thread() is threading.main_thread():
            for one in signal.valid_signals() - _OTHERS:
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
        """What was written is removed from now on."""
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
