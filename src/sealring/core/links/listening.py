"""A socket that listens on one address."""

from __future__ import annotations

import math
import socket
from typing import Final

from sealring.core.links import setting_up
from sealring.core.links.unproven import SILENT_SECONDS
from sealring.errors import ConfigurationError

_BACKLOG: Final = 4096


def listen(address: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    sock = setting_up.create(family)
    try:
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.bind((address, 0))
        # The kernel keeps a connection until its first bytes come, so a silent one takes no
        # descriptor, no memory of ours and no place in the queue of those to be accepted. It comes
        # to us without bytes when this time is up, or when the kernel's table of them is full.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT, math.ceil(SILENT_SECONDS))
        sock.listen(_BACKLOG)
        sock.setblocking(False)
    except OSError as problem:
        sock.close()
        raise ConfigurationError(
            f"this worker cannot listen on {address} ({problem.strerror}): set SEALRING_ADDRESS or "
            "SEALRING_INTERFACE to an address of this machine"
        ) from problem
    except BaseException:
        sock.close()
        raise
    return sock
