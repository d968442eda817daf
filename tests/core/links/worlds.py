"""A few workers in one process, with a store that tests can tamper with."""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from collections.abc import Iterator
from typing import Any, Self

from sealring.core.handshake import Terms
from sealring.core.identity import Credentials
from sealring.core.links import Link, Mesh, build_mesh
from sealring.core.links.threads import IDLE_NAME
from sealring.errors import named
from tests.core.handshake.meeting import terms
from tests.core.identity.issuing import Issuer

ISSUER = Issuer()
LOOPBACK = {"SEALRING_ADDRESS": "127.0.0.1"}
_EPOCH = re.compile("^sealring/[^/]+/(?=address/)")


class DictStore:
    """A store that can lie: `overlay` replaces values for readers.

    It also lets workers of different epochs find each other, which an honest store would not.
    """

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.overlay: dict[str, bytes] = {}

    def set(self, key: str, value: str) -> None:
        self.values[_EPOCH.sub("sealring/any/", key)] = value.encode()

    def get(self, key: str) -> bytes:
        return (self.values | self.overlay)[_EPOCH.sub("sealring/any/", key)]

    def check(self, keys: list[str]) -> bool:
        known = self.values | self.overlay
        return all(_EPOCH.sub("sealring/any/", key) in known for key in keys)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def multi_set(self, keys: list[str], values: list[str]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def address(self, rank: int) -> tuple[str, int]:
        """Waits until a rank has published its address, and returns the address."""
        key = address_key(rank)
        end = time.monotonic() + 10
        while key not in self.values:
            assert time.monotonic() < end, f"rank {rank} published nothing"
            time.sleep(0.005)
        host, port = eval(self.values[key])[0]
        return host, port


class SilentStore(DictStore):
    """A store that leaves one kind of request unanswered until the block ends."""

    def __init__(self, silent: str) -> None:
        super().__init__()
        self.asked, self.ended = threading.Event(), threading.Event()
        if silent == "get":  # every key that may be read must exist
            self.overlay = {f"sealring/epoch/answer/{rank}": b"" for rank in range(8)}
            self.overlay |= {address_key(rank): b"" for rank in range(8)}
        setattr(self, silent, self._wait)

    def _wait(self, *_: object) -> None:
        self.asked.set()
        if not self.ended.wait(60):
            raise OSError("the test should have ended")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        until = time.monotonic() + 20
        while any(each.name == "sealring-store" for each in threading.enumerate()):
            assert time.monotonic() < until
            time.sleep(0.005)


def address_key(rank: int) -> str:
    return f"sealring/any/address/{rank}"


class World:
    """Starts workers as threads and keeps what each of them returns or raises."""

    def __init__(self, size: int, **options: Any) -> None:
        self.size = size
        self.store = DictStore()
        self.options: dict[str, Any] = {
            "timeout": 20.0,
            "environ": LOOPBACK,
        } | options
        self.outcomes: dict[object, Mesh | BaseException] = {}
        self._threads: list[threading.Thread] = []

    def terms(self, rank: int, **changes: Any) -> Terms:
        agreed: dict[str, Any] = {"world": self.size, "members": tuple(range(self.size))}
        return terms(rank, **(agreed | changes))

    def start(
        self,
        rank: int,
        *,
        name: object = None,
        credentials: Credentials | None = None,
        own_terms: Terms | None = None,
        **options: Any,
    ) -> None:
        name = rank if name is None else name

        def run() -> None:
            try:
                self.outcomes[name] = build_mesh(
                    self.store,
                    credentials or ISSUER.credentials(rank, world=self.size),
                    own_terms or self.terms(rank),
                    **(self.options | options),
                )
            except BaseException as error:
                self.outcomes[name] = error

        thread = threading.Thread(target=run)
        self._threads.append(thread)
        thread.start()

    def start_all(self, *but: int) -> None:
        for rank in range(self.size):
            if rank not in but:
                self.start(rank)

    def join(self) -> None:
        for thread in self._threads:
            thread.join()

    def mesh(self, rank: int) -> Mesh:
        outcome = self.outcomes[rank]
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    def links(self, rank: int) -> list[Link]:
        return self.mesh(rank).links

    def errors(self) -> dict[object, str]:
        return {name: named(outcome) for name, outcome in self.outcomes.items()}

    def close(self) -> None:
        self.join()
        for outcome in self.outcomes.values():
            if isinstance(outcome, Mesh):
                for link in outcome.links:
                    link.socket.close()
                if outcome.exchange is not None:
                    outcome.exchange.stop()


def busy_threads() -> int:
    """Counts this process's threads, except those that wait to be borrowed."""
    return sum(thread.name != IDLE_NAME for thread in threading.enumerate())


@contextlib.contextmanager
def world(size: int, **options: Any) -> Iterator[World]:
    """Yields a world; after the block no descriptor and no thread of it may be left.

    Resources of earlier tests may close meanwhile, so fewer may be left than before.
    """
    descriptors, threads = len(os.listdir("/proc/self/fd")), busy_threads()
    one = World(size, **options)
    try:
        yield one
    finally:
        one.close()
    assert len(os.listdir("/proc/self/fd")) <= descriptors
    assert busy_threads() <= threads
