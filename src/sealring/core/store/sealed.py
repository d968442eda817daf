"""A torch.distributed Store whose server sees neither names nor values, and can forge neither.

What a server must do itself it can also do wrongly: it adds up counters, counts keys, and decides
what is there and what is not. docs/spec.md says what that leaves to it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Final

import torch.distributed  # noqa: F401 (makes the module below importable)
from torch._C._distributed_c10d import Store

from sealring import _native
from sealring.core.store.freshness import Freshness, Seen
from sealring.core.store.values import WRITER_BYTES, Kind, StoreKeys, parse_parts
from sealring.errors import StoreError, TamperedValue, Unsupported

_EXCHANGE_ATTEMPTS: Final = 1000


class SealedStore(Store):
    """Seals every value and hashes every key before they reach `store`.

    All workers that are to share it need the same keys; `open_sealed_store` and `seal_group_store`
    make them from a job's secret or in a group. Keep it as long as it is used: a PrefixStore, and
    torch's C++ in general, does not keep a Python store alive.
    """

    timeout: timedelta  # torch's own property, which its type stubs leave out

    def __init__(self, store: Store, keys: StoreKeys) -> None:
        super().__init__()
        self._process = _native.ProcessMark()
        self._inner: Any = store
        self._keys = keys
        self._freshness = Freshness()
        self._writer = _Writer()
        self._clones: list[SealedStore] = []
        self.set_timeout(store.timeout)  # type: ignore[attr-defined]

    # ---- values

    def set(self, key: str, value: str | bytes) -> None:
        name = self._keys.value_name(key)
        with self._sealed(Kind.VALUE, name, value) as sealed:
            self._store.set(name, sealed)
            self._replaced(name)

    def get(self, key: str) -> bytes:
        name = self._keys.value_name(key)
        before = self._freshness.seen(name)
        return self._value(key, self._open(name, before, self._store.get(name)))

    def append(self, key: str, value: str | bytes) -> None:
        name = self._keys.value_name(key)
        with self._sealed(Kind.APPENDED, name, value) as sealed:
            self._store.append(name, sealed)

    def compare_set(
        self, key: str, expected_value: str | bytes, desired_value: str | bytes
    ) -> bytes:
        """As torch's: sets `desired` if the value is `expected`, and returns what is there now.

        The server cannot compare values that are sealed anew each time. So the comparison is made
        here, and the server exchanges the very bytes that it was made on, or nothing.
        """
        name = self._keys.value_name(key)
        expected, desired = _bytes(expected_value), _bytes(desired_value)
        for _ in range(_EXCHANGE_ATTEMPTS):
            before = self._freshness.seen(name)
            raw = bytes(self._store.get(name)) if self._store.check([name]) else b""
            current = self._open(name, before, raw) if raw else b""
            if current is None:
                raise Unsupported("compare_set: this key is a counter, use add() alone on it")
            if current != expected:
                # torch's stores answer so for a key that is not there, and callers know it.
                return current if raw else expected
            with self._sealed(Kind.VALUE, name, desired) as sealed:
                if bytes(self._store.compare_set(name, raw, sealed)) == sealed:
                    self._replaced(name)
                    return desired
        raise StoreError(
            f"compare_set: the store changed its value {_EXCHANGE_ATTEMPTS} times while it was "
            "compared. Either the store does not tell the truth, or too many workers compete for "
            "one key"
        )

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        names = [self._keys.value_name(key) for key in keys]
        before = [self._freshness.seen(name) for name in names]
        values = self._store.multi_get(names)
        if len(values) != len(names):
            raise TamperedValue(f"the store gave {len(values)} values for {len(names)} keys")
        opened = map(self._open, names, before, values)
        return [self._value(key, value) for key, value in zip(keys, opened, strict=True)]

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        # One by one: each is numbered and in the store before the next one is numbered.
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    # ---- counters, which the server adds up and so can read and change

    def add(self, key: str, value: int) -> int:
        """Adds to a counter; `add(key, 0)` reads it. A key is a counter or a value, never both."""
        total: int = self._store.add(self._keys.counter_name(key), value)
        # The number cannot be sealed, but that it is one can: else a server could have any value
        # be taken for a number of its choice.
        name = self._keys.value_name(key)
        before = self._freshness.seen(name)
        with self._sealed(Kind.COUNTER, name, b"") as mark:
            found = bytes(self._store.compare_set(name, b"", mark))
        if found != mark and self._open(name, before, found) is not None:
            raise Unsupported(
                "add: this key holds a sealed value, to which a server cannot add. Use another key "
                "for the counter"
            )
        return total

    # ---- what is there

    def check(self, keys: Sequence[str]) -> bool:
        there: bool = self._store.check([self._keys.value_name(key) for key in keys])
        return there

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        names = [self._keys.value_name(key) for key in keys]
        self._store.wait(names, self.timeout if timeout is None else timeout)

    def delete_key(self, key: str) -> bool:
        name = self._keys.value_name(key)
        with self._writer.lock:
            deleted: bool = self._store.delete_key(name)
            self._replaced(name, also_the_last=True)
        self._store.delete_key(self._keys.counter_name(key))
        return deleted

    def num_keys(self) -> int:
        """As the server counts them: a counter is two."""
        number: int = self._store.num_keys()
        return number

    # torch's C++ calls these two by its own names.
    deleteKey = delete_key  # noqa: N815
    getNumKeys = num_keys  # noqa: N815

    # ---- the connection

    def has_extended_api(self) -> bool:
        return bool(self._store.has_extended_api())

    def clone(self) -> SealedStore:
        """Another connection to the same store."""
        other = SealedStore(self._store.clone(), self._keys)
        other._freshness = self._freshness
        self._clones.append(other)
        return other

    @property
    def _store(self) -> Any:
        """The store beneath, with our timeout: torch's C++ sets that without calling Python."""
        self._process.require("this store")  # its connection is the parent's, too
        if self._inner.timeout != self.timeout:
            self._inner.set_timeout(self.timeout)
        return self._inner

    # ---- inside

    @contextmanager
    def _sealed(self, kind: Kind, name: str, value: str | bytes) -> Iterator[bytes]:
        """The value sealed as this writer's next part. The block puts it into the store."""
        with self._writer.lock:
            writer, number = self._writer.next()
            yield self._keys.seal(kind, name, writer, number, _bytes(value))

    def _replaced(self, name: str, *, also_the_last: bool = False) -> None:
        writer, number = self._writer.last()
        self._freshness.replaced(name, writer, number if also_the_last else number - 1)

    def _open(self, name: str, before: Seen, raw: bytes) -> bytes | None:
        """The value; None for a counter."""
        parts = parse_parts(bytes(raw))
        values = [self._keys.open(part, name) for part in parts]
        self._freshness.check(name, before, [(part.writer, part.number) for part in parts])
        return None if parts[0].kind is Kind.COUNTER else b"".join(values)

    def _value(self, key: str, opened: bytes | None) -> bytes:
        if opened is not None:
            return opened
        return str(self._store.add(self._keys.counter_name(key), 0)).encode()


class _Writer:
    """One connection of this process as the author of parts."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        """Held from the numbering of a part until it is in the store, so that numbers grow there
        in the order of writing."""
        self._name = os.urandom(WRITER_BYTES)
        self._number = 0

    def next(self) -> tuple[bytes, int]:
        self._number += 1
        return self.last()

    def last(self) -> tuple[bytes, int]:
        return self._name, self._number


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
