"""A process whose listener gets connections while no memory is left; prints what became of it."""

from __future__ import annotations

import os
import queue
import resource
import socket
import sys
import threading
from pathlib import Path

from sealring.core.handshake.incoming import Incoming
from sealring.core.links.listener import Listener
from sealring.errors import MalformedSetup, SealringError
from tests.core.handshake.meeting import terms
from tests.core.identity.issuing import Issuer


def knock(address: tuple[str, int], times: int) -> None:
    """Connects this often; the listener's own thread refuses or drops each connection."""
    for _ in range(times):
        with socket.create_connection(address) as stranger:
            stranger.sendall(b"\x16\x03\x01\x00\x05hello")
            stranger.settimeout(0.2)
            try:
                while stranger.recv(4096):
                    pass
            except OSError:
                pass


def take_all_memory() -> object:
    """Allocates all memory up to the limit; dropping the returned object frees the memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    used = pages * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (used, resource.RLIM_INFINITY))
    taken: list[bytearray] = []
    size = 1 << 20
    while size >= 1 << 10:
        try:
            taken.append(bytearray(size))
        except MemoryError:
            size //= 2
    return taken


def main() -> None:
    own = Issuer().credentials(0)
    refused: queue.SimpleQueue[SealringError] = queue.SimpleQueue()
    listener = Listener(
        ["127.0.0.1"],
        lambda sock: Incoming(sock, own, terms(0)),
        lambda _: None,  # type: ignore[arg-type, return-value]
        refused.put,
    )
    listener.start()
    address = listener.addresses[0]
    knock(address, 1)
    assert isinstance(refused.get(timeout=20), MalformedSetup)
    go_on, tell = os.pipe()
    stranger = os.fork()
    if stranger == 0:
        os.read(go_on, 1)
        knock(address, 3)
        os._exit(0)
    taken = take_all_memory()
    os.write(tell, b"x")
    os.waitpid(stranger, 0)
    del taken
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    print([each.name for each in threading.enumerate() if each.name == "sealring-listen"])
    while not refused.empty():
        refused.get()
    knock(address, 1)
    print(type(refused.get(timeout=20)).__name__)
    listener.stop()
    print("stopped")


if __name__ == "__main__":
    sys.exit(main())
