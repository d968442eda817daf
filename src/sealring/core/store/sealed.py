"""A torch.distributed Store whose server sees neither names nor values, and cannot forge them.

What the server does itself is not protected: it adds to counters, counts keys, and says whether a
key exists. docs/spec.md says what a dishonest server can do by that.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store
from torch.distributed import distributed_c10d

from sealring import _native
from sealring.core.identity.kept_key import Wiped
from sealring.core.identity.names import check_job
from sealring.core.identity.secret import default_job, derive_store_key, read_secret
from sealring.core.settings import JOB
from sealring.core.store.values import WRITER_BYTES, Kind, StoreKeys, parse_parts, tampered
from sealring.errors import (
    ConfigurationError,
    StoreError,
    Unsupported,
)
from sealring.limits import KEY_BYTES

REMEMBERED_NAMES: Final = 1 << 16
"""How many names are remembered, to limit memory. The least recently used name is dropped."""

PartId = tuple[bytes, int]
"""A part's writer, and its number among the writer's parts. No two parts have the same."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What this process knows about one name."""

    current: tuple[PartId, ...] = ()
    """The parts that the last read found."""
    gone: Mapping[bytes, int] = field(default_factory=dict)
    """For each writer: its parts up to this number have been replaced or deleted."""


_NOTHING: Final = Seen()


class Freshness:
    """Detects old values that a store gives again. Methods may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.remembered: OrderedDict[str, Seen] = OrderedDict()

    def seen(self, name: str) -> Seen:
        """Returns what is known of a name. Call it before reading, and pass the result to `check`.

        Threads may finish their reads in another order than they began them.
        """
        with self._lock:
            return self.remembered.get(name, _NOTHING)

    def check(self, name: str, before: Seen, parts: Sequence[PartId]) -> None:
        """Raises store.replayed_value if the value is older than what was known `before` the
        read."""
        found = tuple(parts)
        gone = dict(before.gone)
        # A value only ever grows, or is replaced as a whole.
        if found[: len(before.current)] != before.current:
            _raise(gone, before.current)
        last = dict(gone)
        for writer, number in found:
            if number <= last.get(writer, 0):
                raise StoreError(
                    "the store gave a value that had been replaced, cut or put into another order "
                    "since this process last saw it: somebody put it back",
                    code="store.replayed_value",
                )
            last[writer] = number
        with self._lock:
            now = self.remembered.get(name, _NOTHING)
            # If another thread has read meanwhile, it is unknown which value is newer.
            current = found if now is before else now.current
            self._keep(name, now, current, gone.items())

    def replaced(self, name: str, writer: bytes, number: int) -> None:
        """Called by a writer: its parts up to `number` under this name are replaced or deleted."""
        with self._lock:
            now = self.remembered.get(name, _NOTHING)
            self._keep(name, now, now.current, [(writer, number)])

    def _keep(
        self, name: str, now: Seen, current: tuple[PartId, ...], gone: Iterable[PartId]
    ) -> None:
        floor = dict(now.gone)
        _raise(floor, gone)
        self.remembered[name] = Seen(current, floor)
        self.remembered.move_to_end(name)
        if len(self.remembered) > REMEMBERED_NAMES:
            self.remembered.popitem(last=False)


def _raise(floor: dict[bytes, int], parts: Iterable[PartId]) -> None:
    for writer, number in parts:
        floor[writer] = max(number, floor.get(writer, 0))


_EXCHANGE_ATTEMPTS: Final = 1000


class SealedStore(Store):
    """Seals every value and hashes every key before they reach `store`.

    All workers that share it need the same keys; `sealring.sealed_store` makes them from a job
    secret or in a group. Keep a reference to it as long as it is used: a PrefixStore, and torch's
    C++ in general, does not keep a Python store alive.
    """

    timeout: timedelta  # torch's own property, which its type stubs leave out

    def __init__(self, store: Store, keys: StoreKeys) -> None:
        super().__init__()
        self._process = _native.ProcessMark()
        self.inner: Any = store
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
        """Like torch's: sets `desired` if the value is `expected`; returns the value afterwards.

        The server cannot compare values, because each is sealed differently. So this compares the
        opened value, and then asks the server to exchange exactly the sealed bytes that it read.
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
                # For a missing key, torch's stores return `expected`, and callers rely on it.
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
            raise tampered(f"the store gave {len(values)} values for {len(names)} keys")
        opened = map(self._open, names, before, values)
        return [self._value(key, value) for key, value in zip(keys, opened, strict=True)]

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        # One by one: each part must be in the store before the next one gets its number.
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    # ---- counters, which the server adds to, and so can read and change

    def add(self, key: str, value: int) -> int:
        """Adds to a counter; `add(key, 0)` reads it. A key is a counter or a value, never both."""
        total: int = self._store.add(self._keys.counter_name(key), value)
        # The number cannot be sealed. But a sealed mark says that the key is a counter: else the
        # server could replace any value by a number.
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

    # ---- which keys exist

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
        """The server's number of keys. A counter has two."""
        number: int = self._store.num_keys()
        return number

    # torch's C++ uses these names for the two methods.
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
        """The inner store with this store's timeout, which torch's C++ sets without calling
        Python."""
        self._process.require("this store")  # its connection is the parent's, too
        if self.inner.timeout != self.timeout:
            self.inner.set_timeout(self.timeout)
        return self.inner

    # ---- inside

    @contextmanager
    def _sealed(self, kind: Kind, name: str, value: str | bytes) -> Iterator[bytes]:
        """Yields the value sealed as this writer's next part. The block must store it."""
        with self._writer.lock:
            writer, number = self._writer.next()
            yield self._keys.seal(kind, name, writer, number, _bytes(value))

    def _replaced(self, name: str, *, also_the_last: bool = False) -> None:
        writer, number = self._writer.last()
        self._freshness.replaced(name, writer, number if also_the_last else number - 1)

    def _open(self, name: str, before: Seen, raw: bytes) -> bytes | None:
        """Opens and checks a value; returns None for a counter."""
        parts = parse_parts(bytes(raw))
        values = [self._keys.open(part, name) for part in parts]
        self._freshness.check(name, before, [(part.writer, part.number) for part in parts])
        return None if parts[0].kind is Kind.COUNTER else b"".join(values)

    def _value(self, key: str, opened: bytes | None) -> bytes:
        if opened is not None:
            return opened
        return str(self._store.add(self._keys.counter_name(key), 0)).encode()


class _Writer:
    """The identity of one connection of this process, and the number of its last part."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        """Held from the numbering of a part until it is in the store, so that parts reach the store
        in the order of their numbers."""
        self._name = os.urandom(WRITER_BYTES)
        self._number = 0

    def next(self) -> tuple[bytes, int]:
        self._number += 1
        return self.last()

    def last(self) -> tuple[bytes, int]:
        return self._name, self._number


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


def sealed_store(
    store: Store | None = None,
    *,
    group: dist.ProcessGroup | None = None,
    install: bool = False,
) -> SealedStore:
    """A torch.distributed store whose names and values only the job's workers can read or write.

    With `store`: seals that store under a key that every holder of the job secret derives. No group
    is needed. Values of another job, of another run of torchrun or of an earlier restart do not
    open.

    Without `store`: seals the store of `group` (by default the default group) under a random key
    that is sent over the group's sealed links. All members must call it. It works with every kind
    of identity. Values that were written before do not open. With `install=True` torch itself uses
    the sealed store from now on, for barriers and new groups; call it once, after
    init_process_group.
    """
    if store is None:
        return _group_store(group, install=install)
    if group is not None or install:
        raise ConfigurationError("pass sealed_store() a store, or a group's settings, and not both")
    return store_under_secret(store, os.environ)


def store_under_secret(store: Store, environ: Mapping[str, str]) -> SealedStore:
    """Seals `store` under the key of the job secret, for this run and restart of torchrun."""
    run = environ.get("TORCHELASTIC_RUN_ID", "")
    restart = environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return SealedStore(store, keys_from_secret(environ, ["worker", run, restart]))


def keys_from_secret(environ: Mapping[str, str], context: list[str]) -> StoreKeys:
    secret = read_secret(environ)
    if secret is None:
        raise ConfigurationError(
            "a store can be sealed before there is a group only under a job secret "
            "(SEALRING_SECRET_FILE): workers with certificates share no key until they have met. "
            "Make the group first, then call sealring.sealed_store(install=True)"
        )
    job = JOB.read(environ) or default_job(secret)
    check_job(job)
    return StoreKeys.derive(derive_store_key(secret), [job, *context])


def _group_store(group: dist.ProcessGroup | None, *, install: bool) -> SealedStore:
    group = group or dist.group.WORLD
    if group is None or dist.get_backend(group) != "sealring":
        raise Unsupported("a store's key can only be agreed over a group of the sealring backend")
    backend, store = distributed_c10d._world.pg_map[group]
    first = dist.get_rank(group) == 0
    key = _native.Secret.random(KEY_BYTES) if first else _native.Secret.zeros(KEY_BYTES)
    with Wiped(key):
        # The tensor shares the secret's memory.
        dist.broadcast(
            torch.frombuffer(key, dtype=torch.uint8),
            src=dist.get_global_rank(group, 0),
            group=group,
        )
        sealed = SealedStore(store, StoreKeys.derive(key, ["group"]))
    if install:
        distributed_c10d._world.pg_map[group] = (backend, sealed)
    return sealed
