"""Where a broker remembers, whatever it is kept in: functions on a view, committed whole or not.

A decision is a function that reads and writes a `View`. Functions that wait at the same time are
run one after the other and committed together, with one write to the disk; each sees what those
before it did. One that raises leaves nothing behind. So every step of the broker is one commit, and
between two commits there is no state to die in.
"""

from __future__ import annotations

import asyncio
import json
import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from typing import Any, Final, TypeAlias, TypeVar

from sealring.attest.broker.authenticated import AuthenticatedRows, Source, VersionNote
from sealring.errors import StoreUnavailable, TamperedStore
from sealring.formats.strict import read_json

T = TypeVar("T")
Row: TypeAlias = dict[str, Any]
Job: TypeAlias = tuple[Callable[["View"], Any], Future[Any]]

_BATCH: Final = 16
"""Decisions per commit. Each writes a handful of rows, and etcd takes 128 in one transaction."""


class View:
    """What is committed, and over it what is about to be."""

    def __init__(self, source: Source, pending: Mapping[str, bytes | None]) -> None:
        self._source = source
        self._pending = pending
        self.writes: dict[str, bytes | None] = {}

    def get(self, key: str) -> Row | None:
        for layer in (self.writes, self._pending):
            if key in layer:
                return _decode(layer[key])
        return _decode(self._source.get(key))

    def put(self, key: str, row: Row) -> None:
        self.writes[key] = json.dumps(row, sort_keys=True, separators=(",", ":")).encode()

    def delete(self, key: str) -> None:
        self.writes[key] = None

    def scan(self, prefix: str, start: str = "") -> Iterator[tuple[str, Row]]:
        """The rows whose key begins with `prefix`, in order, from `prefix + start` on."""
        first, end = prefix + start, prefix + "\U0010ffff"
        found: dict[str, bytes | None] = dict(self._source.scan(first, end))
        for layer in (self._pending, self.writes):
            found |= {key: value for key, value in layer.items() if first <= key < end}
        for key in sorted(found):
            if (row := _decode(found[key])) is not None:
                yield key, row


class Store(ABC):
    """One thread commits. `submit` may be called from any thread, `transact` from a loop."""

    def __init__(self, key: bytes, note: VersionNote | None = None) -> None:
        """`key` authenticates the rows; `note` remembers the version apart from the store."""
        self._rows = AuthenticatedRows(key, note)
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._loop, name="sealring-store", daemon=True)
        self._closed = False

    def submit(self, decide: Callable[[View], T]) -> Future[T]:
        future: Future[T] = Future()
        if self._closed:
            future.set_exception(StoreUnavailable("the broker is stopping"))
        else:
            self._jobs.put((decide, future))
        return future

    async def transact(self, decide: Callable[[View], T]) -> T:
        return await asyncio.wrap_future(self.submit(decide))

    def close(self) -> None:
        """After what was submitted is committed."""
        if not self._closed:
            self._closed = True
            self._jobs.put(None)
            self._thread.join()

    @abstractmethod
    def commit(self, run: Callable[[Source], dict[str, bytes | None]]) -> None:
        """Call `run` on what is committed and commit what it returns; again, if that changed."""

    @abstractmethod
    def _release(self) -> None:
        """Let go of files and connections."""

    def _start(self) -> None:
        self._thread.start()

    def _loop(self) -> None:
        last = False
        while not last:
            batch: list[Job] = []
            job = self._jobs.get()
            while job is not None:
                batch.append(job)
                if len(batch) == _BATCH or self._jobs.empty():
                    break
                job = self._jobs.get()
            last = job is None
            # A request that the server has given up cancels its future, which takes no result.
            if wanted := [each for each in batch if each[1].set_running_or_notify_cancel()]:
                self._commit(wanted)
        self._release()

    def _commit(self, batch: list[Job]) -> None:
        outcomes: list[tuple[Any, BaseException | None]] = []

        def run(source: Source) -> dict[str, bytes | None]:
            outcomes.clear()
            pending: dict[str, bytes | None] = {}
            rows = self._rows.at(source)
            for decide, _ in batch:
                view = View(rows, pending)
                try:
                    outcomes.append((decide(view), None))
                except (StoreUnavailable, TamperedStore):
                    raise
                except BaseException as problem:
                    outcomes.append((None, problem))
                else:
                    pending |= view.writes
            return self._rows.stage(pending)

        failure: BaseException | None = None
        try:
            self.commit(run)
            self._rows.committed()
        except BaseException as problem:
            failure = problem
        for index, (_, future) in enumerate(batch):
            result, raised = (None, failure) if failure else outcomes[index]
            if raised is not None:
                future.set_exception(raised)
            else:
                future.set_result(result)


def _decode(value: bytes | None) -> Row | None:
    """A row that is no JSON object has nothing in it.

    Only an entry of the audit log can be such a row, and its reader misses what an entry has: the
    store authenticates all others.
    """
    if value is None:
        return None
    try:
        row = read_json(value)
    except ValueError:
        row = None
    return row if isinstance(row, dict) else {}
