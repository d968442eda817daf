"""What the streams of a GPU wait for with messages, and with several things at once.

The GPU does its part of messages in a kernel that stays while there are any
(native/device/cuda/persistent_kernel.hpp). They come in no order that ranks share, so each has a
number of its own that streams wait for.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch

from sealring.group.gates import AnyGate


class MessageStreams(Protocol):
    """What streams of one GPU wait for with one group's messages, by number."""

    @property
    def devices(self) -> list[int | str | torch.device]: ...

    def hold(self, number: int) -> None:
        """The calling thread's current stream waits for the message."""

    def is_over(self, number: int) -> bool: ...

    def beside(self) -> AbstractContextManager[Any]:
        """In it the current stream is another one, which nobody else uses."""


class MessageGate:
    """One message's. None waits for another one's: they are done in any order."""

    def __init__(self, streams: MessageStreams, number: int) -> None:
        self._streams = streams
        self._number = number
        self.holds = True
        self.held = False
        """Some stream waits for it, so for the script it is done."""

    def hold(self) -> None:
        self.held = True
        self._streams.hold(self._number)

    def is_over(self) -> bool:
        return self._streams.is_over(self._number)

    @contextmanager
    def behind(self) -> Iterator[None]:
        with self._streams.beside():
            self.hold()
            yield

    @property
    def devices(self) -> list[int | str | torch.device]:
        return self._streams.devices

    def is_over_before(self, other: AnyGate) -> bool:
        return False


class SeveralGates:
    """Whoever is held here is held by all of them."""

    def __init__(self, gates: Sequence[AnyGate]) -> None:
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

    @property
    def devices(self) -> list[int | str | torch.device]:
        return self._gates[0].devices

    def is_over_before(self, other: AnyGate) -> bool:
        return all(gate.is_over_before(other) for gate in self._gates)


def all_of(gates: Iterable[AnyGate | None]) -> AnyGate | None:
    """Where all of them are over; None where one is missing, or holds nobody."""
    each = list(gates)
    known = [gate for gate in each if gate is not None and gate.holds]
    if not known or len(known) < len(each):
        return None
    last = known[-1]
    return last if all(gate.is_over_before(last) for gate in known) else SeveralGates(known)
