"""A message under way, as torch sees it."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING

import torch

from sealring.group import profiles
from sealring.group.gpu import Place
from sealring.group.message_gates import MessageGate
from sealring.group.work import SealedWork
from sealring.recorder.mail import MessageEntry

if TYPE_CHECKING:
    from sealring.group.messages import Messages


class MessageWork(SealedWork):
    """A message under way; done when its memory may be used again."""

    def __init__(
        self,
        messages: Messages,
        result: list[torch.Tensor],
        entry: MessageEntry,
    ) -> None:
        super().__init__(result, give_up=messages.give_up, owed=messages.owed)
        self.entry = entry
        self._messages = messages
        self.on_success: Callable[[], None] | None = None
        """Copies the message to where the user wants it, if it could not be written there."""
        self._source = -1
        self.ticket = 0
        self.memory: torch.Tensor | None = None
        """Kept until the work goes: it may be read or written until it is done."""
        self.storage: torch.UntypedStorage | None = None
        """Kept as well: the script may give the tensor other memory (`.data = ...`) meanwhile."""
        self.place: Place | None = None
        """Of memory on a GPU; kept until it has been reached."""
        self._group: object = None

    def keep(self, group: object) -> None:
        """A message under way keeps its group, which would close with its last reference."""
        self._group = group
        self.when_done(self._let_group_go)

    def _let_group_go(self) -> None:
        self._group = None

    def held_at(self, gate: MessageGate) -> None:
        """Streams wait there for the message, and the host only where it is given a time."""
        self._gate = gate

    @property
    def is_done_for_the_script(self) -> bool:
        """It has waited for it, as far as it could see."""
        return isinstance(self._gate, MessageGate) and self._gate.held

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        # With a limit of its own it only watches: the group's thread drives the traffic.
        if self._gate is None and timeout <= timedelta(0) and not self.is_completed():
            with profiles.message_shown(self.entry, waiting=True):
                self._messages.drive(self)
        return super().wait(timeout)

    def arrived(self, peer: int) -> None:
        self._source = peer
        problem: BaseException | None = None
        try:
            if self.on_success is not None:
                self.on_success()
        except Exception as raised:  # whatever it is belongs to the one who waits
            problem = raised
        self.finish(problem)

    def _source_rank(self) -> int:
        return self._source

    source_rank = _source_rank
