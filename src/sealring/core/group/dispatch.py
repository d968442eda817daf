"""The thread of a group that runs its collectives in the order of the calls.

DDP calls all_reduce on the thread that computes the backward pass. The call must return at once, so
that communication and computation overlap.
"""

from __future__ import annotations

import functools
import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from sealring import _native
from sealring.core.engine.collective import Collective
from sealring.core.engine.engine import CollectiveEngine
from sealring.core.engine.failures import failure_of, unraised
from sealring.core.engine.flight import FlightRecorder
from sealring.core.engine.streams import StreamCaller, StreamWait
from sealring.core.group import profiles
from sealring.core.group.backward import remember
from sealring.core.group.deferred_errors import DeferredError
from sealring.core.group.work import SealedWork
from sealring.core.schedule import Operation
from sealring.errors import GroupClosed, GroupError, SealringError, Unsupported, named

_TOLD: Final = 300
"""How many characters of an exception's text the other ranks get."""
_CALLBACK: Final = 0
"""The number of every call that a future's callback makes. Such a call is never queued."""


@dataclass(slots=True)
class Job:
    """One call of the script, or of the group itself."""

    name: str
    collectives: Collective | Iterable[Collective]
    """Usually one. If there are several, each has ended before the iterator is asked for the
    next."""
    timeout_s: float
    work: SealedWork
    kept: tuple[object, ...] = ()
    """Objects to keep until the call is done: its tensors, the CUDA event, and the tensors'
    storages, because the script may meanwhile give a tensor other memory (`.data = ...`)."""
    on_success: Callable[[], None] | None = None
    """Copies the result to the user's tensors, if it could not be written there directly."""
    called: Operation | None = None
    """The operation that the script called, for the count of calls; None for a call of the
    group."""
    stream: StreamCaller | None = None
    """The caller, if streams wait for the call; None if the host waits or polls."""
    submitted: _native.Completion | None = None
    """The completion that streams wait for; set when the call is queued."""

    @property
    def known(self) -> Collective | None:
        """The call's collective if it has only one, which is then known in advance; else None."""
        return self.collectives if isinstance(self.collectives, Collective) else None


class Dispatcher:
    def __init__(
        self,
        engine: CollectiveEngine,
        label: str,
        recorder: FlightRecorder,
        on_failure: Callable[[GroupError], GroupError],
        deferred: DeferredError,
    ) -> None:
        """`on_failure` ends the group's messages, and returns the error that the group ended
        with."""
        self._process = _native.ProcessMark()
        self._engine = engine
        self._recorder = recorder
        self._on_failure = on_failure
        self._deferred = deferred
        self._failure: GroupError | None = None
        self.submitting = threading.Lock()
        self.turn = threading.Lock()
        """Held while a collective runs; acquired in the order of the calls.

        Use it only in a `with` statement: with acquire() and try, an interrupt between the two
        would leave it locked.
        """
        self._running_thread: int | None = None
        """The thread that holds `turn`. A future's callback runs on it, before `turn` is
        released."""
        self._closed = False
        self._submitted = 0
        self._finished = 0
        self._ran = 0
        """How many collectives ran. This numbers the collectives, equally on all ranks."""
        self._jobs: queue.SimpleQueue[tuple[int, Job] | None] = queue.SimpleQueue()
        self._at_end: Callable[[], None] | None = None
        self._thread = threading.Thread(target=self._loop, name=f"sealring {label}", daemon=True)
        self._thread.start()

    @property
    def submitted(self) -> int:
        """How many jobs were queued or run, without those of callbacks."""
        return self._submitted

    def submit(self, job: Job, *, wait: bool) -> None:
        """Queues the job. With `wait`, may instead run it at once on the caller's thread.

        A caller that waits anyway is then spared two thread switches, which take longer than a
        small collective.

        A collective that a future's callback calls runs at once, before all that are queued. No
        other thread could run it: PowerSGD's callbacks wait for theirs. The order is then also the
        same on all ranks, while it is chance whether a rank has already queued the next bucket. (If
        the future is done when the callback is attached, the caller runs the callback at once,
        before it calls anything else.)
        """
        if self.runs_here:
            if self._engine.runs_here:
                raise Unsupported(
                    f"{job.name}: the handler of a signal cannot call a collective while its "
                    "thread waits in one of the same group. Let the handler set a flag, and make "
                    "the call when the collective has returned."
                )
            self._run(_CALLBACK, job)
            return
        # Streams can wait only for what another thread runs.
        if wait and self.idle and job.stream is None:
            with self.turn:
                if (call := self._begin_at_once(job)) is not None:
                    self._run_called(call, job)
                    return
        with self.submitting:
            self._require_open()
            if job.stream is None:
                self._queue(job)
            else:
                assert job.known is not None
                queue_it = functools.partial(self._queue_ahead, job, job.stream)
                self._engine.submit_ahead(job.known, job.stream, queue_it)

    def _queue_ahead(self, job: Job, stream: StreamCaller, submitted: _native.Completion) -> None:
        """Lets streams wait for the job from now on, if they can; then queues it."""
        if submitted.streams_wait:
            job.submitted = submitted
            job.on_success = None  # the engine queues the copy on the GPU instead
            job.work.complete_on_stream(StreamWait(stream.streams, submitted, in_order=True))
        self._queue(job)

    def _queue(self, job: Job) -> None:
        call = self._count(job)
        with profiles.shown(job.name, job.known, self._engine):
            self._jobs.put((call, job))

    def _begin_at_once(self, job: Job) -> int | None:
        """Returns the call's number, or None if other calls were queued meanwhile.

        The calling thread must hold `turn`.
        """
        with self.submitting:
            self._require_open()
            return self._count(job) if self.idle else None

    def _require_open(self) -> None:
        if self._closed:
            raise GroupClosed("this process group was destroyed. Make a new one.")

    def _count(self, job: Job) -> int:
        self._submitted += 1
        if job.known is not None:
            self._recorder.queued(self._submitted, job.known)
        return self._submitted

    def run_again(
        self, call: _native.Call, like: Collective, address: int, timeout_s: float
    ) -> BaseException | bool:
        """Runs a prepared call on the caller's thread. Returns True on success, else the error.

        Returns False, and does nothing, if another call is queued or under way. This is a faster
        `submit` for callers that wait: it leaves out what is needed only if another thread may run
        the call.
        """
        thread = threading.get_ident()
        if self._running_thread == thread or self._finished != self._submitted:
            return False
        # `with`, and counting within `try`, because an interrupt may come between any two calls.
        with self.turn:
            number, ended = 0, self._ran
            try:
                with self.submitting:
                    if self._closed or self._finished != self._submitted:
                        return False
                    number = self._submitted = self._submitted + 1
                self._running_thread = thread
                self._ran += 1
                self._recorder.started(number, self._ran, like)
                self._engine.run_again(self._ran, call, address, timeout_s, like.operation)
                ended = self._ran
                self._recorder.ended(None)
                self._recorder.call_done(like.operation)
                return True
            except BaseException as raised:
                error = self._settled(raised, ended)
                self._recorder.ended(error)
                return error
            finally:
                self._finished += number != 0
                self._running_thread = None

    @property
    def failure(self) -> GroupError | None:
        """The error with which a collective ended the group, if one did."""
        return None if self._failure is None else unraised(self._failure)

    @property
    def runs_here(self) -> bool:
        """Whether this thread runs a collective: the caller is a future's callback or a signal
        handler."""
        return self._running_thread == threading.get_ident()

    @property
    def idle(self) -> bool:
        """Whether every call is done."""
        return self._finished == self._submitted

    def close(self, *, abort: bool = False) -> None:
        """Runs all queued calls, or with `abort` interrupts them; then stops the thread.

        If this is called during a collective on the same thread, it does not wait for the end.
        """
        if abort:
            # Before the lock: a caller that launches kernels ahead may hold it.
            self._engine.interrupt()
        with self.submitting:
            closed, self._closed = self._closed, True
        if not closed:
            self._jobs.put(None)
        if threading.current_thread() is not self._thread and not self.runs_here:
            self._thread.join()

    def abandon(self, at_end: Callable[[], None]) -> None:
        """Closes the dispatcher of a dropped group, without waiting and without taking a lock.

        `at_end` is called on the group's thread, unless the group was closed before.
        """
        self._at_end = at_end
        self._jobs.put(None)  # safe in a garbage collection, as a SimpleQueue's put is

    def _loop(self) -> None:
        while (entry := self._jobs.get()) is not None:
            with self.turn:
                self._run_called(*entry)
            # An idle thread must not keep the last reference to a tensor.
            del entry
        with self.turn:
            self._engine.close()
            self._recorder.close()
        if self._at_end is not None:
            self._at_end()
            self._at_end = None

    def _run_called(self, call: int, job: Job) -> None:
        self._running_thread = threading.get_ident()
        try:
            self._run(call, job)
        finally:
            self._running_thread = None

    def _run(self, call: int, job: Job) -> None:
        error: BaseException | None = None
        ended = self._ran
        try:
            with profiles.shown(job.name, job.known, self._engine):
                for collective in _steps(job):
                    self._ran += 1
                    self._recorder.started(call, self._ran, collective)
                    self._engine.run(self._ran, collective, job.timeout_s, job.submitted)
                    ended = self._ran
                    self._recorder.ended(None)
            if job.on_success is not None:
                job.on_success()
            if job.called is not None:
                self._recorder.call_done(job.called)
        except BaseException as raised:  # any error: the waiter of this work gets it
            error = self._settled(raised, ended)
        try:
            if error is not None:
                self._recorder.ended(error)
        finally:  # Ctrl-C may come while the recorder is written
            self._release_streams(job, error)
            self._finished += call != _CALLBACK
            job.work.finish(error)

    def _settled(self, raised: BaseException, ended: int) -> BaseException:
        """Ends the group if the error requires it; returns the error that the waiter gets.

        `ended` is the number of the last collective that has ended. If a later one was under way,
        the other ranks wait in it for this rank, so the group ends.
        """
        if isinstance(raised, GroupError):
            if raised.native is None:  # found here, between two collectives: tell the other ranks
                self._engine.fail(failure_of(raised))
            self._engine.close_links(unraised(raised))
            raised = self._on_failure(raised)
            self._failure = unraised(raised)
        elif ended != self._ran or not isinstance(raised, Exception):
            # Ctrl-C, or an exception of a signal handler, between two lines of this code.
            self._end_interrupted(raised)
        remember(raised)
        return raised

    def _end_interrupted(self, by: BaseException) -> None:
        if self._process.here:
            what = f": {named(by)}: {by}"[:_TOLD] if isinstance(by, Exception) else ""
            interrupted = GroupClosed(f"the script was interrupted{what}")
            self._engine.fail(failure_of(interrupted))
            self._failure = unraised(self._on_failure(interrupted))

    def _release_streams(self, job: Job, error: BaseException | None) -> None:
        """Lets waiting streams go on: they find the result or, after an error, NaN."""
        if job.stream is None or job.submitted is None:
            return
        if error is not None:
            self._deferred.defer(error)  # first, so that a script that sees NaN finds the error
            self._engine.release_streams(job.submitted)
        job.stream.streams.free_later(job)


def _steps(job: Job) -> Iterable[Collective]:
    if isinstance(job.collectives, Collective):
        return (job.collectives,)
    return _several(job.name, job.collectives)


def _several(name: str, collectives: Iterable[Collective]) -> Iterator[Collective]:
    """Yields the collectives of a call that consists of several.

    An error between two collectives becomes GroupClosed and so ends the group, because the other
    ranks wait in the next one. A SealringError is passed on: it is raised on all ranks, or ends the
    group itself.
    """
    try:
        yield from collectives
    except SealringError:
        raise
    except Exception as raised:
        called = name.removeprefix("sealring::")
        raise GroupClosed(f"{called} failed: {named(raised)}: {raised}") from raised
