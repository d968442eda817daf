"""Where a broker remembers, whatever it is kept in: functions on a view, committed whole or not.

A decision is a function that reads and writes a `View`. Functions that wait at the same time are
run one after the other and committed together, with one write to the disk; each sees what those
before it did. One that raises leaves nothing behind. So every step of the broker is one commit, and
between two commits there is no state to die in. A single broker keeps its rows in one SQLite file,
on the disk before anybody is answered; several share an etcd (etcd.py).
"""

from __future__ import annotations

import asyncio
import json
import os
import queue
import sqlite3
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Final, TypeAlias, TypeVar

from sealring.attest.broker.authenticated import AuthenticatedRows, Source, VersionNote
from sealring.errors import BrokerUnavailable, ConfigurationError, TamperedStore
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
            future.set_exception(
                BrokerUnavailable("the broker is stopping", code="broker.store_unavailable")
            )
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
                except (BrokerUnavailable, TamperedStore):
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


_BUSY_SECONDS: Final = 10.0
_SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS rows (key TEXT PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID;
CREATE TRIGGER IF NOT EXISTS audit_is_not_changed BEFORE UPDATE ON rows
  WHEN old.key GLOB 'audit/[0-9]*' BEGIN SELECT RAISE(ABORT, 'the audit log only grows'); END;
CREATE TRIGGER IF NOT EXISTS audit_is_not_cut BEFORE DELETE ON rows
  WHEN old.key GLOB 'audit/[0-9]*' BEGIN SELECT RAISE(ABORT, 'the audit log only grows'); END;
"""
# Not INSERT OR REPLACE, which the triggers do not see.
_WRITE: Final = (
    "INSERT INTO rows VALUES (?, ?) ON CONFLICT (key) DO UPDATE SET value = excluded.value"
)


class SqliteStore(Store):
    def __init__(self, path: Path, key: bytes, note: VersionNote | None = None) -> None:
        super().__init__(key, note)
        try:
            # Made by us, so that no other user could ever read it.
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
            self._connection = _connect(path)
        except (OSError, sqlite3.Error) as problem:
            raise ConfigurationError(f"the store {path} cannot be opened: {problem}") from None
        self._start()

    def commit(self, run: Callable[[Source], dict[str, bytes | None]]) -> None:
        try:
            # From here until the commit no other process writes, so what `run` reads stays so.
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                for key, value in run(_Rows(self._connection)).items():
                    self._write(key, value)
                self._connection.execute("COMMIT")
            except BaseException:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise
        except sqlite3.Error as problem:
            raise BrokerUnavailable(
                f"the broker's store failed: {problem}", code="broker.store_unavailable"
            ) from problem

    def _write(self, key: str, value: bytes | None) -> None:
        if value is None:
            self._connection.execute("DELETE FROM rows WHERE key = ?", (key,))
        else:
            self._connection.execute(_WRITE, (key, value))

    def _release(self) -> None:
        self._connection.close()


class _Rows:
    """SQLite keeps whatever type somebody else has written into a column: it is read as bytes."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def get(self, key: str) -> bytes | None:
        query = "SELECT CAST(value AS BLOB) FROM rows WHERE key = ?"
        found = self._connection.execute(query, (key,)).fetchone()
        return None if found is None else found[0]

    def scan(self, start: str, end: str) -> list[tuple[str, bytes]]:
        query = "SELECT key, CAST(value AS BLOB) FROM rows WHERE key >= ? AND key < ? ORDER BY key"
        return self._connection.execute(query, (start, end)).fetchall()


def _connect(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(
        path, timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False
    )
    connection.execute("PRAGMA journal_mode = WAL")
    # A power cut must not take back what a worker was told.
    connection.execute("PRAGMA synchronous = FULL")
    connection.executescript(_SCHEMA)
    return connection
