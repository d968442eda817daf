"""How an operation completes: what streams wait for when its caller has gone on.

A collective's kernels are launched ahead, in a stream of the group, when the call is queued. From
then on the group's thread makes no call to CUDA. The end of that stream's work is the end of the
call: every record checked, the last byte written. Messages come in no order that ranks share, so
one persistent kernel runs them. Either way streams wait for the operation's number
(native/device/command_queue.hpp), as they do with NCCL.

An operation that fails completes too, or the GPU would never go on. No caller waits then, so its
error is deferred (deferred_errors.py), and its results are first overwritten with ones, which are
NaN in every float type.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch

from sealring import _native
from sealring.core.engine.collective import Collective
from sealring.core.engine.engine import CollectiveEngine
from sealring.core.group.streams import Devices, Streams


class Completion:
    """Of one operation that streams wait for, a collective or a message."""

    def __init__(
        self, streams: Streams, operation: _native.Completion, order: object = None
    ) -> None:
        """Operations of one `order` complete in the order in which they were submitted."""
        self._streams = streams
        self._operation = operation
        self._order = order
        self.awaited = False
        """A stream waits for it, so the script takes the operation for done."""

    def make_stream_wait(self) -> None:
        """Later work of the current stream waits for it."""
        self.awaited = True
        self._streams.make_stream_wait(self._operation)

    def is_done(self) -> bool:
        return self._operation.done

    @contextmanager
    def waiting_stream(self) -> Iterator[None]:
        """Within it the current stream is a stream that waits for the completion."""
        with self._streams.side_stream():
            self.make_stream_wait()
            yield

    @property
    def devices(self) -> Devices:
        """What a future of its tensors is bound to."""
        return self._streams.devices

    def done_before(self, other: Completion) -> bool:
        """Whether this one, which was submitted first, is done whenever `other` is."""
        return self._order is not None and self._order is other._order


class CombinedCompletion(Completion):
    """Done when all of several completions are."""

    def __init__(self, completions: Sequence[Completion]) -> None:
        self._completions = completions
        self._order = None

    def make_stream_wait(self) -> None:
        for completion in self._completions:
            completion.make_stream_wait()

    def is_done(self) -> bool:
        return all(completion.is_done() for completion in self._completions)

    @contextmanager
    def waiting_stream(self) -> Iterator[None]:
        first, *others = self._completions
        with first.waiting_stream():
            for completion in others:
                completion.make_stream_wait()
            yield

    @property
    def devices(self) -> Devices:
        return self._completions[0].devices


def combined(completions: Iterable[Completion | None]) -> Completion | None:
    """Done when all of them are; None where streams cannot wait for one of them."""
    each = list(completions)
    known = [one for one in each if one is not None]
    if not known or len(known) < len(each):
        return None
    last = known[-1]
    return last if all(one.done_before(last) for one in known) else CombinedCompletion(known)


def completed(completion: Completion, result: Any) -> torch.futures.Future[Any]:
    """A future that is done: the stream that takes its value waits; the host does not."""
    future: torch.futures.Future[Any] = torch.futures.Future(devices=completion.devices)
    with completion.waiting_stream():
        future.set_result(result)
    return future


class Prelaunch:
    """A collective whose kernels are launched when it is queued, so that streams can wait."""

    def __init__(
        self,
        engine: CollectiveEngine,
        streams: Streams,
        collective: Collective,
        copy_back: Callable[[], None] | None = None,
    ) -> None:
        """`copy_back` copies the result to where the user wants it, on the current stream."""
        self._engine = engine
        self._streams = streams
        self._collective = collective
        self._copy_back = copy_back

    def submit(self) -> tuple[Collective, Completion] | None:
        """Called once, in the order in which the calls will be run; returns what is to be queued.

        None where it needs too many kernels: then the collective is to be run as it is.
        """
        self._streams.free_old()
        with self._streams.guard():
            launched = self._engine.prelaunch(self._collective, self._streams.current)
        if launched is None or launched.completion is None:
            return None
        self._collective = launched
        return launched, Completion(self._streams, launched.completion, order=self._engine)

    def launch_rest(self) -> None:
        """Called when the call is queued, before the next one is. May block."""
        with self._streams.guard():
            self._engine.launch_rest()
            try:
                if self._copy_back is not None:
                    self._streams.run_on(self._engine.prelaunch_stream, self._copy_back)
            finally:
                self._copy_back = None
                self._engine.mark_end(self._collective)

    def run_ended(self, kept: object) -> None:
        """The group's thread has run the call; what was kept for it may be freed."""
        self._streams.free_later(kept)


class _DriverCalls:
    """Calls under way, of all groups of this process, for which a thread must call CUDA.

    While a stream waits, such a thread may block until the stream goes on. A peer may need its call
    before it comes to what the stream waits for. So while there is one, hosts wait.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0

    def begin(self) -> None:
        with self._lock:
            self._count += 1

    def end(self) -> None:
        with self._lock:
            self._count -= 1

    def track(
        self,
        when_done: Callable[[Callable[[], None]], None],
        queue: Callable[[], None] = lambda: None,
    ) -> None:
        """Counts a call from before it is queued until it is done."""
        self.begin()
        try:
            queue()
        except BaseException:
            self.end()
            raise
        when_done(self.end)

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Counts what is done within it, whichever thread does it."""
        self.begin()
        try:
            yield
        finally:
            self.end()

    @property
    def any(self) -> bool:
        return self._count > 0


driver_calls: Final = _DriverCalls()
