"""The listener alone, when the process runs out of threads, memory or descriptors."""

from __future__ import annotations

import contextlib
import errno
import os
import queue
import resource
import select
import socket
import subprocess
import sys
import threading
import time
from typing import Any

import pytest

from sealring.core.handshake import tls
from sealring.core.handshake.incoming import Incoming
from sealring.core.links import arrivals, threads
from sealring.core.links.arrivals import MAX_CONNECTIONS_PER_WORKER, share_of
from sealring.core.links.connections import WaitingLinks
from sealring.core.links.listener import Listener
from sealring.errors import MalformedSetup, PeerUnreachable, SealringError
from tests.core.handshake.meeting import soon, terms
from tests.core.handshake.test_private_key import identity
from tests.core.identity.issuing import Issuer
from tests.own_memory import places

ISSUER = Issuer()


def is_closed(stranger: socket.socket) -> bool:
    """Waits until the connection is closed; only the listener's own thread closes connections."""
    stranger.settimeout(20)
    with contextlib.suppress(ConnectionResetError):
        return stranger.recv(1) == b""
    return True


def test_a_connection_without_a_thread_does_not_end_the_listener(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """First no thread can start; then one can; then no second one, but one is enough."""
    may_start = [False, True, False]
    begun: list[Any] = []
    refused: queue.SimpleQueue[SealringError] = queue.SimpleQueue()
    start = threading.Thread.start

    class Stranger:
        is_session = False
        rank = None

        def advance(self) -> bool:
            begun.append(self)
            raise MalformedSetup("not a worker")

        def forget(self) -> None:
            pass

    def start_if_it_may(self: threading.Thread) -> None:
        if self.name.startswith("sealring-accept") and not (may_start and may_start.pop(0)):
            raise RuntimeError("can't start new thread")
        start(self)

    def begin(_: socket.socket) -> Any:
        return Stranger()

    listener = Listener(["127.0.0.1"], begin, lambda _: None, refused.put)  # type: ignore[arg-type, return-value]
    listener.start()
    monkeypatch.setattr(threads, "idle", [])
    monkeypatch.setattr(threading.Thread, "start", start_if_it_may)
    try:
        for count, expected in enumerate((PeerUnreachable, MalformedSetup, MalformedSetup)):
            with socket.create_connection(listener.addresses[0]) as stranger:
                stranger.sendall(b"x")
                assert type(refused.get(timeout=20)) is expected
                assert len(begun) == count
                assert is_closed(stranger)
    finally:
        listener.stop()


def test_a_refused_member_that_sends_is_not_reset_before_it_has_read_why() -> None:
    class Member:
        is_session, rank = True, 3

        def advance(self) -> bool:
            raise MalformedSetup("no")

        def forget(self) -> None:
            pass

    refused: queue.SimpleQueue[SealringError] = queue.SimpleQueue()
    listener = Listener(["127.0.0.1"], lambda _: Member(), lambda _: None, refused.put)  # type: ignore[arg-type, return-value]
    listener.start()
    stopping = threading.Thread(target=listener.stop, args=(time.monotonic() + 60.0,))
    with socket.create_connection(listener.addresses[0]) as member:
        member.sendall(b"x")
        refused.get(timeout=20)
        stopping.start()
        for _ in range(20):
            member.sendall(b"x")
            time.sleep(0.01)
        assert member.recv(1) == b""
        assert stopping.is_alive()
    stopping.join(20)
    assert not stopping.is_alive()


class FailingOnce:
    """An epoll that cannot register the first connection."""

    def __init__(self, epoll: select.epoll) -> None:
        self._epoll, self.failed = epoll, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._epoll, name)

    def register(self, descriptor: Any, events: int) -> None:
        if events & select.EPOLLET and not self.failed:
            self.failed = True
            raise OSError(errno.ENOMEM, "no memory for a descriptor")
        self._epoll.register(descriptor, events)


@pytest.mark.parametrize("what", ["epoll", "the beginning of a handshake"])
def test_a_turn_that_fails_leaves_no_connection_behind(
    monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    monkeypatch.setattr(arrivals, "PROOF_SECONDS", 0.2)
    failed = what == "epoll"
    refused: queue.SimpleQueue[SealringError] = queue.SimpleQueue()

    class Silent:
        is_session = True

        def advance(self) -> bool:
            return False

        def forget(self) -> None:
            pass

    def begin(_: socket.socket) -> Any:
        nonlocal failed
        if not failed:
            failed = True
            raise MemoryError("no memory for a handshake")
        return Silent()

    listener = Listener(["127.0.0.1"], begin, lambda _: None, refused.put)  # type: ignore[arg-type, return-value]
    if what == "epoll":
        listener.epoll = FailingOnce(listener.epoll)  # type: ignore[assignment]
    listener.start()
    try:
        for _ in range(2):
            with socket.create_connection(listener.addresses[0]) as stranger:
                stranger.sendall(b"x")
                assert is_closed(stranger)
    finally:
        listener.stop()
    assert failed
    assert "did not finish the set-up in time" in str(refused.get(timeout=20))


def test_a_connection_without_memory_for_a_thread_is_not_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def borrow(name: str, call: object) -> None:
        raise MemoryError("no memory for a thread")

    monkeypatch.setattr(threads, "borrow", borrow)
    serving = threads.TlsThreads(lambda: None)
    assert isinstance(serving.serve(object()), MemoryError)  # type: ignore[arg-type]
    serving.stop()  # returns, because it waits only for threads that are counted


@pytest.mark.threat("J21")
def test_strangers_knock_while_no_memory_is_left() -> None:
    """The thread of all listeners survives, and later refuses a stranger with a named error."""
    run = subprocess.run(
        [sys.executable, "-m", "tests.core.links.out_of_memory"],
        env=os.environ | {"MALLOC_ARENA_MAX": "1"},  # memory in other arenas would not be counted
        stdout=subprocess.PIPE,
        text=True,
        timeout=100,
        check=False,
    )
    said = ["['sealring-listen']", "MalformedSetup", "stopped"]
    assert (run.returncode, run.stdout.splitlines()) == (0, said)


@pytest.mark.threat("J16")
def test_what_strangers_caused_keeps_no_private_key() -> None:
    """A group of more than eight keeps its listener, and what it refused, for its whole life."""
    one, key = identity(0)
    (kept,) = places(key)
    links = WaitingLinks(terms(0))
    listener = Listener(
        ["127.0.0.1"],
        lambda sock: Incoming(sock, one, terms(0)),
        lambda _: None,  # type: ignore[arg-type, return-value]
        links.note_stranger,
    )
    listener.start()
    try:
        for _ in range(3):
            with socket.create_connection(listener.addresses[0]) as stranger:
                stranger.sendall(b"\x16\x03\x01\x00\x05hello")
                stranger.settimeout(20)
                while stranger.recv(4096):
                    pass
        assert [type(each) for each in links.strangers()] == 3 * [MalformedSetup]
        assert places(key) == [kept]
    finally:
        listener.stop()
        links.release()


@pytest.mark.threat("J18")
def test_a_worker_that_opens_ever_more_connections_loses_its_oldest() -> None:
    one, zero = ISSUER.credentials(1), ISSUER.credentials(0)
    refused: queue.SimpleQueue[SealringError] = queue.SimpleQueue()

    def begin(sock: socket.socket) -> Incoming:
        return Incoming(sock, zero, terms(0))

    def handle(incoming: Incoming) -> Any:
        incoming.allow_until(soon())
        while True:
            yield

    listener = Listener(["127.0.0.1"], begin, handle, refused.put)
    listener.start()
    opened: list[tls.TlsConnection] = []
    try:
        for _ in range(MAX_CONNECTIONS_PER_WORKER + 2):
            sock = socket.create_connection(listener.addresses[0])
            opened.append(tls.TlsConnection(sock, one, dialer=True, who="rank 0", deadline=soon()))
            opened[-1].handshake()
        for _ in range(2):
            error = refused.get(timeout=20)
            assert type(error) is PeerUnreachable
            assert error.peer == 1
            assert "gave way to newer connections of its own" in str(error)
        assert refused.empty()
    finally:
        for each in opened:
            each.close(until=0.0)
        listener.stop()


FORKED = """
import os, socket
from sealring.core.links.listener import Listener

listener = Listener(["127.0.0.1"], None, None, None)
(address,) = listener.addresses
start, ended = os.pipe()
if os.fork() == 0:
    os.read(start, 1)  # until the parent has stopped listening
    try:
        socket.create_connection(address, timeout=5).close()
        print("the child keeps the port open")
    except ConnectionRefusedError:
        print("refused")
    os._exit(0)
listener.stop()
os.write(ended, b"!")
os.wait()
"""


@pytest.mark.threat("K20")
def test_a_forked_child_does_not_keep_the_port_open() -> None:
    """Peers that dial a dead worker must be refused, not left waiting in a queue."""
    out = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORKED],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert out.stdout == "refused\n"


@pytest.mark.threat("J20")
def test_listeners_of_one_process_share_its_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process has one listener for each large group, and strangers may connect to all of them."""
    monkeypatch.setattr(resource, "getrlimit", lambda _: (512, 512))
    listeners: list[Listener] = []
    try:
        for _ in range(4):
            listeners.append(
                Listener(["127.0.0.1"], lambda _: None, lambda _: None, lambda _: None)  # type: ignore[arg-type, return-value]
            )
        first, *others = listeners
        assert share_of(first) == (512 // 4, 512 // 8)
        # Floods at each listener, which together use up the available descriptors.
        for listener in others:
            fill = [None] * share_of(listener)[0]
            listener.silent, listener.greeting = fill, fill[: 512 // 8]  # type: ignore[assignment]
        assert share_of(first) == (512 // 16, 512 // 32)
        for listener in others:
            listener.silent = listener.greeting = []  # type: ignore[assignment]
        assert share_of(first)[0] == 512 // 4
    finally:
        for listener in listeners:
            listener.stop()
