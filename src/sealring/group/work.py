"""A collective in the queue, as torch sees it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from sealring import _native
from sealring.engine.failures import timed_out
from sealring.errors import GroupError, PeerSilent
from sealring.group.gates import AnyGate, completed
from sealring.group.message_gates import all_of
from sealring.group.owed import OwedError


class SealedWork(dist.Work):
    """Done when every byte of the result has been opened, checked and written.

    The host waits for that, or a GPU's stream does while the host goes on.
    """

    def __init__(
        self,
        result: list[torch.Tensor],
        give_up: Callable[[], None],
        gate: AnyGate | None = None,
        owed: OwedError | None = None,
    ) -> None:
        """With a gate, streams wait for the work, and the host only where it is given a time."""
        super().__init__()
        self._process = _native.ProcessMark()
        self._result = result
        self.give_up = give_up
        self._gate = gate
        self._owed = owed
        self._error: BaseException | None = None
        self._lock = threading.Lock()
        # What waiters sleep on: locked until the work is done. A lock costs less than an Event, and
        # every call makes one. Waiters hold it for a moment each, so it does not say whether the
        # work is done; the flag does.
        self._done = False
        self._pending = threading.Lock()
        self._pending.acquire()
        self._on_done: list[Callable[[], None]] = []

    @classmethod
    def of_all(cls, works: Sequence[SealedWork], give_up: Callable[[], None]) -> SealedWork:
        """Done when all of them are, with the first error among theirs."""
        together = SealedWork(
            [tensor for work in works for tensor in work._result],
            give_up,
            all_of(work._gate for work in works),
            next((work._owed for work in works if work._owed is not None), None),
        )
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

    def stand_for(self, result: list[torch.Tensor]) -> None:
        """Take the results of the calls before this one for its own; they are done first."""
        self._result = result

    def when_done(self, callback: Callable[[], None]) -> None:
        """Calls back once, from the thread that finishes the work, or at once if it is done."""
        with self._lock:
            done = self._done
            if not done:
                self._on_done.append(callback)
        if done:
            callback()

    def finish(self, error: BaseException | None = None) -> None:
        """Called once, by the thread that ran the collective."""
        with self._lock:
            self._error = error
            self._done = True
            self._pending.release()
            callbacks, self._on_done = self._on_done, []
        for callback in callbacks:
            callback()

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        if self._gate is None or not self._gate.holds:
            return self._block(timeout)
        if timeout > timedelta(0) or self._done:
            self._block(timeout)  # raises its error
        # Also when it is done: what copies the result may still be to come on the GPU.
        self._gate.hold()
        # It may have failed meanwhile, and nobody have seen that a stream waits for it.
        return not self._done or self._block(timeout)

    def _block(self, timeout: timedelta) -> bool:
        if not self._done:
            self._process.require("this work")  # a forked child has no thread that would finish it
        limit = timeout.total_seconds() if timeout > timedelta(0) else -1
        try:
            in_time = self._pending.acquire(timeout=limit)
        except BaseException:  # Ctrl-C, or what a script's handler of a signal raised
            self._end_at_once()
            raise
        if not in_time:
            self._end_at_once()
            self._tell()
            raise PeerSilent(
                f"{timed_out(limit)}the collective was not done {limit:g} s after wait() "
                f"began{self._which()}. The group is closed. A rank hangs, is stopped or is cut "
                "off; if it is only slow, wait longer.",
                collective=self._error.collective if isinstance(self._error, GroupError) else None,
            )
        self._let_others_by()
        if self._error is not None:
            self._tell()
            raise self._error
        return True

    def settle(self) -> None:
        """Returns when it is done, however it ended."""
        if not self._done:
            self._process.require("this work")
        self._pending.acquire()
        self._let_others_by()

    def _tell(self) -> None:
        """The script gets the error now, so nobody owes it to him any more."""
        if self._owed is not None:
            self._owed.told()

    def _end_at_once(self) -> None:
        """The script goes on without the result: close the group, as a synchronous call does.

        The memory is still being written until the collective has ended.
        """
        self.give_up()
        # An interrupt may have come just when wait() had got the lock; then the work is done.
        if not self._done:
            self._pending.acquire()
        self._let_others_by()

    def _let_others_by(self) -> None:
        """The work is done, so the lock is to be open, whoever of the waiters opens it."""
        with suppress(RuntimeError):
            self._pending.release()

    def _which(self) -> str:
        known = isinstance(self._error, GroupError) and self._error.collective
        return f" (collective {known})" if known else ""

    def is_completed(self) -> bool:
        return self._done and (self._gate is None or self._gate.is_over())

    def is_success(self) -> bool:
        return self.is_completed() and self._error is None

    def exception(self) -> BaseException | None:
        if self._error is not None:
            self._tell()
        return self._error

    def result(self) -> list[torch.Tensor]:
        return self._result

    def synchronize(self) -> None:
        self.wait()

    def block_current_stream(self) -> None:
        # Torch's own would wait for the future, which says nothing where a gate holds the stream.
        self.wait()

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        if self._gate is not None and self._gate.holds and self._error is None:
            # Its error, if there will be one, is owed: DDP's C++ would not wait for it anyway.
            done = completed(self._gate, self._result)
            if self._error is None:
                return done
        devices = {tensor.device for tensor in self._result if tensor.is_cuda}
        future: torch.futures.Future[Any] = torch.futures.Future(devices=list(devices))

        def resolve() -> None:
            if self._error is None:
                future.set_result(self._result)
            else:
                future.set_exception(self._error)

        self.when_done(resolve)
        # DDP's C++ reads a future's value without asking for its error: an exception set from
        # Python is invisible to it, and it would take the exception object for tensors. One raised
        # in a callback is a C++ error of the new future, which DDP rethrows in backward().
        return future.then(lambda done: done.wait())
