"""Who carries out the orders for shards: this process, or several children of it."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from sealring import _native
from sealring.vault.children import Child
from sealring.vault.datasets.work import carry_out

_MODULE: Final = "sealring.vault.datasets.work"
Progress = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Task:
    number: int
    order: dict[str, Any]
    keys: Sequence[_native.Secret] = field(repr=False)


class Run(Protocol):
    """Carries out tasks in any order. The first error ends it."""

    def __call__(self, tasks: Sequence[Task], progress: Progress) -> Iterator[tuple[int, Any]]: ...


def in_this_process(tasks: Sequence[Task], progress: Progress) -> Iterator[tuple[int, Any]]:
    for task in tasks:
        yield task.number, carry_out(task.order, task.keys, progress)


class InProcesses:
    """Children that start when they are needed, and end with this."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._idle: list[Child] = []
        self._lock = threading.Lock()

    def __enter__(self) -> InProcesses:
        return self

    def __exit__(self, *others: object) -> None:
        while self._idle:
            self._idle.pop().close()

    def __call__(self, tasks: Sequence[Task], progress: Progress) -> Iterator[tuple[int, Any]]:
        if min(self._count, len(tasks)) <= 1:
            yield from in_this_process(tasks, progress)
            return
        waiting = iter(tasks)
        answers: queue.Queue[tuple[int, Any] | BaseException] = queue.Queue()
        stop = threading.Event()

        def advance(count: int) -> None:
            with self._lock:
                progress(count)

        def work() -> None:
            try:
                with self._child() as child:
                    while not stop.is_set():
                        with self._lock:
                            task = next(waiting, None)
                        if task is None:
                            return
                        answers.put((task.number, child.ask(task.order, task.keys, advance)))
            except BaseException as problem:
                answers.put(problem)

        threads = [
            threading.Thread(target=work, name=f"sealring-dataset-{number}", daemon=True)
            for number in range(min(self._count, len(tasks)))
        ]
        for thread in threads:
            thread.start()
        try:
            for _ in tasks:
                answer = answers.get()
                if isinstance(answer, BaseException):
                    raise answer
                yield answer
        finally:
            stop.set()
            for thread in threads:
                thread.join()

    @contextlib.contextmanager
    def _child(self) -> Iterator[Child]:
        with self._lock:
            child = self._idle.pop() if self._idle else None
        child = child or Child(_MODULE)
        try:
            yield child
        except BaseException:
            child.close()
            raise
        with self._lock:
            self._idle.append(child)
