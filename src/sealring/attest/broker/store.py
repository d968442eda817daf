"""Where a broker keeps its rows: functions on a view, each committed whole or not at all.

A decision is a function that reads and writes a `StoreView`. Decisions that wait at the same time
are run one after the other and committed together, with one write to the disk. Each sees the writes
of those before it; one that raises writes nothing. So every step of the broker is one commit, and a
broker that is killed between two commits leaves no half-made state. A single broker keeps its rows
in one SQLite file, and answers only once they are on the disk. Several brokers share an etcd
(etcd.py).
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
Job: TypeAlias = tuple[Callable[["StoreView"], Any], Future[Any]]

_BATCH: Final = 16
"""Decisions per commit. Each writes a few rows, and etcd takes 128 in one transaction."""


class StoreView:
    """The committed rows, with pending writes laid over them."""

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


class LedgerStore(ABC):
    """Commits in one thread. Call `submit` from any thread, `transact` from an event loop."""

    def __init__(self, key: bytes, note: VersionNote | None = None) -> None:
        """`key` authenticates the rows. `note` keeps the version outside the store."""
        self._rows = AuthenticatedRows(key, note)
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._loop, name="sealring-store", daemon=True)
        self._closed = False

    def submit(self, decide: Callable[[StoreView], T]) -> Future[T]:
        future: Future[T] = Future()
        if self._closed:
            future.set_exception(
                BrokerUnavailable("the broker is stopping", code="broker.store_unavailable")
            )
        else:
            self._jobs.put((decide, future))
        return future

    async def transact(self, decide: Callable[[StoreView], T]) -> T:
        return await asyncio.wrap_future(self.submit(decide))

    def close(self) -> None:
        """Commits what was submitted, then stops."""
        if not self._closed:
            self._closed = True
            self._jobs.put(None)
            self._thread.join()

    @abstractmethod
    def commit(self, run: Callable[[Source], dict[str, bytes | None]]) -> None:
        """Calls `run` on the committed rows and commits its writes. Repeats if the rows changed."""

    @abstractmethod
    def _release(self) -> None:
        """Closes files and connections."""

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
            # When the server gives a request up, its future is cancelled and takes no result.
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
                view = StoreView(rows, pending)
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
    """Decodes a row. Bytes that are no JSON object give an empty row.

    Only an entry of the audit log can be such a row, because the store authenticates all others.
    The log's reader notices that its fields are missing.
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
# INSERT OR REPLACE would change a row without firing the triggers above.
_WRITE: Final = (
    "INSERT INTO rows VALUES (?, ?) ON CONFLICT (key) DO UPDATE SET value = excluded.value"
)


class SqliteStore(LedgerStore):
    def __init__(self, path: Path, key: bytes, note: VersionNote | None = None) -> None:
        super().__init__(key, note)
        try:
            # Created here with these permissions, so that no other user can ever read it.
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
            self._connection = _connect(path)
        except (OSError, sqlite3.Error) as problem:
            raise ConfigurationError(f"the store {path} cannot be opened: {problem}") from None
        self._start()

    def commit(self, run: Callable[[Source], dict[str, bytes | None]]) -> None:
        try:
            # Until the commit no other process writes, so what `run` has read stays true.
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
    """Reads rows from SQLite as bytes, because others may have written a value of any type."""

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
    # A power cut must not undo what a worker was told.
    connection.execute("PRAGMA synchronous = FULL")
    connection.executescript(_SCHEMA)
    return connection
