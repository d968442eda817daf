"""Collectives and messages under way, as torch sees them."""

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
"""What a future holds: a call's tensors, or a list of them for each of its lists."""


def tensors_of(result: Result) -> list[torch.Tensor]:
    """All of a result's, in one list."""
    lists = [[each] if isinstance(each, torch.Tensor) else each for each in result]
    return [tensor for each in lists for tensor in each]


class SealedWork(dist.Work):
    """Done when every byte of the result has been opened, checked and written.

    The host waits for that, or a GPU's stream does while the host goes on.
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
        """What streams wait for; empty where the host waits."""
        self._deferred = deferred
        self._error: BaseException | None = None
        self._lock = threading.Lock()
        # What waiters sleep on: locked until the work is done. A lock costs less than an Event, and
        # every call makes one. Waiters hold it for a moment each, so it does not say whether the
        # work is done; the flag does.
        self.done = False
        self.pending = threading.Lock()
        self.pending.acquire()
        self._on_done: list[Callable[[], None]] = []

    @classmethod
    def of_all(cls, works: Sequence[SealedWork], give_up: Callable[[], None]) -> SealedWork:
        """Done when all of them are, with the first error among theirs."""
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
        """Streams wait for the work, and the host only with a time limit."""
        self._waits = (wait,)

    @property
    def completes_on_stream(self) -> bool:
        return bool(self._waits)

    @property
    def awaited_by_stream(self) -> bool:
        """A stream waits for it, so the script takes the work for done."""
        return any(wait.awaited for wait in self._waits)

    def stand_for(self, result: Result) -> None:
        """Take the results of the calls before this one for its own; they are done first."""
        self._result = result

    def when_done(self, callback: Callable[[], None]) -> None:
        """Calls back once, from the thread that finishes the work, or at once if it is done."""
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
            self._block(timeout)  # raises its error
        # Also when it is done: what copies the result may still be to come on the GPU.
        for each in self._waits:
            each.begin()
        # It may have failed meanwhile, before it was known that a stream waits for it.
        return not self.done or self._block(timeout)

    def _block(self, timeout: timedelta) -> bool:
        if not self.done:
            self._process.require("this work")  # a forked child has no thread that would finish it
        limit = timeout.total_seconds() if timeout > timedelta(0) else -1
        try:
            in_time = self.pending.acquire(timeout=limit)
        except BaseException:  # Ctrl-C, or what a script's handler of a signal raised
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
        """Returns when it is done, however it ended."""
        if not self.done:
            self._process.require("this work")
        self.pending.acquire()
        self._release_waiters()

    def _tell(self) -> None:
        """The script gets the error now, so it need not be deferred."""
        if self._deferred is not None:
            self._deferred.clear()

    def end_at_once(self) -> None:
        """The script goes on without the result: close the group, as a synchronous call does.

        The memory is still being written until the collective has ended.
        """
        self.give_up()
        # An interrupt may have come just when wait() had got the lock; then the work is done.
        if not self.done:
            self.pending.acquire()
        self._release_waiters()

    def _release_waiters(self) -> None:
        """Leaves the lock open once the work is done; any of the waiters may do this."""
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
        # Torch's own would wait for the future, which says nothing where the stream waits.
        self.wait()

    def get_future(self) -> torch.futures.Future[Result]:
        if self._waits and self._error is None:
            # Its error, if there will be one, is deferred: DDP's C++ would not wait for it anyway.
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

        # A callback may call a collective, which then runs before all that the script has called
        # meanwhile. So nothing of that may be launched ahead, on any rank.
        driver_calls.begin()
        self.when_done(resolve)
        # DDP's C++ reads a future's value without asking for its error: an exception set from
        # Python is invisible to it, and it would take the exception object for tensors. One raised
        # in a callback is a C++ error of the new future, which DDP rethrows in backward().
        return future.then(lambda done: done.wait())


def _nothing_is_under_way() -> None:
    pass


class FinishedWork(SealedWork):
    """Of a call that went well before its work was made: nothing waits for it, so it has no lock.

    Every small call makes one. So it is made by torch alone, and all that these works share is
    on the class; `stand_for` gives it its results.
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
    """The same of a call that failed."""

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
        """Copies the message to where the user wants it, if it could not be written there."""
        self._source = -1
        self.message: _native.Completion | None = None
        self.kept: tuple[object, ...] = ()
        """Alive until the work goes: the message's memory, its storage, the event of its stream.

        The storage too, because the script may give the tensor other memory meanwhile.
        """
        self._group: object = None

    def keep_group(self, group: object) -> None:
        """A group closes with its last reference, so a message under way refers to it."""
        self._group = group
        self.when_done(self._drop_group)

    def _drop_group(self) -> None:
        self._group = None

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        # With a limit of its own it only watches: the group's thread drives the traffic.
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
