"""Authenticates all rows of a store under a key that the store does not hold.

Others than brokers may write to a store: many programs may share one etcd, and a file lies on a
disk. So no row is believed because it is in the store. One row, `state`, holds a version and the
root of a hash tree over all other rows, with a MAC:

    leaf    = SHA-256(00, length of name, name, value)
    bucket  = SHA-256(01, its leaves in order)           a leaf's bucket is SHA-256(name)[0]
    root    = SHA-256(02, the 256 buckets in order)
    state   = {store, version, root, mac: HMAC-SHA256(key, store, version, root)}

A process reads the rows once and checks them against the state. From then on it decides on its own
copy, as long as the state in the store does not change. So a row that was forged, exchanged,
deleted or put back to an older value is either not used or raises TamperedStore. This does not
notice an older copy of the whole store. Against that, versions never go back while a process runs,
and `VersionNote` keeps the last version on the broker's own disk.

Entries of the audit log are not part of the tree, because each has a signed checkpoint. The row
`audit/head` is part of the tree and commits to all of them.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

from sealring.core.identity.process import read_private
from sealring.errors import ConfigurationError, TamperedStore
from sealring.formats.files import replace_private
from sealring.formats.strict import read_json

_LOG = logging.getLogger("sealring.attest.broker")
STATE: Final = "state"
ENTRIES: Final = ("audit/0", "audit/:")
"""The range of the audit log's entries. Every other name sorts after it."""
_END: Final = "\U0010ffff"
_PURPOSE: Final = b"sealring-1 store\0"
_BUCKETS: Final = 256

Writes = Mapping[str, bytes | None]


class Source(Protocol):
    """The committed rows."""

    def get(self, key: str) -> bytes | None: ...
    def scan(self, start: str, end: str) -> list[tuple[str, bytes]]: ...


@dataclass(frozen=True, slots=True)
class State:
    store: str
    version: int
    root: str

    def encode(self, key: bytes) -> bytes:
        fields = {"store": self.store, "version": self.version, "root": self.root}
        return json.dumps({**fields, "mac": _mac(key, fields)}).encode()

    @classmethod
    def decode(cls, value: bytes, key: bytes) -> State:
        try:
            fields: dict[str, Any] = read_json(value)
            mac = fields.pop("mac")
            if not hmac.compare_digest(mac, _mac(key, fields)):
                raise TamperedStore("the state of the broker's store was not written by a broker")
            return cls(**fields)
        except (ValueError, TypeError, KeyError, AttributeError):
            raise TamperedStore("the broker's store holds something else than its state") from None


def _mac(key: bytes, fields: dict[str, Any]) -> str:
    text = json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()
    return hmac.new(key, _PURPOSE + text, hashlib.sha256).hexdigest()


class HashTree:
    """The hash tree, in memory. A change hashes only the buckets that it touches again."""

    def __init__(self, rows: Mapping[str, bytes]) -> None:
        self._leaves: list[dict[str, bytes]] = [{} for _ in range(_BUCKETS)]
        for name, value in rows.items():
            self._leaves[_bucket(name)][name] = _leaf(name, value)
        self._buckets = [_digest(leaves) for leaves in self._leaves]

    def root(self, writes: Writes | None = None) -> str:
        """The root. With `writes`, the root that it will have once they are made."""
        buckets = list(self._buckets)
        for number, leaves in self._changed(writes or {}).items():
            buckets[number] = _digest(leaves)
        return hashlib.sha256(b"\2" + b"".join(buckets)).hexdigest()

    def apply(self, writes: Writes) -> None:
        for number, leaves in self._changed(writes).items():
            self._leaves[number] = leaves
            self._buckets[number] = _digest(leaves)

    def _changed(self, writes: Writes) -> dict[int, dict[str, bytes]]:
        changed: dict[int, dict[str, bytes]] = {}
        for name, value in writes.items():
            number = _bucket(name)
            leaves = changed.setdefault(number, dict(self._leaves[number]))
            if value is None:
                leaves.pop(name, None)
            else:
                leaves[name] = _leaf(name, value)
        return changed


class AuthenticatedRows:
    """The committed rows, as this process has checked them."""

    def __init__(self, key: bytes, note: VersionNote | None = None) -> None:
        self._key = key
        self._note = note
        self._known: bytes | None = None
        """The `state` row that `_rows` was checked against."""
        self._state = State("", 0, "")
        self._tables: dict[str, dict[str, bytes]] = {}
        self._tree = HashTree({})
        self._staged: tuple[dict[str, bytes | None], bytes, State] | None = None

    def at(self, source: Source) -> Source:
        """Checks the rows that the source holds now. TamperedStore if no broker wrote them."""
        if source.get(STATE) != self._known or self._known is None:
            self._load(source)
        return _Snapshot(self._tables, source)

    def stage(self, writes: Writes) -> dict[str, bytes | None]:
        """The writes of one commit, with the new `state` row."""
        kept = {name: value for name, value in writes.items() if not _is_entry(name)}
        if not kept:
            self._staged = None
            return dict(writes)
        state = State(
            self._state.store or secrets.token_hex(16),
            self._state.version + 1,
            self._tree.root(kept),
        )
        value = state.encode(self._key)
        self._staged = kept, value, state
        return {**writes, STATE: value}

    def committed(self) -> None:
        """Called once the staged writes are in the store."""
        if self._staged is None:
            return
        kept, self._known, self._state = self._staged
        self._staged = None
        self._tree.apply(kept)
        for name, value in kept.items():
            table = self._tables.setdefault(_table(name), {})
            if value is None:
                table.pop(name, None)
            else:
                table[name] = value
        if self._note is not None:
            self._note.write(self._state)

    def _load(self, source: Source) -> None:
        # A single scan reads the state and the rows as of the same moment.
        rows = dict(source.scan(ENTRIES[1], _END))
        value = rows.pop(STATE, None)
        if value is None:
            # Again, with the log's entries, in one scan: another broker may have started just now.
            found = dict(source.scan(ENTRIES[0], _END))
            value = found.pop(STATE, None)
            rows = {name: row for name, row in found.items() if not _is_entry(name)}
        if value is None:
            if found or self._known is not None:
                raise TamperedStore(
                    "the broker's store has rows, and no state that vouches for them"
                )
            if self._note is not None:
                self._note.check(None)
            return
        state = State.decode(value, self._key)
        tree = HashTree(rows)
        if tree.root() != state.root:
            raise TamperedStore(
                "rows of the broker's store were changed, added or removed by something else than "
                "a broker: find out who can write there, and restore a copy of it"
            )
        if self._known is not None and (
            state.store != self._state.store or state.version < self._state.version
        ):
            raise TamperedStore(
                f"the broker's store went back from version {self._state.version} to "
                f"{state.version}: an older copy was put in its place"
            )
        if self._note is not None:
            self._note.check(state)
            self._note.write(state)
        self._known, self._state, self._tree = value, state, tree
        self._tables = {}
        for name, row in rows.items():
            self._tables.setdefault(_table(name), {})[name] = row


class _Snapshot:
    """Reads rows from memory, and the audit log's entries, which are signed, from the store."""

    def __init__(self, tables: dict[str, dict[str, bytes]], source: Source) -> None:
        self._tables = tables
        self._source = source

    def get(self, key: str) -> bytes | None:
        if _is_entry(key):
            return self._source.get(key)
        return self._tables.get(_table(key), {}).get(key)

    def scan(self, start: str, end: str) -> list[tuple[str, bytes]]:
        first, last = max(start, ENTRIES[0]), min(end, ENTRIES[1])
        found = self._source.scan(first, last) if first < last else []
        only = _table(start) if "/" in start else None  # nearly every scan is of one table
        for name, table in self._tables.items():
            if only is None or name == only:
                found += [(key, row) for key, row in table.items() if start <= key < end]
        return sorted(found)


class VersionNote:
    """A file with the last version of the store that a broker on this machine has seen.

    With it, a store that is older or empty is refused.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._warned = False

    def check(self, state: State | None) -> None:
        noted = self._read()
        if noted is None:
            return
        store, version = noted
        if state is None:
            problem = "is empty"
        elif state.store != store:
            problem = "is another one"
        elif state.version < version:
            problem = f"is at version {state.version}"
        else:
            return
        raise TamperedStore(
            f"this broker's store was last seen at version {version}, and now it {problem}: an "
            f"older copy, or another store, was put in its place. If you did that yourself, all "
            f"that was decided since is lost; remove {self._path} to go on"
        )

    def write(self, state: State) -> None:
        content = json.dumps({"store": state.store, "version": state.version}).encode()
        try:
            replace_private(self._path, content)
        except ConfigurationError as problem:
            if not self._warned:
                _LOG.warning("an older copy of the store would not be noticed: %s", problem)
            self._warned = True

    def _read(self) -> tuple[str, int] | None:
        if not self._path.exists():
            return None
        content = read_private(self._path, "the note of the store's version", ConfigurationError)
        try:
            fields = read_json(content)
            return str(fields["store"]), int(fields["version"])
        except (ValueError, TypeError, KeyError):
            raise ConfigurationError(f"{self._path} does not hold a store's version") from None


def _is_entry(name: str) -> bool:
    return ENTRIES[0] <= name < ENTRIES[1]


def _table(name: str) -> str:
    return name.partition("/")[0]


def _bucket(name: str) -> int:
    return hashlib.sha256(name.encode()).digest()[0]


def _leaf(name: str, value: bytes) -> bytes:
    text = name.encode()
    return hashlib.sha256(b"\0" + len(text).to_bytes(4, "big") + text + value).digest()


def _digest(leaves: Mapping[str, bytes]) -> bytes:
    return hashlib.sha256(b"\1" + b"".join(sorted(leaves.values()))).digest()
