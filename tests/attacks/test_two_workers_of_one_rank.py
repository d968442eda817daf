"""Two workers have one rank, and cut connections leave each linked to only some of the rest.

The set-up model (docs/model.md) found this case: without the digest in "ready", a rank could
believe that the group exists although the next rank was linked to another process of the same rank.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from sealring.core.links import Mesh, build_mesh
from sealring.core.links.connections import WaitingLink, WaitingLinks
from sealring.errors import DuplicateRank
from tests.core.handshake.meeting import terms
from tests.core.links.worlds import ISSUER, LOOPBACK, DictStore, address_key

NOWHERE = b'[["127.0.0.1",1]]'


class View(DictStore):
    """The store as one worker sees it: it shares all addresses except those in `overlay`."""

    def __init__(self, shared: DictStore) -> None:
        super().__init__()
        self.values = shared.values


class Relay:
    """Relays one connection until `cut` closes only the side towards the acceptor."""

    def __init__(self, target: tuple[str, int]) -> None:
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = self._server.getsockname()
        self._target = target
        self._ends: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._run)]
        self._threads[0].start()

    def _run(self) -> None:
        near, _ = self._server.accept()
        far = socket.create_connection(self._target)
        self._ends += [near, far]
        for source, sink in ((near, far), (far, near)):
            self._threads.append(threading.Thread(target=self._pump, args=(source, sink)))
            self._threads[-1].start()

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                sink.sendall(data)

    def cut(self) -> None:
        self._ends[1].shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._server.close()
        for end in self._ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(10)
        for end in self._ends:
            end.close()


@pytest.mark.threat("J26")
def test_linked_to_different_workers_of_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    store = DictStore()
    events: list[tuple[str, int, int, str]] = []
    outcomes: dict[str, Mesh | BaseException] = {}

    def recorded(name: str) -> Callable[..., Any]:
        plain: Callable[..., Any] = getattr(WaitingLinks, name)

        def call(self: WaitingLinks, link: WaitingLink) -> Any:
            result = plain(self, link)
            instance = link.channel.peer_hello.instance
            events.append((name, self._terms.rank, link.rank, instance))
            return result

        return call

    for name in ("add", "remove"):
        monkeypatch.setattr(WaitingLinks, name, recorded(name))

    def worker(name: str, rank: int, view: DictStore) -> threading.Thread:
        own = terms(rank, world=3, members=(0, 1, 2), instance=instances[name])

        def run() -> None:
            try:
                outcomes[name] = build_mesh(
                    view, ISSUER.credentials(rank, world=3), own,
                    timeout=15.0 if name != "again" else 4.0, transport="tcp", environ=LOOPBACK,
                )  # fmt: skip
            except BaseException as error:
                outcomes[name] = error

        thread = threading.Thread(target=run)
        thread.start()
        return thread

    def wait_for(*wanted: tuple[str, int, int, str]) -> None:
        end = time.monotonic() + 20
        while not set(wanted) <= set(events):
            assert time.monotonic() < end, (wanted, events, outcomes)
            time.sleep(0.01)

    instances = {
        name: f"{number:032x}" for number, name in enumerate(("zero", "one", "two", "again"))
    }
    zero, one, two, again = (View(store) for _ in instances)
    # Rank 1 cannot find rank 0 yet. Rank 2 finds rank 1 only after its link to rank 0 is cut. The
    # second worker of rank 2 never finds rank 1.
    one.overlay[address_key(0)] = NOWHERE
    two.overlay[address_key(1)] = NOWHERE
    again.overlay[address_key(1)] = NOWHERE
    threads = [worker("zero", 0, zero)]
    relay = Relay(store.address(0))
    try:
        two.overlay[address_key(0)] = repr([list(relay.address)]).replace("'", '"').encode()
        threads += [worker("one", 1, one), worker("two", 2, two)]
        wait_for(("add", 0, 2, instances["two"]), ("add", 2, 0, instances["zero"]))
        relay.cut()
        wait_for(("remove", 0, 2, instances["two"]))
        del two.overlay[address_key(1)]
        wait_for(("add", 1, 2, instances["two"]), ("add", 2, 1, instances["one"]))
        threads.append(worker("again", 2, again))
        wait_for(("add", 0, 2, instances["again"]))
        del one.overlay[address_key(0)]
        for thread in threads[:2]:
            thread.join()
    finally:
        relay.close()
        for thread in threads:
            thread.join()
        for outcome in outcomes.values():
            for link in outcome.links if isinstance(outcome, Mesh) else []:
                link.socket.close()
    # Ranks 0 and 1 are linked to different workers of rank 2. No group exists for any of them, and
    # all get the same error.
    ended = {name: type(outcome) for name, outcome in outcomes.items()}
    assert ended == dict.fromkeys(("zero", "one", "two", "again"), DuplicateRank)
