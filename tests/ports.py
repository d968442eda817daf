from __future__ import annotations

import atexit
import random
import socket
from contextlib import ExitStack
from pathlib import Path

# A port is a test process's own for as long as it holds the UDP port of the same number.
_held = ExitStack()
atexit.register(_held.close)


def free_port() -> int:
    """A port at which no other process listens; for what cannot be told to choose one itself.

    No outgoing connection takes it either: it lies below those the system chooses from.
    """
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = random.SystemRandom().randrange(max(1024, lowest - 16384), lowest)
        mine = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        try:
            mine.bind(("127.0.0.1", port))
            socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            mine.close()
        else:
            _held.enter_context(mine)
            return port
