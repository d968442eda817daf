"""Messages from rank to rank, as torch sees them.

Whoever waits for a message drives the traffic on its own thread. A thread of the group's looks
after those that nobody waits for, and starts with the first message.

A message of a CUDA tensor begins when the caller's stream has come to the call. It is done, and
wait() returns, when the GPU has sealed the last byte, or checked and written it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import TYPE_CHECKING

import torch

from sealring.engine.failures import fields_of
from sealring.engine.mailbox import Mailbox
from sealring.errors import GroupClosed, GroupError
from sealring.group import arguments, profiles
from sealring.group.gates import driver_users
from sealring.group.gpu import done_by_the_gpu
from sealring.group.work import SealedWork
from sealring.recorder import FlightRecorder
from sealring.recorder.mail import MessageEntry

if TYPE_CHECKING:
    from sealring._native import MailAccount


class MessageWork(SealedWork):
    """A message under way; done when its memory may be used again."""

    def __init__(
        self,
        messages: Messages,
        result: list[torch.Tensor],
        on_success: Callable[[], None] | None,
        entry: MessageEntry,
    ) -> None:
        super().__init__(result, give_up=messages.give_up)
        self.entry = entry
        self._messages = messages
        self._on_success = on_success
        self._source = -1
        self.ticket = 0
        self.memory: torch.Tensor | None = None
        """Kept until the work goes: it may be read or written until it is done."""
        self.ready: torch.cuda.Event | None = None
        """What says when memory of a GPU may be used; asked until it has been reached."""

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        # With a limit of its own it only watches: the group's thread drives the traffic.
        if timeout <= timedelta(0) and not self.is_completed():
            with profiles.message_shown(self.entry, waiting=True):
                self._messages.drive(self)
        return super().wait(timeout)

    def arrived(self, peer: int) -> None:
        self._source = peer
        problem: BaseException | None = None
        try:
            if self._on_success is not None:
                self._on_success()
        except Exception as raised:  # whatever it is belongs to the one who waits
            problem = raised
        self.finish(problem)

    def _source_rank(self) -> int:
        return self._source

    source_rank = _source_rank


class Messages:
    def __init__(
        self,
        mailbox: Mailbox,
        label: str,
        recorder: FlightRecorder,
        on_failure: Callable[[GroupError], GroupError],
    ) -> None:
        """`on_failure` ends the rest of the group, and returns the error that it ended with."""
        self._mailbox = mailbox
        self._label = label
        self._recorder = recorder
        self._on_failure = on_failure
        self._lock = threading.Lock()
        self._under_way: dict[int, MessageWork] = {}
        self._thread: threading.Thread | None = None

    def send(
        self,
        peer: int,
        tag: int,
        memory: torch.Tensor,
        timeout_s: float,
        result: list[torch.Tensor],
    ) -> MessageWork:
        dtype = arguments.moved_dtype(memory)
        entry = MessageEntry("send", peer, tag, memory.nbytes, dtype)
        return self._post(self._mailbox.send, entry, memory, timeout_s, result, None)

    def receive(
        self,
        peer: int,
        tag: int,
        memory: torch.Tensor,
        timeout_s: float,
        result: list[torch.Tensor],
        on_success: Callable[[], None] | None,
    ) -> MessageWork:
        dtype = arguments.moved_dtype(memory)
        entry = MessageEntry("recv", peer, tag, memory.nbytes, dtype)
        if on_success is not None and memory.is_cuda:
            on_success = done_by_the_gpu(on_success, memory.device)
        return self._post(self._mailbox.receive, entry, memory, timeout_s, result, on_success)

    def _post(
        self,
        call: Callable[[int, int, tuple[int, int], float, int | None], int],
        entry: MessageEntry,
        memory: torch.Tensor,
        timeout_s: float,
        result: list[torch.Tensor],
        on_success: Callable[[], None] | None,
    ) -> MessageWork:
        work = MessageWork(self, result, on_success, entry)
        work.memory = memory
        if memory.is_cuda:
            work.ready = self._come_to_the_call(memory.device)
            driver_users.busy_with(work)
        ready = None if work.ready is None else work.ready.cuda_event
        self._recorder.mail.posted(entry)
        # Held while it is posted: a message that is done at once is looked up under its ticket.
        with profiles.message_shown(entry), self._current_device_kept(), self._lock:
            try:
                where = (memory.data_ptr(), memory.nbytes)
                work.ticket = call(entry.peer, entry.tag, where, timeout_s, ready)
            except GroupError as error:
                failed: GroupError | None = error
            else:
                failed = None
                self._under_way[work.ticket] = work
                if self._thread is None:
                    self._thread = threading.Thread(
                        target=self._look_after,
                        name=f"sealring messages {self._label}",
                        daemon=True,
                    )
                    self._thread.start()
        if failed is not None:
            settled = self._fail(failed)
            self._recorder.message_ended(entry, None, settled)
            raise settled
        return work

    def drive(self, work: MessageWork) -> None:
        try:
            with self._current_device_kept():
                peer = self._mailbox.wait(work.ticket)
        except GroupError as error:
            self._fail(error)
            return
        except BaseException:  # Ctrl-C: the script goes on without the message
            self.give_up()
            raise
        if peer is not None:
            self._deliver(work.ticket, peer)

    def _come_to_the_call(self, device: torch.device) -> torch.cuda.Event:
        with torch.cuda.device(device):
            ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
            ready.record()
            self._mailbox.use_gpu(device.index)
        return ready

    def _current_device_kept(self) -> AbstractContextManager[object]:
        """Whoever moves the messages works on the group's GPU, which need not be its own."""
        if not self._mailbox.has_gpu:
            return nullcontext()
        return torch.cuda.device(torch.cuda.current_device())

    def give_up(self) -> None:
        """Whoever waited will wait no longer: the group ends here."""
        self._fail(GroupClosed("a rank gave up waiting for a message."))

    def fail(self, error: GroupError) -> None:
        """The group saw a failure elsewhere; the messages end with it."""
        self._mailbox.fail(fields_of(error))

    def fail_elsewhere(self, error: GroupError) -> None:
        """The same on another thread, where it needs CUDA's driver.

        Whoever calls this may have streams to let go on, and CUDA may wait for them.
        """
        if self._mailbox.has_gpu:
            threading.Thread(target=self.fail, args=(error,), daemon=True).start()
        else:
            self.fail(error)

    def account(self) -> MailAccount:
        return self._mailbox.account()

    def close(self) -> None:
        self._mailbox.close()
        if self._thread is not None and threading.current_thread() is not self._thread:
            self._thread.join()
        self._mailbox.release_gpu()

    def _look_after(self) -> None:
        try:
            while done := self._mailbox.finished():
                for ticket, peer in done:
                    self._deliver(ticket, peer)
        except GroupError as error:
            self._fail(error)
        else:
            self._end(GroupClosed("the group was closed before the message was done."))

    def _deliver(self, ticket: int, peer: int) -> None:
        with self._lock:
            work = self._under_way.pop(ticket, None)
        if work is not None:
            self._recorder.message_ended(work.entry, peer, None)
            work.arrived(peer)

    def _fail(self, error: GroupError) -> GroupError:
        # First the mailbox: whoever gets the error may use the message's memory for something else.
        self._mailbox.fail(fields_of(error))
        settled = self._on_failure(error)
        self._end(settled)
        return settled

    def _end(self, error: GroupError) -> None:
        with self._lock:
            orphans, self._under_way = list(self._under_way.values()), {}
        for work in orphans:
            self._recorder.message_ended(work.entry, None, error)
            work.finish(error)
