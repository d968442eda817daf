"""The works that torch gets for collectives and messages."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from sealring import _native
from sealring.core.engine.failures import timed_out
from sealring.core.engine.flight import MessageEntry
from sealring.core.engine.streams import StreamWait, driver_calls, future_of, last_of_each
from sealring.core.group import profiles
from sealring.core.group.deferred_errors import DeferredError
from sealring.errors import GroupError, PeerSilent

Result = Sequence[torch.Tensor] | Sequence[Sequence[torch.Tensor]]
"""A future's value: a call's tensors, or a list of tensors for each of the call's lists."""


def tensors_of(result: Result) -> list[torch.Tensor]:
    """All tensors of a result, in one list."""
    lists = [[each] if isinstance(each, torch.Tensor) else each for each in result]
    return [tensor for each in lists for tensor in each]


class SealedWork(dist.Work):
    """A call under way; done when every byte of the result has been opened, checked and written.

    The host waits for that, or a GPU's stream waits while the host goes on.
    """

    def __init__(
        self,
        result: Result,
        give_up: Callable[[], None],
        deferred: DeferredError | None = None,
    ) -> None:
        super().__init__()
        self._process = _native.ProcessMark()
        self._result = result
        self.give_up = give_up
        self._waits: tuple[StreamWait, ...] = ()
        """The operations that streams wait for; empty if the host waits."""
        self._deferred = deferred
        self._error: BaseException | None = None
        self._lock = threading.Lock()
        # `pending` is locked until the work is done; waiters acquire it. Every call makes one, and
        # a lock is cheaper than an Event. Each waiter holds it for a moment, so its state does not
        # say whether the work is done; `done` does.
        self.done = False
        self.pending = threading.Lock()
        self.pending.acquire()
        self._on_done: list[Callable[[], None]] = []

    @classmethod
    def of_all(cls, works: Sequence[SealedWork], give_up: Callable[[], None]) -> SealedWork:
        """Returns a work that is done when all `works` are done. Its error is the first of
        theirs."""
        together = SealedWork(
            [tensor for work in works for tensor in tensors_of(work._result)],
            give_up,
            next((work._deferred for work in works if work._deferred is not None), None),
        )
        if all(work._waits for work in works):
            together._waits = last_of_each(wait for work in works for wait in work._waits)
        unfinished = [len(works)]
        counting = threading.Lock()

        def one_less() -> None:
            with counting:
                unfinished[0] -= 1
                if unfinished[0] > 0:
                    return
            failed = (work._error for work in works if work._error is not None)
            together.finish(next(failed, None))

        for work in works:
            work.when_done(one_less)
        if not works:
            together.finish()
        return together

    def complete_on_stream(self, wait: StreamWait) -> None:
        """Makes streams wait for the work. The host then waits only in a wait() with a timeout."""
        self._waits = (wait,)

    @property
    def completes_on_stream(self) -> bool:
        return bool(self._waits)

    @property
    def awaited_by_stream(self) -> bool:
        """Whether a stream waits for the work. The script then treats it as done."""
        return any(wait.awaited for wait in self._waits)

    def stand_for(self, result: Result) -> None:
        """Makes `result` the work's result: that of earlier calls, too, which are done before
        it."""
        self._result = result

    def when_done(self, callback: Callable[[], None]) -> None:
        """Calls `callback` once: on the thread that finishes the work, or at once if it is done."""
        with self._lock:
            done = self.done
            if not done:
                self._on_done.append(callback)
        if done:
            callback()

    def finish(self, error: BaseException | None = None) -> None:
        """Called once, by the thread that ran the collective."""
        with self._lock:
            self._error = error
            self.done = True
            self.pending.release()
            callbacks, self._on_done = self._on_done, []
        for callback in callbacks:
            callback()

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        if not self._waits:
            return self._block(timeout)
        if timeout > timedelta(0) or self.done:
            self._block(timeout)  # raises the work's error
        # Also when it is done: the GPU may still have to copy the result.
        for each in self._waits:
            each.begin()
        # It may have failed just before the stream began to wait, without deferring the error.
        return not self.done or self._block(timeout)

    def _block(self, timeout: timedelta) -> bool:
        if not self.done:
            self._process.require("this work")  # no thread would finish it in a forked child
        limit = timeout.total_seconds() if timeout > timedelta(0) else -1
        try:
            in_time = self.pending.acquire(timeout=limit)
        except BaseException:  # Ctrl-C, or an exception of the script's signal handler
            self.end_at_once()
            raise
        if not in_time:
            self.end_at_once()
            self._tell()
            raise PeerSilent(
                f"{timed_out(limit)}the collective was not done {limit:g} s after wait() "
                f"began{self._which()}. The group is closed. A rank hangs, is stopped or is cut "
                "off; if it is only slow, wait longer.",
                collective=self._error.collective if isinstance(self._error, GroupError) else None,
            )
        self._release_waiters()
        if self._error is not None:
            self._tell()
            raise self._error
        return True

    def settle(self) -> None:
        """Waits until the work is done; does not raise its error."""
        if not self.done:
            self._process.require("this work")
        self.pending.acquire()
        self._release_waiters()

    def _tell(self) -> None:
        """Clears the deferred error, because the script gets the error now."""
        if self._deferred is not None:
            self._deferred.clear()

    def end_at_once(self) -> None:
        """Ends the group, because the script goes on without the result.

        Then waits for the end of the collective, which may still write to the memory.
        """
        self.give_up()
        # The interrupt may have come just after wait() acquired the lock; then the work is done.
        if not self.done:
            self.pending.acquire()
        self._release_waiters()

    def _release_waiters(self) -> None:
        """Releases `pending` for the other waiters. Only called when the work is done."""
        with suppress(RuntimeError):
            self.pending.release()

    def _which(self) -> str:
        known = isinstance(self._error, GroupError) and self._error.collective
        return f" (collective {known})" if known else ""

    def is_completed(self) -> bool:
        return self.done and all(wait.operation.done for wait in self._waits)

    def is_success(self) -> bool:
        return self.is_completed() and self._error is None

    def exception(self) -> BaseException | None:
        if self._error is not None:
            self._tell()
        return self._error

    def result(self) -> list[torch.Tensor]:
        return tensors_of(self._result)

    def synchronize(self) -> None:
        self.wait()

    def block_current_stream(self) -> None:
        # Torch's own method waits for the future, which is done at once if streams wait.
        self.wait()

    def get_future(self) -> torch.futures.Future[Result]:
        if self._waits and self._error is None:
            # If the call fails later, its error is deferred: DDP's C++ does not wait for it.
            done = future_of(self._waits, self._result)
            if self._error is None:
                return done
        devices = {tensor.device for tensor in tensors_of(self._result) if tensor.is_cuda}
        future: torch.futures.Future[Any] = torch.futures.Future(devices=list(devices))

        def resolve() -> None:
            try:
                if self._error is None:
                    future.set_result(self._result)
                else:
                    future.set_exception(self._error)
            finally:
                driver_calls.end()

        # A callback may call a collective, which then runs before the calls that the script has
        # queued meanwhile. So on every rank none of those may be launched ahead.
        driver_calls.begin()
        self.when_done(resolve)
        # DDP's C++ reads a future's value without asking for its error. It would take an exception
        # that Python has set for tensors. An exception that a callback raises becomes a C++ error
        # of the new future, and DDP rethrows that in backward().
        return future.then(lambda done: done.wait())


def _nothing_is_under_way() -> None:
    pass


class FinishedWork(SealedWork):
    """The work of a call that succeeded before its work was made. It needs no lock.

    Every small call makes one, so its construction must be fast: `__init__` is torch's, and the
    attributes are on the class. `stand_for` sets its result.
    """

    __init__ = dist.Work.__init__

    _waits = ()
    _deferred: DeferredError | None = None
    _error: BaseException | None = None
    done = True
    give_up = staticmethod(_nothing_is_under_way)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        return True

    def when_done(self, callback: Callable[[], None]) -> None:
        callback()

    def settle(self) -> None:
        pass

    def _block(self, timeout: timedelta) -> bool:
        return True


class FailedWork(FinishedWork):
    """The work of a call that failed before its work was made."""

    def __init__(self, result: Result, error: BaseException, deferred: DeferredError) -> None:
        dist.Work.__init__(self)
        self._result = result
        self._error = error
        self._deferred = deferred

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        return self._block(timeout)

    def _block(self, timeout: timedelta) -> bool:
        assert self._error is not None
        self._tell()
        raise self._error


class MessageWork(SealedWork):
    """A message under way; done when its memory may be used again."""

    def __init__(
        self,
        result: list[torch.Tensor],
        entry: MessageEntry,
        give_up: Callable[[], None],
        drive: Callable[[MessageWork], None],
        deferred: DeferredError,
    ) -> None:
        """`drive` moves the group's messages until this one is done."""
        super().__init__(result, give_up, deferred)
        self.entry = entry
        self._drive = drive
        self.on_success: Callable[[], None] | None = None
        """Copies the message to the user's tensor, if it could not be written there directly."""
        self._source = -1
        self.message: _native.Completion | None = None
        self.kept: tuple[object, ...] = ()
        """Objects to keep as long as the work: the message's memory, its storage, its stream's
        event.

        The storage is kept, too, because the script may give the tensor other memory meanwhile.
        """
        self._group: object = None

    def keep_group(self, group: object) -> None:
        """Keeps the group alive until the message is done: it would close with its last
        reference."""
        self._group = group
        self.when_done(self._drop_group)

    def _drop_group(self) -> None:
        self._group = None

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        # A wait() with a timeout only watches: the group's thread moves the messages.
        if not self._waits and timeout <= timedelta(0) and not self.is_completed():
            with profiles.message_shown(self.entry, waiting=True):
                self._drive(self)
        return super().wait(timeout)

    def arrived(self, peer: int) -> None:
        self._source = peer
        problem: BaseException | None = None
        try:
            if self.on_success is not None:
                self.on_success()
        except Exception as raised:  # the caller of wait() gets it, whatever it is
            problem = raised
        self.finish(problem)

    def _source_rank(self) -> int:
        return self._source

    source_rank = _source_rank
