"""What the streams of a GPU wait for when a call's caller has gone on.

The GPU is given its part of a call ahead, in a stream of the group's (native/shifts.hpp), when the
call is queued. From then on the group's thread tells it what to do without a call of CUDA's, and
the end of that stream's work is the end of the call: every record checked, the last byte written.
So streams wait for that, as they do with NCCL.

A message's part the GPU does in a kernel that stays while there are messages (native/porter.hpp).
Messages come in no order, so each has a number of its own that streams wait for.

What fails comes to that end too, or the GPU would never do anything again. Nobody can be
told then, for nobody waits: so the error is owed (owed.py), and the engine first overwrites the
results with ones, which are NaN in every float type.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, Final, Protocol

import torch

from sealring.engine.cpu import Collective

if TYPE_CHECKING:
    from sealring.group.work import SealedWork


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


class MessageStreams(Protocol):
    """What streams of one GPU wait for with one group's messages, by number."""

    @property
    def devices(self) -> list[int | str | torch.device]: ...

    def hold(self, number: int) -> None:
        """The calling thread's current stream waits for the message."""

    def is_over(self, number: int) -> bool: ...

    def beside(self) -> AbstractContextManager[Any]:
        """In it the current stream is another one, which nobody else uses."""

    def do(self, task: Callable[[], None]) -> Any:
        """On the current stream; returns what other streams can wait for."""

    def wait_for(self, done: Any) -> None:
        """The current stream waits for what another one does."""


class AnyGate(Protocol):
    """What streams wait at for a call, a message or several of them."""

    holds: bool
    """Streams can wait for it. If not, the host has to."""

    def hold(self) -> None:
        """The current stream waits from here on."""

    def is_over(self) -> bool: ...

    def completed(self, result: list[torch.Tensor]) -> torch.futures.Future[list[torch.Tensor]]:
        """A future that is done: whoever takes its value has his stream wait, and not himself."""

    def behind(self) -> AbstractContextManager[Any]:
        """In it the current stream is one that waits for it."""


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

    def completed(self, result: list[torch.Tensor]) -> torch.futures.Future[list[torch.Tensor]]:
        return _completed_behind(self, self._streams.devices, result)

    def open(self, remains: object) -> None:
        """The call is over."""
        if self.holds:
            self._streams.leave(remains)

    def of_same_group(self, other: Gate) -> bool:
        return self._streams is other._streams


class MessageGate:
    """One message's. None waits for another one's: they are done in any order."""

    def __init__(
        self, streams: MessageStreams, number: int, then: Callable[[], None] | None = None
    ) -> None:
        """`then` copies the message to where the user wants it, on the current stream."""
        self._streams = streams
        self._number = number
        self._then = then
        self._copied: Any = None
        self._copying = threading.Lock()
        self.holds = True
        self.held = False
        """Some stream waits for it, so for the script it is done."""

    def hold(self) -> None:
        self.held = True
        self._streams.hold(self._number)
        with self._copying:
            if self._copied is not None:
                self._streams.wait_for(self._copied)
            if self._then is not None:
                self._copied, self._then = self._streams.do(self._then), None

    def is_over(self) -> bool:
        return self._streams.is_over(self._number)

    @contextmanager
    def behind(self) -> Iterator[None]:
        with self._streams.beside():
            self.hold()
            yield

    def completed(self, result: list[torch.Tensor]) -> torch.futures.Future[list[torch.Tensor]]:
        return _completed_behind(self, self._streams.devices, result)


class SeveralGates:
    """Whoever is held here is held by all of them."""

    def __init__(self, gates: Sequence[Gate | MessageGate]) -> None:
        self._gates = gates
        self.holds = True

    def hold(self) -> None:
        for gate in self._gates:
            gate.hold()

    def is_over(self) -> bool:
        return all(gate.is_over() for gate in self._gates)

    @contextmanager
    def behind(self) -> Iterator[None]:
        first, *others = self._gates
        with first.behind():
            for gate in others:
                gate.hold()
            yield

    def completed(self, result: list[torch.Tensor]) -> torch.futures.Future[list[torch.Tensor]]:
        return _completed_behind(self, self._gates[0]._streams.devices, result)


def _completed_behind(
    gate: AnyGate, devices: list[int | str | torch.device], result: list[torch.Tensor]
) -> torch.futures.Future[list[torch.Tensor]]:
    future: torch.futures.Future[Any] = torch.futures.Future(devices=devices)
    with gate.behind():
        future.set_result(result)
    return future


def all_of(gates: Iterable[AnyGate | None]) -> AnyGate | None:
    """Where all of them are over; None where one is missing, or holds nobody."""
    each = list(gates)
    if not each or not all(isinstance(one, Gate | MessageGate) and one.holds for one in each):
        return None
    known = [one for one in each if isinstance(one, Gate | MessageGate)]
    # A group's calls are over in their order, so the last one stands for all.
    last = known[-1]
    if all(
        isinstance(one, Gate) and isinstance(last, Gate) and one.of_same_group(last)
        for one in known
    ):
        return last
    return SeveralGates(known)


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
