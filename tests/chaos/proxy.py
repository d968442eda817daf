"""A TCP proxy between worker processes, and the store that sends them there.

Workers learn from the rendezvous store where to dial, and the store is the adversary's: it names
the proxy instead of the peer. What passes is TLS and then sealed records; the proxy holds no key.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import cast

from torch._C._distributed_c10d import Store

from sealring.core.links.rendezvous import encode_addresses, parse_addresses
from sealring.lab.demo.wiretap import HonestStore
from tests.chaos.plan import Channel
from tests.core.engine.local_world import Change, Middle

Way = tuple[int, int]
"""(sender, receiver), ranks of the world."""


class ProxyStore(HonestStore):
    """A worker's view of the store: true, but for where the peers that it dials listen."""

    def __init__(self, store: Store, rank: int, ports: dict[int, int]) -> None:
        super().__init__(store)
        self._rank = rank
        self._ports = ports
        self.group = 0
        """Which of the plan's groups is being made."""

    def get(self, key: str) -> bytes:
        value = super().get(key)
        before, _, peer = key.rpartition("/address/")
        if not before or not peer.isdecimal() or int(peer) not in self._ports:
            return value
        # The proxy must know whom to connect its prey to, and for what.
        channel = "messages" if before.endswith(".messages") else "collectives"
        told = f"{self.group} {channel} {value.decode()}"
        self._store.set(target_key(self._rank, int(peer)), told)
        return encode_addresses([("127.0.0.1", self._ports[int(peer)])]).encode()


def target_key(dialer: int, acceptor: int) -> str:
    return f"chaos/{dialer}/{acceptor}"


class Proxy:
    """Stands between one pair of ranks, for all groups that they are both in."""

    def __init__(
        self,
        store: Store,
        dialer: int,
        acceptor: int,
        stream_for: Callable[[int, Channel, Way, Callable[[], Middle]], Change],
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
                near.close()  # the peer is gone; the dialer tries again or learns it elsewhere
            except Exception as problem:
                self._trouble.append(f"the proxy failed: {problem!r}")
                near.close()

    def _connect(self, near: socket.socket) -> None:
        told = bytes(self._store.get(target_key(self._dialer, self._acceptor))).decode()
        group, channel, real = told.split(" ", 2)
        far = socket.create_connection(parse_addresses(real.encode())[0])
        self._sockets.append(far)
        for sock in (near, far):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        up, down = (self._dialer, self._acceptor), (self._acceptor, self._dialer)
        for source, sink, way in ((near, far, up), (far, near, down)):
            at = len(self._middles)
            middle = partial(self._middles.__getitem__, at)
            change = self._stream_for(int(group), cast(Channel, channel), way, middle)
            self._middles.append(Middle(source, sink, change))
