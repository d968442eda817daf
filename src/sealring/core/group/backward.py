"""Makes backward() raise the exception of a failed collective, and end at Ctrl-C.

DDP waits for its all-reduces in C++, inside the autograd engine. Torch converts an error there into
a RuntimeError with our text but not our type, so `except sealring.errors.PeerLost` would not catch
it. The engine object that `backward()` uses is an attribute of a torch class, and this module
replaces it. The replacement behaves like torch's engine, with three additions: it raises the
original exception, it raises deferred errors (deferred_errors.py), and Ctrl-C interrupts its wait.

During that wait, Python's signal handler only records the signal for the time when the main thread
runs Python again. With a dead peer that would be at the timeout. So during a backward pass Python
also writes each signal's number into a pipe. A thread reads the pipe and interrupts all groups: the
collective fails, C++ returns, and Python raises KeyboardInterrupt.

This is done only for SIGINT with Python's default handler, because only then the script certainly
ends. A script's own handler may just set a flag, and must not cost the group; such a handler runs
when the collective has ended.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final, Protocol

from torch.autograd import Variable

from sealring.core.engine.failures import unraised
from sealring.core.group.deferred_errors import raise_deferred_errors
from sealring.errors import GroupError

_recent_failures: Final[deque[GroupError]] = deque(maxlen=16)


def remember(failure: BaseException) -> None:
    """Keeps a collective's failure for the backward pass that may be waiting for it."""
    if isinstance(failure, GroupError):
        _recent_failures.append(unraised(failure))


def restore_errors_in_backward() -> None:
    """Replaces torch's engine object, once per process. Called when a group is made."""
    if not isinstance(Variable._execution_engine, _RestoringEngine):
        Variable._execution_engine = _RestoringEngine()


class _RestoringEngine(type(Variable._execution_engine)):  # type: ignore[misc]
    def run_backward(self, *arguments: Any, **options: Any) -> Any:
        try:
            with heeding_interrupts():
                gradients = super().run_backward(*arguments, **options)
        except RuntimeError as error:
            text = str(error)
            for failure in reversed(_recent_failures):
                if str(failure) in text:
                    raise failure from error
            raise
        raise_deferred_errors()
        return gradients


# ---- Ctrl-C


_LOG = logging.getLogger("sealring")


class Interruptible(Protocol):
    def interrupt(self) -> None: ...


_under_way: Final[weakref.WeakSet[Interruptible]] = weakref.WeakSet()
# A forked child is not a member of its parent's groups.
os.register_at_fork(after_in_child=_under_way.clear)
_lock: Final = threading.Lock()
_pipe: tuple[int, int] | None = None
_owner = 0
"""The process id of the pipe's reading thread. A forked child inherits the pipe but no thread."""


def interrupt_on_signal(engine: Interruptible) -> None:
    """Registers a group's engine, so that SIGINT interrupts it as long as the engine exists."""
    _under_way.add(engine)


@contextmanager
def heeding_interrupts() -> Iterator[None]:
    """Within it, on the main thread, SIGINT ends collectives that other threads run."""
    wanted = (
        threading.current_thread() is threading.main_thread()
        and len(_under_way) > 0
        and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    )
    if not wanted:
        yield
        return
    try:
        ours = _writing_end()
    except (OSError, RuntimeError) as problem:  # no descriptor or no thread is left
        _LOG.warning("sealring: Ctrl-C ends no backward() before its collective: %s", problem)
        yield
        return
    before = signal.set_wakeup_fd(ours, warn_on_full_buffer=False)
    if before != -1:
        # Something else (an event loop) reads signals in this way: leave it to that.
        signal.set_wakeup_fd(before)
        yield
        return
    try:
        yield
    finally:
        signal.set_wakeup_fd(-1)


def _writing_end() -> int:
    global _pipe, _owner
    with _lock:
        if _pipe is None or _owner != os.getpid():
            made = os.pipe2(os.O_CLOEXEC)
            os.set_blocking(made[1], False)
            try:
                threading.Thread(
                    target=_watch,
                    args=(made[0], _interrupt_all),
                    name="sealring-signals",
                    daemon=True,
                ).start()
            except BaseException:
                for descriptor in made:
                    os.close(descriptor)
                raise
            _pipe, _owner = made, os.getpid()
        return _pipe[1]


def _watch(reading_end: int, act: Callable[[], None]) -> None:
    while numbers := os.read(reading_end, 64):
        if signal.SIGINT in numbers:
            act()


def _interrupt_all() -> None:
    for engine in list(_under_way):
        with suppress(Exception):
            engine.interrupt()
