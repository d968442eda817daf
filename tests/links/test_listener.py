"""The listener by itself: what happens to it when the process runs out of something."""

from __future__ import annotations

import contextlib
import resource
import socket
import subprocess
import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from sealring.errors import MalformedSetup, SealringError
from sealring.links.listener import Listener
from sealring.links.shares import share_of


class _FirstThreadFails(ThreadPoolExecutor):
    """Keeps the work that it could not start a thread for, as ThreadPoolExecutor does."""

    failed = False

    def submit(self, *work: Any, **options: Any) -> Future[Any]:
        future = super().submit(*work, **options)
        if not self.failed:
            self.failed = True
            raise RuntimeError("can't start new thread")
        return future


def test_a_connection_without_a_thread_does_not_end_the_listener() -> None:
    begun, refused = threading.Semaphore(0), threading.Semaphore(0)

    class Stranger:
        is_session = False

        def advance(self) -> bool:
            begun.release()
            raise MalformedSetup("not a worker")

    def begin(_: socket.socket) -> Any:
        return Stranger()

    def refuse(_: SealringError) -> None:
        refused.release()

    listener = Listener(["127.0.0.1"], begin, lambda _: None, refuse)  # type: ignore[arg-type, return-value]
    listener._tls_threads._threads = _FirstThreadFails(1)
    listener.start()
    try:
        for _ in range(2):
            with socket.create_connection(listener.addresses[0]) as stranger:
                stranger.sendall(b"x")
                assert refused.acquire(timeout=20)
                assert begun.acquire(timeout=20)
                # Only the listener's own thread closes connections, so it still runs.
                stranger.settimeout(20)
                with contextlib.suppress(ConnectionResetError):
                    assert stranger.recv(1) == b""
    finally:
        listener.stop()


FORKED = """
import os, socket
from sealring.links.listener import Listener

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


def test_a_forked_child_does_not_keep_the_port_open() -> None:
    """Peers that dial a worker which has died must be refused, not left in a queue."""
    out = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORKED],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert out.stdout == "refused\n"


def test_listeners_of_one_process_share_its_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process has a listener for each large group, and strangers may come to all of them."""
    monkeypatch.setattr(resource, "getrlimit", lambda _: (512, 512))
    listeners: list[Listener] = []
    try:
        for _ in range(4):
            listeners.append(
                Listener(["127.0.0.1"], lambda _: None, lambda _: None, lambda _: None)  # type: ignore[arg-type, return-value]
            )
        first, *others = listeners
        assert share_of(first) == (512 // 4, 512 // 8)
        for listener in others:  # a flood at each: they take what there is, one after the other
            fill = [None] * share_of(listener)[0]
            listener.silent, listener.greeting = fill, fill[: 512 // 8]  # type: ignore[assignment]
        assert share_of(first) == (512 // 16, 512 // 32)
        for listener in others:
            listener.silent = listener.greeting = []  # type: ignore[assignment]
        assert share_of(first)[0] == 512 // 4
    finally:
        for listener in listeners:
            listener.stop()
