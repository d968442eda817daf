"""One thread per group that runs its collectives in the order they were called.

DDP calls all_reduce from the thread that computes the backward pass: the call must return at once,
or nothing would overlap.
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
"""How many letters of an exception the other ranks are told."""
_CALLBACK: Final = 0
"""The number of a call that comes from a future's callback: it never waits in the queue."""


@dataclass(slots=True)
class Job:
    """One call."""

    name: str
    collectives: Collective | Iterable[Collective]
    """Mostly one. Of several, each has been run to its end before the next is asked for."""
    timeout_s: float
    work: SealedWork
    kept: tuple[object, ...] = ()
    """Alive until the call is done: its tensors, their storages, as the script may give a tensor
    other memory (`.data = ...`) meanwhile, and the event after which a GPU's may be used."""
    on_success: Callable[[], None] | None = None
    """Copies the result to where the user wants it, if it could not be written there at once."""
    called: Operation | None = None
    """What the script called, by which calls are counted; None for the group's own exchanges."""
    stream: StreamCaller | None = None
    """Where streams are to wait for it. Otherwise its caller waits, or asks."""
    submitted: _native.Completion | None = None
    """What streams wait for, once it is queued."""

    @property
    def known(self) -> Collective | None:
        """The only collective, where it is known ahead."""
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
        """`on_failure` ends the rest of the group, and returns the error that it ended with."""
        self._process = _native.ProcessMark()
        self._engine = engine
        self._recorder = recorder
        self._on_failure = on_failure
        self._deferred = deferred
        self._failure: GroupError | None = None
        self.submitting = threading.Lock()
        self.turn = threading.Lock()
        """Held while a collective runs; taken in the order in which they were called.

        Taken by `with` alone: an interrupt between acquire() and try would leave it locked.
        """
        self._running_thread: int | None = None
        """The thread that holds the turn. A future's callback runs on it, before the next turn."""
        self._closed = False
        self._submitted = 0
        self._finished = 0
        self._ran = 0
        """Collectives, in the order in which they ran: the number that all ranks agree on."""
        self._jobs: queue.SimpleQueue[tuple[int, Job] | None] = queue.SimpleQueue()
        self._at_end: Callable[[], None] | None = None
        self._thread = threading.Thread(target=self._loop, name=f"sealring {label}", daemon=True)
        self._thread.start()

    @property
    def submitted(self) -> int:
        """How many jobs were queued or run, those of callbacks not counted."""
        return self._submitted

    def submit(self, job: Job, *, wait: bool) -> None:
        """Queues the job; with `wait` it may be run at once, on the caller's own thread.

        That saves a caller that waits anyway two changes of thread, which cost more than a small
        collective itself.

        A callback's own collectives run at once, before any that are queued. No other thread could
        run them, as PowerSGD's callbacks wait for theirs; and whether a rank had queued the next
        bucket by then is chance, while this order is the same on all ranks: if the future was done
        before the callback was attached, the caller runs it, before it calls anything else.
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
        # Streams can wait only for what another thread does.
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
        """Streams can wait for the job from here on, unless it must be run as it is."""
        if submitted.streams_wait:
            job.submitted = submitted
            job.on_success = None  # the GPU is given it
            job.work.complete_on_stream(StreamWait(stream.streams, submitted, in_order=True))
        self._queue(job)

    def _queue(self, job: Job) -> None:
        call = self._count(job)
        with profiles.shown(job.name, job.known, self._engine):
            self._jobs.put((call, job))

    def _begin_at_once(self, job: Job) -> int | None:
        """The call's number if nothing was called meanwhile. By the thread that has the turn."""
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
        """Runs a prepared call on the caller's thread; True when it is done, or its error.

        False, and nothing is done, where another call is queued or under way. This is `submit` for
        callers that wait, without what a call needs only if another thread may run it.
        """
        thread = threading.get_ident()
        if self._running_thread == thread or self._finished != self._submitted:
            return False
        # By `with`, and the count within `try`: an interrupt may come between any two calls.
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
        """What has ended the group, once it has failed in a collective."""
        return None if self._failure is None else unraised(self._failure)

    @property
    def runs_here(self) -> bool:
        """In a callback of a collective's future, or in the handler of a signal during one."""
        return self._running_thread == threading.get_ident()

    @property
    def idle(self) -> bool:
        """Everything that was called is done."""
        return self._finished == self._submitted

    def close(self, *, abort: bool = False) -> None:
        """Lets what was called run to its end (or, aborting, cuts it short) and stops.

        Within a collective of its own thread it does not wait for that.
        """
        if abort:
            self._engine.interrupt()  # first: a caller that launches ahead may be in there
        with self.submitting:
            closed, self._closed = self._closed, True
        if not closed:
            self._jobs.put(None)
        if threading.current_thread() is not self._thread and not self.runs_here:
            self._thread.join()

    def abandon(self, at_end: Callable[[], None]) -> None:
        """The same for a group without references, without waiting and without a lock.

        `at_end` is called on the group's thread, unless the group was closed before.
        """
        self._at_end = at_end
        self._jobs.put(None)  # safe in a garbage collection, as a SimpleQueue's put is

    def _loop(self) -> None:
        while (entry := self._jobs.get()) is not None:
            with self.turn:
                self._run_called(*entry)
            # The last reference to a tensor must not be kept by an idle thread.
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
        except BaseException as raised:  # whatever it is belongs to the one who waits
            error = self._settled(raised, ended)
        try:
            if error is not None:
                self._recorder.ended(error)
        finally:  # Ctrl-C may come while the record is being written
            self._release_streams(job, error)
            self._finished += call != _CALLBACK
            job.work.finish(error)

    def _settled(self, raised: BaseException, ended: int) -> BaseException:
        """What the one who waits is told; the rest of the group has then ended with it.

        `ended` is the last collective that has: in a later one the other ranks wait for this one.
        """
        if isinstance(raised, GroupError):
            if raised.native is None:  # found here, between two collectives: the others wait
                self._engine.fail(failure_of(raised))
            self._engine.close_links(unraised(raised))
            raised = self._on_failure(raised)
            self._failure = unraised(raised)
        elif ended != self._ran or not isinstance(raised, Exception):
            # Ctrl-C, or what a handler raised, between two lines of ours.
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
        """They find the result, or poison that cannot be taken for one."""
        if job.stream is None or job.submitted is None:
            return
        if error is not None:
            self._deferred.defer(error)  # first: a script that sees the poison can ask why
            self._engine.release_streams(job.submitted)
        job.stream.streams.free_later(job)


def _steps(job: Job) -> Iterable[Collective]:
    if isinstance(job.collectives, Collective):
        return (job.collectives,)
    return _several(job.name, job.collectives)


def _several(name: str, collectives: Iterable[Collective]) -> Iterator[Collective]:
    """The collectives of a call that is made of several.

    What fails before the next one ends the group, as the other ranks wait in it. Errors of our own
    are raised on all ranks, or end the group by themselves.
    """
    try:
        yield from collectives
    except SealringError:
        raise
    except Exception as raised:
        called = name.removeprefix("sealring::")
        raise GroupClosed(f"{called} failed: {named(raised)}: {raised}") from raised
