"""How a call completes: what streams wait for when its caller has gone on.

A collective's kernels are launched ahead, in a stream of the group, when the call is queued
(native/device/cuda/prelaunched_kernels.hpp). From then on the group's thread makes no call to CUDA.
The end of that stream's work is the end of the call: every record checked, the last byte written.
Streams wait for it, as they do with NCCL. A group's collectives complete in their order.

Messages are served by one persistent kernel (native/device/cuda/persistent_kernel.hpp). They come
in no order that ranks share, so each has a number of its own that streams wait for.

A call that fails completes too, or the GPU would never go on. No caller waits then, so its error is
deferred (deferred_errors.py), and its results are first overwritten with ones, which are NaN in
every float type.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Final, Protocol

import torch

from sealring.engine.collective import Collective
from sealring.group.streams import Devices, MessageStreams, Streams


class Completion(Protocol):
    """The completion of a collective, of a message or of several of them."""

    streams_wait: bool
    """Streams can wait for it. If not, the host has to."""

    def make_stream_wait(self) -> None:
        """Later work of the current stream waits for it."""

    def is_done(self) -> bool: ...

    def waiting_stream(self) -> AbstractContextManager[Any]:
        """Within it the current stream is a stream that waits for the completion."""

    @property
    def devices(self) -> Devices:
        """What a future of its tensors is bound to."""

    def done_before(self, other: Completion) -> bool:
        """Whether this one is done whenever `other` is."""


class CollectiveCompletion:
    """Of one collective. No stream can wait for it before `prelaunch`."""

    def __init__(
        self, streams: Streams, collective: Collective, copy_back: Callable[[], None] | None = None
    ) -> None:
        """`copy_back` copies the result to where the user wants it, on the current stream."""
        self._streams = streams
        self._collective = collective
        self._copy_back = copy_back
        self._end: Any = None
        self.streams_wait = False

    def prelaunch(self) -> Collective | None:
        """Called once, in the order in which the calls will be run; returns what is to be queued.

        None where streams cannot wait for the call: then it is to be run as it is.
        """
        prelaunched = self._streams.prelaunch(self._collective)
        self.streams_wait = prelaunched is not None
        return prelaunched

    def launch_rest(self) -> None:
        """Called when the call is queued, before the next one is."""
        if self.streams_wait:
            self._end = self._streams.launch_rest(self._copy_back)
        self._copy_back = None

    def make_stream_wait(self) -> None:
        self._streams.make_stream_wait(self._end)

    def is_done(self) -> bool:
        return not self.streams_wait or self._end is None or self._streams.is_done(self._end)

    def waiting_stream(self) -> AbstractContextManager[Any]:
        return self._streams.waiting_stream(self._end)

    @property
    def devices(self) -> Devices:
        return self._streams.devices

    def run_ended(self, kept: object) -> None:
        """The group's thread has run the call; what was kept for it may be freed."""
        if self.streams_wait:
            self._streams.free_later(kept)

    def done_before(self, other: Completion) -> bool:
        """A group's collectives complete in their order, which is the order of the arguments."""
        return isinstance(other, CollectiveCompletion) and self._streams is other._streams


class MessageCompletion:
    """Of one message. Messages complete in any order."""

    def __init__(self, streams: MessageStreams, number: int) -> None:
        self._streams = streams
        self._number = number
        self.streams_wait = True
        self.awaited = False
        """A stream waits for it, so the script takes the message for done."""

    def make_stream_wait(self) -> None:
        self.awaited = True
        self._streams.make_stream_wait(self._number)

    def is_done(self) -> bool:
        return self._streams.is_done(self._number)

    @contextmanager
    def waiting_stream(self) -> Iterator[None]:
        with self._streams.side_stream():
            self.make_stream_wait()
            yield

    @property
    def devices(self) -> Devices:
        return self._streams.devices

    def done_before(self, other: Completion) -> bool:
        return False


class CombinedCompletion:
    """Done when all of several completions are."""

    def __init__(self, completions: Sequence[Completion]) -> None:
        self._completions = completions
        self.streams_wait = True

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

    def done_before(self, other: Completion) -> bool:
        return all(completion.done_before(other) for completion in self._completions)


def combined(completions: Iterable[Completion | None]) -> Completion | None:
    """Done when all of them are; None where streams cannot wait for one of them."""
    each = list(completions)
    known = [one for one in each if one is not None and one.streams_wait]
    if not known or len(known) < len(each):
        return None
    last = known[-1]
    return last if all(one.done_before(last) for one in known) else CombinedCompletion(known)


def completed(
    completion: Completion, result: list[torch.Tensor]
) -> torch.futures.Future[list[torch.Tensor]]:
    """A future that is done: the stream that takes its value waits; the host does not."""
    future: torch.futures.Future[Any] = torch.futures.Future(devices=completion.devices)
    with completion.waiting_stream():
        future.set_result(result)
    return future


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

    @property
    def any(self) -> bool:
        return self._count > 0


driver_calls: Final = _DriverCalls()
