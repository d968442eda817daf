"""Thousands of unauthenticated connections to one listener, opened again when it closes them.

`python -m tests.attacks.strangers` measures how long a group of four takes to form without these
connections and with them.

There are three kinds: silent ones send nothing, slow ones send a TLS ClientHello byte by byte, and
stalling ones send a whole ClientHello and then nothing. They run in separate processes, as an
attacker's would.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import multiprocessing
import select
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any, Final

from OpenSSL import SSL

SILENT: Final = 5000
SLOW: Final = 250
STALLING: Final = 250
_PROCESSES: Final = 6
"""So many that no process needs more than the usual limit of 1024 open files."""
_TRICKLE_SECONDS: Final = 0.2


def client_hello() -> bytes:
    """Returns the first TLS message that a worker sends."""
    context = SSL.Context(SSL.TLS_METHOD)
    context.set_min_proto_version(SSL.TLS1_3_VERSION)
    context.set_alpn_protos([b"sealring"])
    connection = SSL.Connection(context, None)
    connection.set_connect_state()
    with contextlib.suppress(SSL.WantReadError):
        connection.do_handshake()
    return connection.bio_read(1 << 16)


@contextlib.contextmanager
def strangers(
    address: tuple[str, int], silent: int = SILENT, slow: int = SLOW, stalling: int = STALLING
) -> Iterator[None]:
    """Enters when each stranger has connected once; the strangers go on until the block ends."""
    hello = client_hello().hex()
    processes = []
    try:
        for index in range(_PROCESSES):
            shares = [len(range(index, n, _PROCESSES)) for n in (silent, slow, stalling)]
            arguments = json.dumps([*address, *shares, hello])
            processes.append(
                subprocess.Popen(
                    # An attacker on another machine would not use this machine's processors.
                    ["nice", "-n", "19", sys.executable, __file__, arguments],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "all connected\n"
        yield
        assert all(process.poll() is None for process in processes), "an attacker gave up"
    finally:
        for process in processes:
            process.kill()
            process.communicate()


class Attacker:
    """One process's share of the strangers."""

    def __init__(self, host: str, port: int, silent: int, slow: int, stalling: int, hello: str):
        self._address = (host, port)
        self._family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._hello = bytes.fromhex(hello)
        self._epoll = select.epoll()
        self._kinds: dict[int, str] = {}
        self._sockets: dict[int, socket.socket] = {}
        self._sent: dict[int, int] = {}
        self._never_connected = silent + slow + stalling
        self._to_open = ["silent"] * silent + ["slow"] * slow + ["stalling"] * stalling

    def run(self) -> None:
        next_trickle = 0.0
        told = False
        while True:
            while self._to_open:
                self._open(self._to_open.pop())
            for fd, event in self._epoll.poll(_TRICKLE_SECONDS):
                # A connection that the listener closed at once counts as connected.
                if event & select.EPOLLOUT and not event & select.EPOLLERR:
                    self._connected(fd)
                if event & (select.EPOLLIN | select.EPOLLHUP | select.EPOLLERR):
                    self._to_open.append(self._close(fd))
            if time.monotonic() >= next_trickle:
                next_trickle = time.monotonic() + _TRICKLE_SECONDS
                for fd in [fd for fd, kind in self._kinds.items() if kind == "slow"]:
                    self._trickle(fd)
            if not told and self._never_connected <= 0:
                told = True
                print("all connected", flush=True)

    def _open(self, kind: str) -> None:
        sock = socket.socket(self._family, socket.SOCK_STREAM)
        sock.setblocking(False)
        # A reset instead of TIME_WAIT: the attacker must not run out of ports.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        problem = sock.connect_ex(self._address)
        if problem not in (0, errno.EINPROGRESS):
            sock.close()
            self._to_open.append(kind)
            return
        self._sockets[sock.fileno()] = sock
        self._kinds[sock.fileno()] = kind
        self._sent[sock.fileno()] = 0
        self._epoll.register(sock, select.EPOLLIN | select.EPOLLOUT | select.EPOLLET)

    def _connected(self, fd: int) -> None:
        if self._sent[fd]:
            return
        self._never_connected -= 1
        self._sent[fd] = 1
        if self._kinds[fd] == "stalling":
            with contextlib.suppress(OSError):
                self._sockets[fd].send(self._hello)
            # The server's answer is left unread.
            self._epoll.modify(fd, select.EPOLLRDHUP | select.EPOLLET)

    def _trickle(self, fd: int) -> None:
        if at := self._sent[fd]:
            with contextlib.suppress(OSError):
                self._sockets[fd].send(self._hello[at - 1 : at])
            self._sent[fd] = at + 1

    def _close(self, fd: int) -> str:
        self._epoll.unregister(fd)
        self._sockets.pop(fd).close()
        del self._sent[fd]
        return self._kinds.pop(fd)


def _join(rank: int, port: int, begin: Any, joined: Any) -> None:
    """Runs one worker of the group."""
    from torch.distributed import TCPStore

    from sealring.core.links import build_mesh
    from tests.core.handshake.meeting import terms
    from tests.core.links.worlds import ISSUER, LOOPBACK

    logging.getLogger("sealring").setLevel(logging.ERROR)
    store: Any = TCPStore("127.0.0.1", port, is_master=False)
    joined.wait()
    if rank != 0:
        begin.wait()
    mesh = build_mesh(store, ISSUER.credentials(rank), terms(rank), timeout=100.0, environ=LOOPBACK)
    joined.wait()
    for link in mesh.links:
        link.socket.close()


def measure() -> None:
    """Times a group of four processes; all strangers connect to rank 0, which listens first."""
    from torch.distributed import TCPStore

    import tests.core.links.worlds  # so that all workers have one issuer
    from sealring.core.links.rendezvous import AddressBook

    assert tests.core.links.worlds.ISSUER
    fork = multiprocessing.get_context("fork")

    def formed(surrounded: bool, held_for: float = 0.0) -> float:
        store: Any = TCPStore("127.0.0.1", 0, is_master=True)
        begin, joined = fork.Event(), fork.Barrier(5)
        given = (store.port, begin, joined)
        workers = [fork.Process(target=_join, args=(rank, *given)) for rank in range(4)]
        for worker in workers:
            worker.start()
        joined.wait()
        around: Any = contextlib.nullcontext()
        if surrounded:
            while not (addresses := AddressBook(store, "0.1", time.monotonic() + 60).lookup(0)):
                time.sleep(0.01)
            around = strangers(addresses[0])
        with around:
            time.sleep(held_for)
            start = time.monotonic()
            begin.set()
            joined.wait()
            seconds = time.monotonic() - start
        for worker in workers:
            worker.join()
        return seconds

    around = f"{SILENT} silent, {SLOW} slow and {STALLING} stalling ones"
    for _ in range(4):
        print(f"a group of four in {formed(False):.2f} s alone", flush=True)
        print(f"a group of four in {formed(True):.2f} s while {around} arrive", flush=True)
        print(f"a group of four in {formed(True, 2.0):.2f} s among {around}", flush=True)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        Attacker(*json.loads(sys.argv[1])).run()
    else:
        measure()
