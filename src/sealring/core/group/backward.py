"""DDP's backward pass ends with the exception that a collective raised, and with Ctrl-C.

DDP waits for its all-reduces in C++, inside the autograd engine, and torch turns whatever fails
there into a RuntimeError that has our text but not our type: `except sealring.errors.PeerLost`
would not see it. The engine object that `backward()` calls is a plain attribute of torch's; ours
is torch's own with three additions: on the way out it puts the original exception back, and raises
a deferred error (deferred_errors.py), and while it waits Ctrl-C gets through.

Python's own handler only notes the signal there, for when the main thread runs Python again; with a
dead peer that is at the timeout. So while a backward pass runs, Python also writes each signal's
number into a pipe, and a thread that reads it interrupts the groups under way: the collective
fails, C++ returns, and the KeyboardInterrupt is raised.

Only SIGINT with Python's own handler, because only then is it certain that the script wants to
end. A handler of the script's may do no more than set a flag, and losing the group for that would
be wrong; it runs when the collective has ended.
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
    """Keep a collective's failure for the backward pass that may be waiting for it."""
    if isinstance(failure, GroupError):
        _recent_failures.append(unraised(failure))


def restore_errors_in_backward() -> None:
    """Called when a group is made; once per process is enough."""
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
# A forked child has no part in its parent's groups.
os.register_at_fork(after_in_child=_under_way.clear)
_lock: Final = threading.Lock()
_pipe: tuple[int, int] | None = None
_owner = 0
"""The process that the pipe's reader lives in; a forked child has the pipe and no reader."""


def interrupt_on_signal(engine: Interruptible) -> None:
    """Called once for each group, which is forgotten with its engine."""
    _under_way.add(engine)


@contextmanager
def heeding_interrupts() -> Iterator[None]:
    """In it, on the main thread, SIGINT ends collectives that other threads run."""
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
        # Somebody (an event loop) reads signals in the same way: it stays with that.
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
