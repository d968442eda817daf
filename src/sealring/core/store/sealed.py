"""A torch.distributed Store whose server sees neither names nor values, and can forge neither.

What a server must do itself it can also do wrongly: it adds up counters, counts keys, and decides
what is there and what is not. docs/spec.md says what that leaves to it.
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
from sealring.core.handshake.secrets import Wiped
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
"""Beyond this the name that was used longest ago is forgotten: memory must not grow for ever."""

PartId = tuple[bytes, int]
"""A part's writer, and its number among the writer's parts. No two parts have the same."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What is known of one name."""

    current: tuple[PartId, ...] = ()
    """The parts that the last read found."""
    gone: Mapping[bytes, int] = field(default_factory=dict)
    """By writer: its parts up to this number have been replaced or deleted."""


_NOTHING: Final = Seen()


class Freshness:
    """Every method may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.remembered: OrderedDict[str, Seen] = OrderedDict()

    def seen(self, name: str) -> Seen:
        """Ask before reading: threads may finish their reads in another order than they began."""
        with self._lock:
            return self.remembered.get(name, _NOTHING)

    def check(self, name: str, before: Seen, parts: Sequence[PartId]) -> None:
        """store.replayed_value if a part was gone, or a later one there, `before` this was read."""
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
            # If another thread has read meanwhile, it is unknown which value is the later one.
            current = found if now is before else now.current
            self._keep(name, now, current, gone.items())

    def replaced(self, name: str, writer: bytes, number: int) -> None:
        """What `writer` put there up to `number` is gone, as the writer itself knows."""
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

    All workers that are to share it need the same keys; `sealring.sealed_store` makes them from a
    job's secret or in a group. Keep it as long as it is used: a PrefixStore, and
    torch's C++ in general, does not keep a Python store alive.
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
            raise tampered(f"the store gave {len(values)} values for {len(names)} keys")
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
        if self.inner.timeout != self.timeout:
            self.inner.set_timeout(self.timeout)
        return self.inner

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


def sealed_store(
    store: Store | None = None,
    *,
    group: dist.ProcessGroup | None = None,
    install: bool = False,
) -> SealedStore:
    """A torch.distributed store whose names and values only the job's workers can read or write.

    With `store`: that store under a key that every holder of the job's secret derives. No group is
    needed. Values of another job, of another run of torchrun's or of an earlier restart do not
    open.

    Without it: the store of `group`, by default of the default group, under a random key that
    travels over the group's sealed links. All members call it. It serves every kind of identity,
    and nothing that was written before opens under it. With `install=True` torch itself uses it
    from here on, for barriers and for new groups; call it once, after init_process_group.
    """
    if store is None:
        return _group_store(group, install=install)
    if group is not None or install:
        raise ConfigurationError("pass sealed_store() a store, or a group's settings, and not both")
    return store_under_secret(store, os.environ)


def store_under_secret(store: Store, environ: Mapping[str, str]) -> SealedStore:
    """`store` under the key of the job secret, for this run and restart of torchrun's."""
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
        # The tensor has the secret's own memory.
        dist.broadcast(
            torch.frombuffer(key, dtype=torch.uint8),
            src=dist.get_global_rank(group, 0),
            group=group,
        )
        sealed = SealedStore(store, StoreKeys.derive(key, ["group"]))
    if install:
        distributed_c10d._world.pg_map[group] = (backend, sealed)
    return sealed
