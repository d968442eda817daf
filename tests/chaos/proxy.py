"""A TCP proxy between worker processes, and the store that sends them there.

Workers learn from the rendezvous store where to dial, and the store is the adversary's: it names
the proxy instead of the peer. What passes is TLS and then sealed records; the proxy holds no key.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta

from torch._C._distributed_c10d import Store

from sealring.links.rendezvous import encode_addresses, parse_addresses
from tests.engine.local_world import Change, Middle

Way = tuple[int, int]
"""(sender, receiver), ranks of the world."""


class ProxyStore(Store):
    """A worker's view of the store: true, but for where the peers that it dials listen."""

    def __init__(self, store: Store, rank: int, ports: dict[int, int]) -> None:
        super().__init__()
        self._store = store
        self._rank = rank
        self._ports = ports
        self.group = 0
        """Which of the plan's groups is being made."""

    def get(self, key: str) -> bytes:
        value = bytes(self._store.get(key))
        before, _, peer = key.rpartition("/address/")
        if not before or not peer.isdecimal() or int(peer) not in self._ports:
            return value
        # The proxy must know whom to connect its prey to.
        self._store.set(target_key(self._rank, int(peer)), f"{self.group} {value.decode()}")
        return encode_addresses([("127.0.0.1", self._ports[int(peer)])]).encode()

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


def target_key(dialer: int, acceptor: int) -> str:
    return f"chaos/{dialer}/{acceptor}"


class Proxy:
    """Stands between one pair of ranks, for all groups that they are both in."""

    def __init__(
        self,
        store: Store,
        dialer: int,
        acceptor: int,
        stream_for: Callable[[int, Way, Callable[[], Middle]], Change],
        trouble: list[str],
    ) -> None:
        self._store, self._dialer, self._acceptor = store, dialer, acceptor
        self._stream_for, self._trouble = stream_for, trouble
        self._server = socket.create_server(("127.0.0.1", 0))
        self._sockets: list[socket.socket] = []
        self._middles: list[Middle] = []
        self.port: int = self._server.getsockname()[1]
        self._thread = threading.Thread(target=self._accept, daemon=True, name="proxy")
        self._thread.start()

    def close(self) -> None:
        for sock in (self._server, *self._sockets):
            # Not close() alone: a thread may wait on the descriptor, and this wakes it.
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        self._thread.join(10)
        for middle in self._middles:
            middle.join(10)
        for sock in (self._server, *self._sockets):
            sock.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._server.accept()
            except OSError:  # closed
                return
            self._sockets.append(near)
            try:
                self._connect(near)
            except OSError:
                near.close()  # the peer is gone; whoever dialed tries again or learns it elsewhere
            except Exception as problem:
                self._trouble.append(f"the proxy failed: {problem!r}")
                near.close()

    def _connect(self, near: socket.socket) -> None:
        group, _, real = (
            bytes(self._store.get(target_key(self._dialer, self._acceptor))).decode().partition(" ")
        )
        far = socket.create_connection(parse_addresses(real.encode())[0])
        self._sockets.append(far)
        for sock in (near, far):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        up, down = (self._dialer, self._acceptor), (self._acceptor, self._dialer)
        for source, sink, way in ((near, far, up), (far, near, down)):
            at = len(self._middles)
            change = self._stream_for(int(group), way, lambda at=at: self._middles[at])  # type: ignore[misc]
            self._middles.append(Middle(source, sink, change))
