from __future__ import annotations

import atexit
import random
import socket
from contextlib import ExitStack
from pathlib import Path

# A test process owns a port for as long as it holds the UDP port of the same number.
_held = ExitStack()
atexit.register(_held.close)


def free_port() -> int:
    """Returns a port at which no other process listens, for programs that cannot choose one.

    No outgoing connection takes this port either, because it is below the system's own range.
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
