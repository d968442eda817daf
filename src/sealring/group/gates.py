"""What the streams of a GPU wait for when a call's caller has gone on.

The GPU is given its part of a call ahead, in a stream of the group's, when the call is queued
(native/device/cuda/prelaunched_kernels.hpp). From then on the group's thread tells it what to do
without a call of CUDA's, and the end of that stream's work is the end of the call: every record
checked, the last byte written. So streams wait for that, as they do with NCCL.

What fails comes to that end too, or the GPU would never do anything again. Nobody can be told then,
for nobody waits: so the error is owed (owed.py), and the engine first overwrites the results with
ones, which are NaN in every float type.

Messages have gates of their own (message_gates.py).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Final, Protocol

import torch

from sealring.engine.cpu import Collective

if TYPE_CHECKING:
    from sealring.group.work import SealedWork


class AnyGate(Protocol):
    """What streams wait at for a call, a message or several of them."""

    holds: bool
    """Streams can wait for it. If not, the host has to."""

    def hold(self) -> None:
        """The current stream waits from here on."""

    def is_over(self) -> bool: ...

    def behind(self) -> AbstractContextManager[Any]:
        """In it the current stream is one that waits for it."""

    @property
    def devices(self) -> list[int | str | torch.device]:
        """What a future of its tensors is bound to."""

    def is_over_before(self, other: AnyGate) -> bool:
        """That one cannot be over if this is not."""


class Streams(Protocol):
    """The streams of one group on one GPU (gpu.py); tests have their own, without a GPU."""

    @property
    def devices(self) -> list[int | str | torch.device]:
        """What a future of their tensors is bound to."""

    def line_up(self, collective: Collective) -> Collective | None:
        """Gives the GPU its part, as much of it as can wait there; what the engine is to run.

        None where it is too much to be given ahead.
        """

    def line_up_rest(self, then: Callable[[], None] | None) -> Any:
        """The rest, and what is to be done after it; what streams wait for.

        Called when the collective is queued: this may wait until some of it has been done.
        """

    def hold(self, over: Any) -> None:
        """The calling thread's current stream waits for it."""

    def is_over(self, over: Any) -> bool:
        """Whether those who wait have gone on."""

    def behind(self, over: Any) -> AbstractContextManager[Any]:
        """In it the current stream is one that waits for it."""

    def leave(self, remains: object) -> None:
        """The call is over; what it kept may go, but not on the group's thread.

        To give back memory that several streams have used, torch calls CUDA.
        """


class Gate:
    """One call's. Until it is closed it holds nobody."""

    def __init__(
        self, streams: Streams, collective: Collective, then: Callable[[], None] | None = None
    ) -> None:
        """`then` copies the result to where the user wants it, on the current stream."""
        self._streams = streams
        self._collective = collective
        self._then = then
        self._over: Any = None
        self.holds = False
        """Streams can wait for the call. If not, the host has to."""

    def close(self) -> Collective | None:
        """Called once, in the order in which the calls will be run; what is to be queued.

        None where streams cannot wait for it: then it is to be run as it is.
        """
        lined_up = self._streams.line_up(self._collective)
        self.holds = lined_up is not None
        return lined_up

    def queued(self) -> None:
        """Called when the call is queued, before the next is."""
        if self.holds:
            self._over = self._streams.line_up_rest(self._then)
        self._then = None

    def hold(self) -> None:
        self._streams.hold(self._over)

    def is_over(self) -> bool:
        return not self.holds or self._over is None or self._streams.is_over(self._over)

    def behind(self) -> AbstractContextManager[Any]:
        return self._streams.behind(self._over)

    @property
    def devices(self) -> list[int | str | torch.device]:
        return self._streams.devices

    def open(self, remains: object) -> None:
        """The call is over."""
        if self.holds:
            self._streams.leave(remains)

    def is_over_before(self, other: AnyGate) -> bool:
        """A group's calls are over in their order; here it is the order in which one is asked."""
        return isinstance(other, Gate) and self._streams is other._streams


def completed(
    gate: AnyGate, result: list[torch.Tensor]
) -> torch.futures.Future[list[torch.Tensor]]:
    """A future that is done: whoever takes its value has his stream wait, and not himself."""
    future: torch.futures.Future[Any] = torch.futures.Future(devices=gate.devices)
    with gate.behind():
        future.set_result(result)
    return future


class _DriverUsers:
    """Calls under way, of all groups of this process, for which a thread must call CUDA.

    While a stream waits, such a thread may have to wait for the stream. A peer may need its call
    before it comes to what the stream waits for. So as long as there is one, hosts wait.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0

    def come(self) -> None:
        with self._lock:
            self._count += 1

    def go(self) -> None:
        with self._lock:
            self._count -= 1

    def busy_with(self, work: SealedWork, queue: Callable[[], None] = lambda: None) -> None:
        """From before it is queued until it is done."""
        self.come()
        try:
            queue()
        except BaseException:
            self.go()
            raise
        work.when_done(self.go)

    @property
    def any(self) -> bool:
        return self._count > 0


driver_users: Final = _DriverUsers()
