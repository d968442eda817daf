"""What the streams of a GPU wait at for a call whose caller has gone on.

A gate is closed when its call is queued and opened by the group's thread when the call is over:
every record checked, the last byte written. Calls of a group end in the order they were queued.

A call that fails opens its gate too, or the GPU would never do anything again. Nobody can be told
then, for nobody waits: so its results are first overwritten with ones, which are NaN in every
float type, and the error is owed (owed.py).
"""

from __future__ import annotations

import os
import sys
import threading
import traceback
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Final, NoReturn, Protocol

import torch

ALL_ONES: Final = 0xFF
MOST_HELD: Final = 4
"""How many calls streams may wait for at once: two all_gathers and two reduce_scatters of FSDP's.

Each keeps its tensors, and every kernel launched behind it a place in the driver's queue.
"""


class Streams(Protocol):
    """The streams of one group on one GPU (gpu.py); tests have their own, without a GPU."""

    @property
    def devices(self) -> list[int | str | torch.device]:
        """What a future of their tensors is bound to."""

    def close(self) -> int:
        """Draws the next ticket."""

    def hold(self, ticket: int) -> None:
        """The calling thread's current stream waits until the ticket is opened."""

    def open(self, ticket: int) -> None: ...

    def behind(self, ticket: int) -> AbstractContextManager[Any]:
        """In it the current stream is one that waits until the ticket is opened."""

    def aside(self, after: Any = None) -> AbstractContextManager[Any]:
        """In it the current stream is one that waits for no gate; the end waits for the GPU."""


class Gate:
    """One call's. Until it is closed it holds nobody."""

    def __init__(self, streams: Streams, written: Iterable[torch.Tensor] = ()) -> None:
        """`written` are the user's tensors that the result goes to."""
        self._streams = streams
        self._ticket: int | None = None
        self._written = [(tensor, tensor.data_ptr()) for tensor in written]

    def close(self) -> None:
        """Called once, in the order in which the calls will end."""
        _closed_ones.add(self)
        self._ticket = self._streams.close()

    def hold(self) -> None:
        """The current stream waits from here on; so does the host, while too many are held."""
        if self._ticket is not None:
            _closed_ones.hold(self)
            self._streams.hold(self._ticket)

    def completed(self, result: list[torch.Tensor]) -> torch.futures.Future[list[torch.Tensor]]:
        """A future that is done: whoever takes its value has his stream wait, and not himself."""
        future: torch.futures.Future[Any] = torch.futures.Future(devices=self._streams.devices)
        if self._ticket is None:
            future.set_result(result)
        else:
            with self._streams.behind(self._ticket):
                future.set_result(result)
        return future

    def spoil(self, after: Any) -> None:
        """Overwrites what is no result, behind what its writers were given before the call.

        If that cannot be done the process ends: half a result must not be taken for one, and a
        stream that waits for ever is no way out either.
        """
        try:
            with self._streams.aside(after):
                for tensor, address in self._written:
                    # Kernels that wait were given the address.
                    if tensor.data_ptr() != address:
                        raise RuntimeError("the tensor's memory was exchanged after the call")
                    bytes_of(tensor).fill_(ALL_ONES)
        except Exception as problem:
            end_process(
                "a collective failed, and its incomplete result on the GPU cannot be overwritten",
                problem,
            )

    def open(self) -> None:
        if self._ticket is not None:
            self._streams.open(self._ticket)
            _closed_ones.remove(self)
        self._written.clear()

    def of_same_group(self, other: Gate) -> bool:
        return self._streams is other._streams


def last_of(gates: Iterable[Gate | None]) -> Gate | None:
    """The one that opens when all of them are open; None where there is no such gate."""
    last: Gate | None = None
    for gate in gates:
        if gate is None or (last is not None and not gate.of_same_group(last)):
            return None
        last = gate
    return last


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as bytes, however it is strided."""
    size = tensor.element_size()
    nothing = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return nothing.set_(
        tensor.untyped_storage(),
        tensor.storage_offset() * size,
        (*tensor.shape, size),
        (*(stride * size for stride in tensor.stride()), 1),
    )


def end_process(why: str, error: BaseException) -> NoReturn:
    """Where nobody can be told by an exception; the other ranks see PeerLost."""
    traceback.print_exception(error)
    print(f"sealring: {why}. The process ends here.", file=sys.stderr, flush=True)
    os._exit(1)


class _ClosedOnes:
    """This process's gates that are closed, of all groups.

    Some of the driver's calls wait until the GPU has nothing left to do, and hold a lock that the
    groups' threads need to get there: loading code, giving memory back. While one of them is made
    all gates are open, and none is closed.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._gates: set[Gate] = set()
        self._held: set[Gate] = set()
        self._wanted_open = 0
        self._kept: list[object] = []

    def add(self, gate: Gate) -> None:
        with self._changed:
            # Those who want them open would else wait for as long as somebody closes more.
            self._changed.wait_for(lambda: self._wanted_open == 0)
            self._gates.add(gate)

    def hold(self, gate: Gate) -> None:
        with self._changed:
            self._changed.wait_for(
                lambda: gate in self._held or gate not in self._gates or len(self._held) < MOST_HELD
            )
            if gate in self._gates:
                self._held.add(gate)

    def remove(self, gate: Gate) -> None:
        with self._changed:
            self._gates.discard(gate)
            self._held.discard(gate)
            if not self._gates:
                self._kept.clear()
            self._changed.notify_all()

    @contextmanager
    def open(self) -> Iterator[None]:
        with self._changed:
            self._wanted_open += 1
        try:
            with self._changed:
                self._changed.wait_for(lambda: not self._gates)
            # The lock is free meanwhile: nobody closes a gate as long as open ones are wanted.
            yield
        finally:
            with self._changed:
                self._wanted_open -= 1
                self._changed.notify_all()

    def keep(self, thing: object) -> None:
        with self._changed:
            if self._gates:
                self._kept.append(thing)


_closed_ones: Final = _ClosedOnes()


def while_all_are_open() -> AbstractContextManager[None]:
    """For code that is loaded on the GPU, and memory that is taken there or given back."""
    return _closed_ones.open()


def keep_until_all_are_open(thing: object) -> None:
    """Its memory on the GPU is given back no sooner."""
    _closed_ones.keep(thing)
