"""Addresses through the store, which is the adversary's.

Anybody may write anything there at any time. So it carries nothing but where to try, what it says
is parsed within narrow limits, and the process that answers there must prove its rank.
"""

from __future__ import annotations

import ipaddress
import json
import threading
import time
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Final, Protocol, TypeVar

from sealring.core.links.addresses import MAX_ADDRESSES, plain_address
from sealring.core.links.threads import Job, borrow
from sealring.errors import MalformedSetup, PeerUnreachable
from sealring.formats.strict import read_json

T = TypeVar("T")

_LEAST_SECONDS: Final = 1.0
"""How long a call may take that is made at the deadline, or after it."""
_LAST_SECONDS: Final = 2.0
"""How long `end` waits for a call that is under way."""


class StoreCalls:
    """One at a time, for a store is one connection. Methods may be called from any thread."""

    def __init__(self, deadline: float) -> None:
        self._deadline = deadline
        self._changed = threading.Condition()
        self._busy = False
        self._ended = False
        self._given_up = False
        """A call was not answered in time, or is not waited for any more."""

    def make(self, call: Callable[[], T], beyond: float = 0.0) -> T:
        """What it returns or raises; TimeoutError if the store does not answer in time.

        A call that looks at the deadline itself may take so many seconds `beyond` it.
        """
        results: list[T] = []
        problems: list[BaseException] = []

        def run() -> None:
            try:
                results.append(call())
            except BaseException as problem:
                problems.append(problem)
            with self._changed:
                self._busy = False
                self._changed.notify_all()

        with self._changed:
            self._wait_for(lambda: not self._busy)
            if self._ended:
                raise TimeoutError("it is no longer asked")
            self._busy = True
        job: Job | None = None
        try:
            job = borrow("sealring-store", run)
        except RuntimeError:  # no thread can be started: better without a bound than not at all
            run()
        with self._changed:
            self._wait_for(lambda: results or problems, beyond)
        if job is not None:
            job.join()  # its thread serves the next call
        if problems:
            raise problems.pop()
        return results[0]

    def end(self) -> None:
        """No further call is made. One that is under way is left behind after a moment."""
        with self._changed:
            self._ended = True
            left = max(0.0, self._deadline - time.monotonic())
            self._changed.wait_for(lambda: not self._busy, min(left, _LAST_SECONDS))
            self._give_up()

    def _wait_for(self, condition: Callable[[], object], beyond: float = 0.0) -> None:
        left = max(_LEAST_SECONDS, self._deadline + beyond - time.monotonic())
        self._changed.wait_for(lambda: condition() or self._given_up, left)
        if not condition():
            self._give_up()
            raise TimeoutError("it does not answer")

    def _give_up(self) -> None:
        self._given_up = True
        self._changed.notify_all()


MAX_VALUE_BYTES: Final = 1024
_MAX_ADDRESS: Final = 45
"""The longest spelling of an IPv6 address."""


Address = tuple[str, int]


class Store(Protocol):
    """As much of torch.distributed.Store as is needed. None of these calls waits for a key."""

    def set(self, key: str, value: str, /) -> object: ...

    def get(self, key: str, /) -> bytes: ...

    def check(self, keys: list[str], /) -> bool: ...

    def multi_get(self, keys: list[str], /) -> list[bytes]: ...

    def multi_set(self, keys: list[str], values: list[str], /) -> object: ...


class AddressBook:
    """The group's addresses in one epoch. torch's stores put the group's name before each key."""

    def __init__(self, store: Store, epoch: str, deadline: float) -> None:
        self._store = store
        self._epoch = epoch
        # A key is only read once it is there, because reading one that is not would block every
        # other thread's call as well.
        self._calls = StoreCalls(deadline)

    def publish(self, rank: int, addresses: Sequence[Address]) -> None:
        key, said = self._key(rank), encode_addresses(addresses)
        try:
            self._calls.make(lambda: self._store.set(key, said))
        except Exception as problem:
            raise PeerUnreachable(f"the rendezvous store cannot be written: {problem}") from problem

    def lookup(self, rank: int) -> tuple[Address, ...]:
        """Where the store says that `rank` listens; nothing if it says nothing yet."""
        key = self._key(rank)
        try:
            raw = self._calls.make(
                lambda: bytes(self._store.get(key)) if self._store.check([key]) else None
            )
        except Exception as problem:
            raise PeerUnreachable(f"the rendezvous store cannot be read: {problem}") from problem
        return () if raw is None else parse_addresses(raw)

    def close(self) -> None:
        """The store is not asked any more."""
        self._calls.end()

    def _key(self, rank: int) -> str:
        return f"sealring/{self._epoch}/address/{rank}"


def encode_addresses(addresses: Sequence[Address]) -> str:
    return json.dumps([[host, port] for host, port in addresses], separators=(",", ":"))


def parse_addresses(raw: bytes) -> tuple[Address, ...]:
    """A non-empty list of [IP address, port], or MalformedSetup."""
    if len(raw) > MAX_VALUE_BYTES:
        raise MalformedSetup(f"the rendezvous store holds {len(raw)} bytes for an address")
    try:
        value = read_json(raw.decode("ascii"), MAX_VALUE_BYTES)
    except ValueError:
        raise MalformedSetup("the rendezvous store holds something that is no address") from None
    if type(value) is not list or not 1 <= len(value) <= MAX_ADDRESSES:
        raise MalformedSetup("the rendezvous store holds no short list of addresses")
    return tuple(_address(entry) for entry in value)


def _address(entry: object) -> Address:
    if type(entry) is not list or len(entry) != 2:
        raise MalformedSetup("the rendezvous store holds an address that is no [host, port]")
    host, port = entry
    if type(host) is not str or len(host) > _MAX_ADDRESS or "%" in host:
        raise MalformedSetup("the rendezvous store holds a host that is no IP address")
    # bool is an int to isinstance(), and must not be one here.
    if type(port) is not int or not 1 <= port <= 65535:
        raise MalformedSetup("the rendezvous store holds a port that is not 1 to 65535")
    return _host(host), port


@lru_cache(maxsize=4096)
def _host(host: str) -> str:
    """Kept, because a member reads all members' addresses, and many members share a machine."""
    try:
        parsed = plain_address(ipaddress.ip_address(host))
    except ValueError:
        raise MalformedSetup("the rendezvous store holds a host that is no IP address") from None
    if parsed.is_unspecified or parsed.is_multicast:
        raise MalformedSetup(f"the rendezvous store holds {host}, which is no worker's address")
    return str(parsed)
