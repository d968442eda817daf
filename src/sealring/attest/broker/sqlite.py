"""The store of a single broker: one SQLite file, on the disk before anybody is answered."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Final

from sealring.attest.broker.authenticated import Source, VersionNote
from sealring.attest.broker.store import Store
from sealring.errors import ConfigurationError, StoreUnavailable

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
            raise StoreUnavailable(f"the broker's store failed: {problem}") from problem

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
