"""The rendezvous store belongs to the adversary: it may send a worker wherever it likes."""

from __future__ import annotations

from datetime import timedelta
from typing import Final

import torch.distributed  # noqa: F401 (makes the module below importable)
from torch._C._distributed_c10d import Store

from sealring.demo.wiretap import Address
from sealring.links.rendezvous import encode_addresses, parse_addresses

_TARGET: Final = "wiretap/target"


class HonestStore(Store):
    """Passes everything on to another store; for those who lie in one answer and in no other."""

    def __init__(self, store: Store) -> None:
        super().__init__()
        self._store = store

    def get(self, key: str) -> bytes:
        return bytes(self._store.get(key))

    def set(self, key: str, value: str) -> None:
        self._store.set(key, value)

    def check(self, keys: list[str]) -> bool:
        return self._store.check(keys)

    def add(self, key: str, value: int) -> int:
        return self._store.add(key, value)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        if timeout is None:
            self._store.wait(keys)
        else:
            self._store.wait(keys, timeout)


class LyingStore(HonestStore):
    """Tells the truth, except about where one rank listens: there it names the wiretap.

    That it stands in the worker's process changes nothing: the worker sees of a store only what
    the store answers.
    """

    def __init__(self, store: Store, *, about: int, relay: Address) -> None:
        super().__init__(store)
        self._about = f"/address/{about}"
        self._relay = relay

    def get(self, key: str) -> bytes:
        value = super().get(key)
        if not key.endswith(self._about):
            return value
        # The wiretap must know whom to connect its prey to.
        self._store.set(_TARGET, value.decode())
        return encode_addresses([self._relay]).encode()


def real_address(store: Store) -> Address:
    """Where the lured worker wanted to go."""
    return parse_addresses(bytes(store.get(_TARGET)))[0]
