"""A TCP proxy between worker processes, and the store that leads the workers to it.

Workers learn from the rendezvous store where to dial. The adversary controls the store and names
the proxy instead of the peer. TLS and then sealed records pass the proxy, which has no key.
"""

from __future__ import annotations

import functools
import socket
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, cast

from torch._C._distributed_c10d import Store

from sealring.core.handshake.terms import PipeName
from sealring.core.links.dialer import Dialer
from sealring.core.links.exchange import Exchange
from sealring.core.links.rendezvous import Address, encode_addresses, parse_addresses
from sealring.errors import PeerUnreachable
from sealring.lab.demo.wiretap import HonestStore
from tests.chaos.plan import Channel
from tests.core.engine.local_world import Change, Middle

Way = tuple[int, int]
"""The sender and the receiver, as ranks of the world."""


class ProxyStore(HonestStore):
    """A worker's view of the store, which lies only about the addresses of peers to dial."""

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
        return encode_addresses([self._led(self.group, "collectives", int(peer), value)]).encode()

    def check(self, keys: list[str]) -> bool:
        """Hides the addresses of higher ranks: a lower rank that dials would avoid the proxy."""
        peers = [key.rpartition("/address/")[2] for key in keys if "/address/" in key]
        return not any(int(peer) > self._rank for peer in peers) and super().check(keys)

    def _led(self, group: int, channel: Channel, peer: int, real: bytes) -> Address:
        """Tells the proxy the peer and the purpose; returns the proxy's address."""
        self._store.set(target_key(self._rank, peer), f"{group} {channel} {real.decode()}")
        return "127.0.0.1", self._ports[peer]

    def lead_messages(self) -> None:
        """Leads pipes for messages through the proxies too, from now on.

        Members state their addresses for such pipes in what they sign. The higher rank of a pair
        dials the pair's proxy, so the lower one waits for the higher one.
        """
        _patch_dialers()
        _leading.append(self)


_leading: list[ProxyStore] = []
"""The stores of groups, of which the last one belongs to the group that is being made."""


@functools.cache
def _patch_dialers() -> None:
    """Patches once in a process, which runs many worlds."""
    made, reach = Exchange.__init__, Dialer._try
    places: weakref.WeakKeyDictionary[Exchange, tuple[ProxyStore, int]] = (
        weakref.WeakKeyDictionary()
    )

    def make(exchange: Exchange, *arguments: Any, **named: Any) -> None:
        places[exchange] = _leading[-1], _leading[-1].group
        made(exchange, *arguments, **named)

    def led(dialer: Dialer, pipe: PipeName, address: Address, patience: float) -> int | None:
        if pipe.purpose == "messages":
            store, group = places[dialer._attempt.__self__]  # type: ignore[attr-defined]
            if pipe.peer > store._rank:
                dialer.problems[pipe.peer] = PeerUnreachable("it dials itself", peer=pipe.peer)
                return -1
            if pipe.peer in store._ports:
                real = encode_addresses([address]).encode()
                address = store._led(group, "messages", pipe.peer, real)
        return reach(dialer, pipe, address, patience)

    patch: Any = setattr
    patch(Exchange, "__init__", make)
    patch(Dialer, "_try", led)


def target_key(dialer: int, acceptor: int) -> str:
    return f"chaos/{dialer}/{acceptor}"


class Proxy:
    """Stands between one pair of ranks, for all groups that have both."""

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
            # close() alone would not wake a thread that waits on the descriptor; this does.
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
            except OSError:  # the socket was closed
                return
            self._sockets.append(near)
            try:
                self._connect(near)
            except OSError:
                near.close()  # the peer is gone; the dialer tries again or learns it in another way
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
