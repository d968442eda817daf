"""One thread per group that runs its collectives in the order they were called.

DDP calls all_reduce from the thread that computes the backward pass: the call must return at once,
or nothing would overlap.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from sealring.engine.cpu import Collective, CpuEngine
from sealring.errors import GroupClosed, GroupError
from sealring.group.backward import remember
from sealring.group.work import SealedWork


@dataclass(frozen=True, slots=True)
class Job:
    """One call, and what keeps its memory alive until it is done."""

    name: str
    collectives: Iterator[Collective]
    """Mostly one. Each has been run to its end before the next is asked for."""
    timeout_s: float
    work: SealedWork
    tensors: tuple[torch.Tensor, ...]
    on_success: Callable[[], None] | None
    """Copies the result to where the user wants it, if it could not be written there at once."""


class Dispatcher:
    def __init__(self, engine: CpuEngine, label: str) -> None:
        self._engine = engine
        self._submitting = threading.Lock()
        self._turn = threading.RLock()
        """Held by whoever runs a collective; taken in the order in which they were called. A
        future's callback runs with it held, and may call a collective in its turn."""
        self._closed = False
        self._submitted = 0
        self._finished = 0
        self._collectives = 0
        """Run so far, failures included; every rank counts the same."""
        self._jobs: queue.SimpleQueue[tuple[int, Job] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._loop, name=f"sealring {label}", daemon=True)
        self._thread.start()

    def submit(self, job: Job, *, wait: bool) -> None:
        """Queues the job; with `wait` it may be run at once, on the caller's own thread.

        Whoever waits anyway is spared two changes of thread, which cost more than a small
        collective itself.
        """
        with self._submitting:
            if self._closed:
                raise GroupClosed("this process group was destroyed. Make a new one.")
            self._submitted += 1
            number = self._submitted
            at_once = wait and self._finished == number - 1
            if at_once:
                self._turn.acquire()
            else:
                self._jobs.put((number, job))
        if at_once:
            try:
                self._run(number, job)
            finally:
                self._turn.release()

    @property
    def idle(self) -> bool:
        """Everything that was called is done."""
        return self._finished == self._submitted

    def close(self, *, abort: bool = False) -> None:
        """Lets what was called run to its end (or, aborting, cuts it short) and stops."""
        with self._submitting:
            if self._closed:
                return
            self._closed = True
        if abort:
            self._engine.interrupt()
        self._jobs.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _loop(self) -> None:
        while (entry := self._jobs.get()) is not None:
            with self._turn:
                self._run(*entry)
            # The last reference to a tensor must not be kept by an idle thread.
            del entry
        with self._turn:
            self._engine.close()

    def _run(self, number: int, job: Job) -> None:
        error: BaseException | None = None
        try:
            with _shown_in_profiles(job.name):
                for collective in job.collectives:
                    self._collectives += 1
                    self._engine.run(self._collectives, collective, job.timeout_s)
            if job.on_success is not None:
                job.on_success()
        except BaseException as raised:  # whatever it is belongs to the one who waits
            error = raised
            remember(raised)
            if isinstance(raised, GroupError):
                # The engine has closed itself, unless this was found between two collectives.
                self._engine.close()
        self._finished = number
        job.work.finish(error)


def _shown_in_profiles(name: str) -> AbstractContextManager[object]:
    """A range in torch.profiler's timeline. It is not free, so it is made only for a profiler."""
    if torch.autograd.profiler._is_profiler_enabled:
        return torch.profiler.record_function(name)
    return nullcontext()
