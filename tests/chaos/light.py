"""A world of light workers in this process, too large to link all pairs when it forms.

Its links are real: TLS or sessions over loopback, and traffic makes most of them. Each connection
that a fault is meant for passes through a man in the middle from its first byte.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

from sealring.core.engine.engine import CollectiveEngine
from sealring.core.engine.mailbox import Mailbox
from sealring.core.handshake.terms import PipeName
from sealring.core.links.connections import Connections
from sealring.core.links.exchange import Exchange
from sealring.errors import PeerUnreachable
from sealring.lab.bench.forming import LightGroup, LightWorker
from tests.chaos.history import History
from tests.chaos.local import run_ranks
from tests.chaos.plan import Channel, FaultKind, Plan
from tests.chaos.streams import STRIKES, Stream, Strike
from tests.core.engine.local_world import Change, Middle, tcp_pair, untouched
from tests.core.links.worlds import ISSUER, DictStore

FORMING_S = 60.0
Way = tuple[Channel, int, int]
"""The kind of link, the sender and the receiver."""


def run_light(plan: Plan) -> History:
    history = History()
    with _on_connections(LightWorld(plan, history)) as world:
        if world.form():
            run_ranks(plan, world, history, list(world.strikes.values()))
        else:
            world.close()
    return history


class LightWorld:
    """A world for `run_ranks` like LocalWorld, but with groups instead of bare engines."""

    def __init__(self, plan: Plan, history: History) -> None:
        self.name = f"chaos {plan.seed} {plan.name}"
        self._plan, self._history = plan, history
        self.pool = ThreadPoolExecutor(plan.world)
        self.strikes: dict[Way, Strike] = {}
        for fault in plan.faults:
            if fault.kind in STRIKES:
                way = (fault.channel, fault.sender, fault.receiver)
                self.strikes[way] = STRIKES[fault.kind](fault, history)
        self.groups: list[LightGroup] = []
        self._sockets: list[socket.socket] = []
        self._middles: list[Middle] = []

    @property
    def engines(self) -> list[CollectiveEngine]:
        return [group.engine for group in self.groups]

    @property
    def mailboxes(self) -> list[Mailbox]:
        return [group.mailbox for group in self.groups]

    def ends(self) -> list[LightGroup]:
        return self.groups

    def form(self) -> bool:
        store, plan = DictStore(), self._plan

        def one(rank: int) -> LightGroup:
            credentials = ISSUER.credentials(rank, world=plan.world)
            worker = LightWorker(credentials, plan.world, store, f"host-{plan.hosts[rank]}")
            return worker.form(
                self.name,
                range(plan.world),
                timeout_s=FORMING_S,
                record_bytes=plan.record_bytes,
                rekey_bytes=plan.rekey_bytes,
            )

        made = [self.pool.submit(one, rank) for rank in range(plan.world)]
        problems = [each.exception() for each in made]
        self.groups += [each.result() for each in made if each.exception() is None]
        # A fault may also cut the first links of a forming group; then there is no group.
        cut = any(hit.fault.kind is FaultKind.INTERRUPT for hit in self._history.hits)
        for rank, problem in enumerate(problems):
            if problem is not None and not (cut and isinstance(problem, PeerUnreachable)):
                self._history.trouble.append(f"rank {rank} has no group: {problem!r}")
        return not any(problems)

    def stand_between(self, sock: socket.socket, channel: Channel, dialer: int, peer: int) -> None:
        """Leads `sock`, which is connected to the peer, through a man in the middle from now on."""
        up, down = (channel, dialer, peer), (channel, peer, dialer)
        if up not in self.strikes and down not in self.strikes:
            return
        far = sock.dup()
        far.setblocking(True)
        near, own = tcp_pair()
        own.setblocking(False)
        os.dup2(own.fileno(), sock.fileno(), inheritable=False)
        own.close()
        self._sockets += [near, far]
        for source, sink, way in ((near, far, up), (far, near, down)):
            strike = self.strikes.get(way)
            change: Change = untouched if strike is None else Stream(strike)
            self._middles.append(Middle(source, sink, change))
            if isinstance(change, Stream):
                change.inject = self._middles[-1].inject

    def close(self) -> None:
        list(self.pool.map(LightGroup.close, self.groups))
        self.pool.shutdown()
        for sock in self._sockets:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for middle in self._middles:
            middle.join(10)
        for sock in self._sockets:
            sock.close()


_worlds: dict[str, LightWorld] = {}
"""The worlds that run now, by the names of their groups."""
_patching = threading.Lock()


@contextmanager
def _on_connections(world: LightWorld) -> Iterator[LightWorld]:
    _patch()
    _worlds[world.name] = world
    try:
        yield world
    finally:
        del _worlds[world.name]


def _patch() -> None:
    """Changes this process once, so that connections of running worlds pass their middle."""
    with _patching:
        if hasattr(Connections.dialed, "plain"):
            return
        for owner, name in ((Connections, "dialed"), (Exchange, "_on_connected")):
            setattr(owner, name, _through_the_middle(getattr(owner, name)))


def _through_the_middle(plain: Callable[..., Any]) -> Callable[..., Any]:
    def connected(self: Any, sock: socket.socket, pipe: PipeName) -> Any:
        terms = self.terms if isinstance(self, Exchange) else self._terms
        if (world := _worlds.get(terms.group)) is not None:
            channel: Channel = "messages" if pipe.purpose == "messages" else "collectives"
            world.stand_between(sock, channel, terms.rank, pipe.peer)
        return plain(self, sock, pipe)

    connected.plain = plain  # type: ignore[attr-defined]
    return connected
