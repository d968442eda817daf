"""The end of a group: the script ends it, the process exits, or no reference to it is left.

The last of these can happen at any time and on any thread, in a garbage collection and with any
lock held. So that code takes no lock and starts no thread. It puts one entry into the group's
queue, and the group's own thread does the rest, after all calls that were queued before.
"""

from __future__ import annotations

import atexit
import threading
import weakref
from dataclasses import dataclass
from typing import Protocol

from sealring import _native
from sealring.core.engine.engine import CollectiveEngine
from sealring.core.engine.gpu_calls import GpuCalls
from sealring.core.group.deferred_errors import DeferredError, end_process
from sealring.core.group.dispatch import Dispatcher
from sealring.core.group.messages import UNLIMITED_S, Messages
from sealring.core.group.monitored import Arrivals


class _Group(Protocol):
    def leave(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of a group that must be closed. None of them refers to the group itself."""

    process: _native.ProcessMark
    dispatcher: Dispatcher
    messages: Messages
    arrivals: Arrivals
    gpu: GpuCalls
    engine: CollectiveEngine
    deferred: DeferredError

    def close(self, *, abort: bool = False) -> None:
        self.dispatcher.close(abort=abort)
        self._close_the_rest(abort=abort)

    def leave(self) -> None:
        """Called at the process's exit.

        Aborts the calls in the queue, because no caller waits for them any more. If streams wait
        for calls, the queue is run to its end: for the script those calls are done.
        """
        self.close(abort=not self.dispatcher.idle and not self.gpu.streams_wait)
        self._tell("the script ended without having seen this error")

    def abandon(self) -> None:
        """Called when no reference to the group is left. Takes no lock.

        Does nothing in a forked child, which has only a copy of its parent's group.
        """
        if self.process.here:
            self.dispatcher.abandon(self._close_abandoned)

    def _close_abandoned(self) -> None:
        self._close_the_rest(abort=False)
        self._tell("the script dropped a group without having seen this error")

    def _close_the_rest(self, *, abort: bool) -> None:
        self.messages.close(abort=abort)
        self.arrivals.close()
        self.gpu.close()
        if not self.engine.release_gpu():
            threading.Thread(
                target=self.engine.release_gpu, args=(UNLIMITED_S,), daemon=True
            ).start()

    def _tell(self, why: str) -> None:
        if (error := self.deferred.take()) is not None:
            end_process(why, error)


def close_when_dropped(group: _Group, parts: Parts) -> None:
    """Makes the group end properly at the process's exit, and when its last reference goes."""
    leave = _Leaving(weakref.ref(group))
    atexit.register(leave)
    finalizer = weakref.finalize(group, _dropped, parts, leave)
    finalizer.atexit = False  # at exit, `leave` does this instead


def _dropped(parts: Parts, leave: _Leaving) -> None:
    atexit.unregister(leave)
    parts.abandon()


@dataclass(frozen=True, slots=True, eq=False)
class _Leaving:
    """The exit handler: a script that ends without destroy_process_group still tells its peers."""

    group: weakref.ref[_Group]

    def __call__(self) -> None:
        if (alive := self.group()) is not None:
            alive.leave()
