"""A torch.distributed Store whose server sees neither names nor values, and can forge neither.

What a server must do itself it can also do wrongly: it adds up counters, counts keys, and decides
what is there and what is not. docs/spec.md says what that leaves to it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any, Final

import torch.distributed  # noqa: F401 (makes the module below importable)
from torch._C._distributed_c10d import Store

from sealring.errors import StoreError, TamperedValue, Unsupported
from sealring.store.freshness import Freshness, Seen
from sealring.store.values import WRITER_BYTES, Kind, Part, StoreKeys, parse_parts

_EXCHANGE_ATTEMPTS: Final = 1000


class _Writer:
    """This process as the author of values, shared by all clones of a store."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        """Held from the numbering of a part until it is in the store, so that numbers grow there
        in the order of writing."""
        self._pid = 0
        self._name = b""
        self._number = 0
        self.freshness = Freshness()
        self.counters: set[str] = set()
        """Keys that this process has added to."""

    def next(self) -> tuple[bytes, int]:
        if self._pid != os.getpid():  # a forked child is a writer of its own
            self._pid, self._name, self._number = os.getpid(), os.urandom(WRITER_BYTES), 0
        self._number += 1
        return self._name, self._number


class SealedStore(Store):
    """Seals every value and hashes every key under `key` before they reach `store`.

    All workers that are to share it need the same key and the same context; `open_sealed_store`
    and `seal_group_store` make one from a job's secret or from a group.
    """

    def __init__(self, store: Store, key: bytes, context: Iterable[str] = ()) -> None:
        super().__init__()
        self._store = store
        self._keys = StoreKeys.derive(key, context)
        self._writer = _Writer()

    # ---- values

    def set(self, key: str, value: str | bytes) -> None:
        name = self._value_name(key)
        with self._writer.lock:
            sealed, latest = self._seal(Kind.VALUE, name, value)
            self._store.set(name, sealed)
            self._writer.freshness.note(name, latest)

    def get(self, key: str) -> bytes:
        if key in self._writer.counters:
            return str(self.add(key, 0)).encode()
        name = self._keys.value_name(key)
        before = self._writer.freshness.seen(name)
        return self._open(self._store.get(name), name, before)

    def append(self, key: str, value: str | bytes) -> None:
        name = self._value_name(key)
        with self._writer.lock:
            sealed, latest = self._seal(Kind.APPENDED, name, value)
            self._store.append(name, sealed)
            self._writer.freshness.note(name, latest)

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        """As torch's: sets `desired` if the value is `expected`, and returns what is there now.

        The server cannot compare values that are sealed anew each time. So the comparison is made
        here, and the server exchanges the sealed bytes that it was made on, or none.
        """
        name = self._value_name(key)
        expected, desired = _bytes(expected_value), _bytes(desired_value)
        for _ in range(_EXCHANGE_ATTEMPTS):
            before = self._writer.freshness.seen(name)
            raw = bytes(self._store.get(name)) if self._store.check([name]) else b""
            current = self._open(raw, name, before) if raw else b""
            if current != expected:
                # torch's stores say so of a key that is not there, and callers know it.
                return current if raw else expected
            with self._writer.lock:
                sealed, latest = self._seal(Kind.VALUE, name, desired)
                found = bytes(self._store.compare_set(name, raw, sealed))
                if found == sealed:
                    self._writer.freshness.note(name, latest)
                    return desired
        raise StoreError(
            f"compare_set: the store changed its value {_EXCHANGE_ATTEMPTS} times while it was "
            "compared. Either the store does not tell the truth, or too many workers compete for "
            "one key"
        )

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        names = [self._value_name(key) for key in keys]
        before = [self._writer.freshness.seen(name) for name in names]
        values = self._store.multi_get(names)
        if len(values) != len(names):
            raise TamperedValue(f"the store gave {len(values)} values for {len(names)} keys")
        return [self._open(*each) for each in zip(values, names, before, strict=True)]

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        names = [self._value_name(key) for key in keys]
        with self._writer.lock:
            parts = [self._seal(Kind.VALUE, n, v) for n, v in zip(names, values, strict=True)]
            self._base.multi_set(names, [sealed for sealed, _ in parts])
            for name, (_, latest) in zip(names, parts, strict=True):
                self._writer.freshness.note(name, latest)

    # ---- queues

    def queue_push(self, key: str, value: str | bytes) -> None:
        name = self._value_name(key)
        with self._writer.lock:
            sealed, _ = self._seal(Kind.QUEUED, name, value)
            self._store.queue_push(name, sealed)

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        name = self._value_name(key)
        before = self._writer.freshness.seen(name)
        return self._open(self._store.queue_pop(name, block), name, before, queued=True)

    def queue_len(self, key: str) -> int:
        return self._store.queue_len(self._value_name(key))

    # ---- counters, which the server adds up and so can read and change

    def add(self, key: str, value: int) -> int:
        if key not in self._writer.counters:
            if self._store.check([self._keys.value_name(key)]):
                raise Unsupported(
                    "add: this key holds a sealed value, to which a server cannot add. Use another "
                    "key for the counter"
                )
            self._writer.counters.add(key)
        return self._store.add(self._keys.counter_name(key), value)

    # ---- what is there

    def check(self, keys: Sequence[str]) -> bool:
        return self._store.check([self._name(key) for key in keys])

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        names = [self._name(key) for key in keys]
        if timeout is None:
            self._store.wait(names)
        else:
            self._store.wait(names, timeout)

    def delete_key(self, key: str) -> bool:
        name = self._name(key)
        self._writer.counters.discard(key)
        return self._store.delete_key(name)

    def num_keys(self) -> int:
        return self._store.num_keys()

    def list_keys(self) -> list[str]:
        raise Unsupported("list_keys: a sealed store keeps hashes of its keys, not the keys")

    # ---- the connection

    def has_extended_api(self) -> bool:
        return bool(self._base.has_extended_api())

    @property
    def timeout(self) -> timedelta:
        timeout: timedelta = self._base.timeout
        return timeout

    def set_timeout(self, timeout: timedelta) -> None:
        super().set_timeout(timeout)
        self._store.set_timeout(timeout)

    def clone(self) -> SealedStore:
        """Another connection to the same store, as the same writer."""
        other = SealedStore.__new__(SealedStore)
        Store.__init__(other)
        other._store = self._base.clone()
        other._keys = self._keys
        other._writer = self._writer
        return other

    @property
    def underlying_store(self) -> Store:
        return self._store

    # torch's C++ calls these two by its own names.
    deleteKey = delete_key  # noqa: N815
    getNumKeys = num_keys  # noqa: N815

    # ---- inside

    @property
    def _base(self) -> Any:
        """The store, where torch's type stubs do not list what every store has."""
        return self._store

    def _name(self, key: str) -> str:
        if key in self._writer.counters:
            return self._keys.counter_name(key)
        return self._keys.value_name(key)

    def _value_name(self, key: str) -> str:
        if key in self._writer.counters:
            raise Unsupported("this key is a counter, because add() was called on it before")
        return self._keys.value_name(key)

    def _seal(self, kind: Kind, name: str, value: str | bytes) -> tuple[bytes, Seen]:
        writer, number = self._writer.next()
        return self._keys.seal(kind, name, writer, number, _bytes(value)), {writer: number}

    def _open(self, raw: bytes, name: str, before: Seen, *, queued: bool = False) -> bytes:
        parts = parse_parts(bytes(raw))
        _check_kinds(parts, queued=queued)
        value = b"".join(self._keys.open(part, name) for part in parts)
        self._writer.freshness.check(parts, name, before)
        return value


def _check_kinds(parts: Sequence[Part], *, queued: bool) -> None:
    kinds = [part.kind for part in parts]
    first = {Kind.QUEUED} if queued else {Kind.VALUE, Kind.APPENDED}
    if kinds[0] not in first or any(kind is not Kind.APPENDED for kind in kinds[1:]):
        raise TamperedValue("the store holds a value of another kind under this key")
    if queued and len(parts) > 1:
        raise TamperedValue("the store holds several entries of a queue as one")


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
