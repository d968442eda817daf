"""A group's messages from rank to rank, and the works that torch gets for them.

A thread that waits for a message moves the messages of the whole group. For messages that no thread
waits for, a thread of the group does so. It starts with the first message.

A message of a CUDA tensor begins when the caller's stream reaches the call. A send is done when the
GPU has sealed the last byte, a receive when the GPU has checked and written it. wait() returns
then. If streams can wait (engine/streams.py), wait() returns at once and the current stream waits.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Final

import torch

from sealring import _native
from sealring.core.engine.failures import failure_of, unraised
from sealring.core.engine.flight import FlightRecorder, MessageEntry
from sealring.core.engine.gpu_calls import GpuCalls
from sealring.core.engine.mailbox import ANYONE, Mailbox
from sealring.core.engine.streams import StreamWait, driver_calls
from sealring.core.group import arguments, profiles
from sealring.core.group.deferred_errors import DeferredError
from sealring.core.group.memory import slot
from sealring.core.group.work import MessageWork
from sealring.errors import GroupClosed, GroupError

if TYPE_CHECKING:
    from sealring._native import MailAccount


_RELEASE_GPU_WITHIN_S: Final = 2.0
UNLIMITED_S: Final = 1e9


class Messages:
    def __init__(
        self,
        mailbox: Mailbox,
        label: str,
        recorder: FlightRecorder,
        on_failure: Callable[[GroupError], GroupError],
        gpu: GpuCalls,
        deferred: DeferredError,
    ) -> None:
        """`on_failure` ends the collectives, and returns the error that the group ended with."""
        self._process = _native.ProcessMark()
        self.gpu = gpu
        self.deferred = deferred
        self.mailbox = mailbox
        self._label = label
        self._recorder = recorder
        self._on_failure = on_failure
        self._lock = threading.Lock()
        self._under_way: dict[_native.Completion, MessageWork] = {}
        self._ended: GroupError | None = None
        self.abandoned: list[MessageWork] = []
        """Works that were under way when the group ended: a GPU may still write to their memory."""
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
        return self._post(entry, memory, timeout_s, result, None)

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
        return self._post(entry, memory, timeout_s, result, on_success)

    def _post(
        self,
        entry: MessageEntry,
        memory: torch.Tensor,
        timeout_s: float,
        result: list[torch.Tensor],
        on_success: Callable[[], None] | None,
    ) -> MessageWork:
        self._process.require("this process group")
        if (deferred := self.deferred.take()) is not None:
            raise deferred
        if self.gpu.serves(memory.device):
            self.gpu.require_no_capture(memory.device, entry.way)
        work = MessageWork(result, entry, self.give_up, self.drive, self.deferred)
        where = slot(memory, written=entry.way == "recv")
        message = _native.Message(entry.way == "send", entry.peer, entry.tag, where, timeout_s)
        work.kept = (memory, memory.untyped_storage())
        self._recorder.mail.posted(entry)
        try:
            with profiles.message_shown(entry), self._current_device_kept():
                if self.gpu.serves(memory.device):
                    self._submit_on_gpu(work, message, memory.device, on_success)
                else:
                    work.on_success = on_success
                    work.message = self.mailbox.submit(message)
        except GroupError as error:
            settled = self._fail(error)
            self._recorder.message_ended(entry, None, settled)
            self.deferred.clear()
            raise settled from None
        except (RuntimeError, ValueError):  # the message was refused; the group goes on
            raise
        except BaseException:  # Ctrl-C: the message may be under way
            self.abandoned.append(work)
            self.give_up()
            raise
        self._register(work)
        return work

    def _submit_on_gpu(
        self,
        work: MessageWork,
        message: _native.Message,
        device: torch.device,
        copy_back: Callable[[], None] | None,
    ) -> None:
        caller = self.gpu.message_caller(self.mailbox, device)
        work.kept += (caller,)
        driver_calls.begin()
        try:
            work.message = self.mailbox.submit(message, caller.stream)
        except BaseException:
            driver_calls.end()
            raise
        if work.message.streams_wait and copy_back is None:
            driver_calls.end()
        else:
            work.when_done(driver_calls.end)
        work.on_success = self.gpu.finished(copy_back, device)
        streams_wait = caller.streams_wait and work.message.streams_wait and copy_back is None
        # After a receive from anyone, the caller asks who sent the message: so the host waits.
        if streams_wait and work.entry.peer != ANYONE:
            work.complete_on_stream(StreamWait(caller.streams, work.message))

    def _register(self, work: MessageWork) -> None:
        """Notes that the work is under way, unless it is already done or the group has ended.

        Starts the group's thread for messages if it does not run yet.
        """
        assert work.message is not None
        lack = ""
        with self._lock:
            ended = self._ended
            if ended is None:
                self._under_way[work.message] = work
            if self._thread is None:
                lack = self._start_thread()
        if lack and ended is None:
            raise self._fail(
                GroupClosed(
                    f"a rank has no thread to move its messages ({lack}): raise its user's limit "
                    "of processes (ulimit -u), or its container's"
                )
            )
        if ended is not None:
            self._end_works([work], unraised(ended))
        elif work.message.done and work.message.error is None:
            self._deliver(work.message)

    def _start_thread(self) -> str:
        """Starts the group's thread for messages; returns '' or why that failed.

        `_thread` is set only when the thread runs, because `close` joins it.
        """
        thread = threading.Thread(
            target=self._report_finished, name=f"sealring messages {self._label}", daemon=True
        )
        try:
            thread.start()
        except RuntimeError as problem:
            return str(problem)
        self._thread = thread
        return ""

    def drive(self, work: MessageWork) -> None:
        """Moves the group's messages until `work` is done. The waiting thread calls this."""
        self._process.require("this message")
        assert work.message is not None
        try:
            with self._current_device_kept():
                self.mailbox.wait(work.message)
        except GroupError as error:
            self._fail(error)
            return
        except BaseException:  # Ctrl-C: the script goes on without the message
            self.give_up()
            raise
        self._deliver(work.message)

    def _current_device_kept(self) -> AbstractContextManager[object]:
        """Restores this thread's current CUDA device afterwards.

        A thread that moves messages switches to the group's GPU, which may be another one.
        """
        if not self.mailbox.has_gpu:
            return nullcontext()
        return torch.cuda.device(torch.cuda.current_device())

    def give_up(self) -> None:
        """Ends the group, because the script no longer waits for a message."""
        self._fail(GroupClosed("a rank gave up waiting for a message"))

    def fail(self, error: GroupError) -> None:
        """Ends the messages with a failure that happened elsewhere in the group."""
        self.mailbox.fail(failure_of(error))

    def fail_elsewhere(self, error: GroupError) -> None:
        """Like `fail`, but on another thread if that calls CUDA's driver.

        The caller may still have to release streams, and the driver may wait for those.
        """
        if self.mailbox.has_gpu:
            threading.Thread(target=self.fail, args=(error,), daemon=True).start()
        else:
            self.fail(error)

    def account(self) -> MailAccount:
        return self.mailbox.account()

    def close(self, *, abort: bool = False) -> None:
        """Ends the messages. Without `abort`, first finishes those that only streams wait for."""
        if not abort:
            with self._lock:
                held = [work for work in self._under_way.values() if work.awaited_by_stream]
            for work in held:
                work.settle()
        self.mailbox.close()
        if self._thread is not None and threading.current_thread() is not self._thread:
            self._thread.join()
        if not self._release_gpu(_RELEASE_GPU_WITHIN_S):
            threading.Thread(target=self._release_gpu, args=(UNLIMITED_S,), daemon=True).start()

    def _release_gpu(self, patience_s: float) -> bool:
        if not self.mailbox.release_gpu(patience_s):
            return False
        self.abandoned.clear()
        return True

    def _report_finished(self) -> None:
        try:
            while done := self.mailbox.finished():
                for message in done:
                    self._deliver(message)
        except GroupError as error:
            self._fail(error)
        else:
            self._end(GroupClosed("the group was closed before the message was done"))

    def _deliver(self, message: _native.Completion) -> None:
        """Finishes the work of a message that is done. If several threads find it, one does
        this."""
        with self._lock:
            work = self._under_way.pop(message, None)
        if work is not None:
            self._recorder.message_ended(work.entry, message.peer, None)
            work.arrived(message.peer)

    def _fail(self, error: GroupError) -> GroupError:
        # The mailbox first: when the script gets the error, it may reuse the message's memory.
        self.mailbox.fail(failure_of(error))
        settled = self._on_failure(error)
        self._end(settled)
        return settled

    def _end(self, error: GroupError) -> None:
        with self._lock:
            self._ended = self._ended or unraised(error)
            abandoned, self._under_way = list(self._under_way.values()), {}
        self._end_works(abandoned, error)

    def _end_works(self, abandoned: list[MessageWork], error: GroupError) -> None:
        if self.mailbox.has_gpu:
            self.abandoned += abandoned
        self._defer(abandoned, error)  # first, so that a script that sees NaN finds the error
        self.mailbox.release_streams()
        for work in abandoned:
            self._recorder.message_ended(work.entry, None, error)
            work.finish(error)
        self._defer(abandoned, error)  # again, for a wait() that came just before `finish`

    def _defer(self, abandoned: list[MessageWork], error: GroupError) -> None:
        if any(work.awaited_by_stream for work in abandoned):
            self.deferred.defer(error)
