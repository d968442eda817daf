"""The keys of a dataset's shards, and how data-loader workers get them.

Keys are in memory that a forked child does not inherit, and no pickle holds them. A worker that
multiprocessing forks inherits the wrapped keys, and gets the key that unwraps them through its own
socketpair. A spawned worker connects to this process, as the processes that seal do. Each way works
once. The keys open only this dataset's shards: they reveal neither the vault's nor the object's
key.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import weakref
from collections.abc import Sequence
from multiprocessing.context import get_spawning_popen
from typing import Any, Final

from sealring import _native
from sealring.errors import ForkedProcess, Unsupported, WorkerFailed
from sealring.vault.children import Door, connect_to_parent, fill, is_child
from sealring.vault.closing import Closable
from sealring.vault.keys import KEY_BYTES

_FORKING: Final = "multiprocessing.popen_fork"
_WRAPPED_BYTES: Final = 128 * KEY_BYTES
"""The bytes of keys that are wrapped together: the native core wraps no more at once."""


class ReadingKeys(Closable):
    """The keys of a dataset's shards, one for each."""

    def __init__(self, what: str, keys: Sequence[_native.Secret]) -> None:
        self._what = what
        self._keys: _native.Secret | None = _native.Secret.zeros(KEY_BYTES * max(1, len(keys)))
        with memoryview(self._keys) as room:
            for number, key in enumerate(keys):
                room[KEY_BYTES * number : KEY_BYTES * (number + 1)] = memoryview(key)
        self._begin()

    def _begin(self) -> None:
        self._offer: _Offer | None = None
        self._address: str | None = None
        self._handing_over: list[_HandOver] = []
        _LIVING.add(self)

    def _release(self) -> None:
        """Wipes the keys. A worker that has not connected yet gets none; others keep theirs."""
        _LIVING.discard(self)
        for one in self._handing_over:
            one.stop()
        if self._offer is not None:
            self._offer.close()
        if self._keys is not None:
            self._keys.wipe()
        self._keys = self._offer = self._address = None
        self._handing_over = []

    def key(self, number: int) -> _native.Secret:
        self.require_open()
        if self._keys is None:
            self._keys = self._received()
        return self._keys.part(KEY_BYTES * number, KEY_BYTES)

    def _received(self) -> _native.Secret:
        try:
            if self._offer is not None:
                return self._offer.take()
            if self._address is not None:
                return _connected(self._address)
        except OSError as problem:
            raise WorkerFailed(f"this worker did not get the dataset's keys: {problem}") from None
        finally:
            self._offer = self._address = None
        raise ForkedProcess(
            "a forked child has no keys of its parent's: open the dataset in the child, or read "
            "it with the workers of a DataLoader"
        )

    # ---- spawned workers -------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        self.require_open()
        if get_spawning_popen() is None:
            raise Unsupported(
                "a dataset's keys are put into no pickle: give the dataset to a DataLoader, or "
                "open it where it is needed"
            )
        keys = self._keys if self._keys is not None else self._received()
        self._keys = keys
        self._handing_over = [one for one in self._handing_over if one.is_alive()]
        self._handing_over.append(_HandOver(keys))
        address = self._handing_over[-1].address
        return {"what": self._what, "address": address, "size": len(keys)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._what, self._keys = state["what"], None
        self._begin()
        self._address = f"{state['size']} {state['address']}"

    # ---- forked workers --------------------------------------------------------------------------

    def before_fork(self) -> None:
        """Makes an offer if multiprocessing forks a child; other children get no keys."""
        forking = sys._getframe(2).f_globals.get("__name__") == _FORKING
        self._next = _Offer(self._keys) if forking and self._keys is not None else None

    def after_fork_in_parent(self) -> None:
        if self._next is not None:
            self._next.give()
        self._next = None

    def after_fork_in_child(self) -> None:
        if self._offer is not None:
            self._offer.close()  # that offer was made to this process's parent
        for one in self._handing_over:
            one.leave()
        self._keys, self._address, self._handing_over = None, None, []
        self._offer, self._next = self._next, None

    _next: _Offer | None = None


class _Offer:
    """Keys wrapped under a fresh key, which is sent once through a socketpair."""

    def __init__(self, keys: _native.Secret) -> None:
        self._once = _native.Secret.random(KEY_BYTES)
        self._wrapped = [
            _native.wrap_key(self._once, keys.part(start, min(_WRAPPED_BYTES, len(keys) - start)))
            for start in range(0, len(keys), _WRAPPED_BYTES)
        ]
        self._parent, self._child = socket.socketpair()

    def give(self) -> None:
        self._child.close()
        with self._parent, contextlib.suppress(OSError):  # no child was made
            self._parent.sendall(memoryview(self._once))
        self._once.wipe()

    def take(self) -> _native.Secret:
        self._parent.close()
        once = _native.Secret.zeros(KEY_BYTES)
        with self._child:
            self._child.settimeout(60)
            fill(self._child, memoryview(once))
        opened = [_native.unwrap_key(once, one) for one in self._wrapped]
        once.wipe()
        keys = _native.Secret.zeros(sum(len(one) for one in opened if one is not None))
        at = 0
        with memoryview(keys) as room:
            for one in opened:
                if one is None:
                    raise ConnectionError("what came is not the key that was offered")
                room[at : at + len(one)] = memoryview(one)
                at += len(one)
        return keys

    def close(self) -> None:
        self._parent.close()
        self._child.close()


class _HandOver(threading.Thread):
    """Gives the keys to the first child of this process that connects, and to no other."""

    def __init__(self, keys: _native.Secret) -> None:
        super().__init__(name="sealring-dataset-keys", daemon=True)
        self._keys, self._door = keys, Door()
        self._connection: socket.socket | None = None
        self._lock = threading.Lock()
        self._stopped = False
        self.address = self._door.address
        self.start()

    def run(self) -> None:
        with contextlib.suppress(OSError):  # the child has ended, or `stop` was called
            try:
                here = self._door.accept(is_child, lambda: 0 if self._stopped else None)
            finally:
                self._door.close()
            with here:
                with self._lock:
                    self._connection = here
                    if self._stopped:
                        return
                here.sendall(memoryview(self._keys))
                with self._lock:
                    self._connection = None

    def stop(self) -> None:
        """Stops the thread, and returns when it has ended."""
        with self._lock:
            self._stopped = True
            if self._connection is not None:  # the child may never read what is sent
                with contextlib.suppress(OSError):
                    self._connection.shutdown(socket.SHUT_RDWR)
        self.join()

    def leave(self) -> None:
        """Closes a forked child's copy of the door; the thread runs only in the parent."""
        self._door.close()


def _connected(address: str) -> _native.Secret:
    size, _, name = address.partition(" ")
    keys = _native.Secret.zeros(int(size))
    with connect_to_parent(name) as parent:
        fill(parent, memoryview(keys))
    return keys


_LIVING: Final[weakref.WeakSet[ReadingKeys]] = weakref.WeakSet()


def _before() -> None:
    for one in list(_LIVING):
        one.before_fork()


def _in_parent() -> None:
    for one in list(_LIVING):
        one.after_fork_in_parent()


def _in_child() -> None:
    for one in list(_LIVING):
        one.after_fork_in_child()


os.register_at_fork(before=_before, after_in_parent=_in_parent, after_in_child=_in_child)
