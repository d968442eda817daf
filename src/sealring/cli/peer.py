"""`sealring doctor --peer`: whether another machine can be reached from this one, and why not."""

from __future__ import annotations

import errno
import os
import socket
from typing import Any, Final, Literal, NamedTuple

from sealring.errors import ConfigurationError

PATIENCE_SECONDS: Final = 5.0
"""The kernel repeats a packet that was lost after one second and after three."""

Verdict = Literal["answers", "refuses", "is silent", "no route", "unknown name", "cannot be tried"]

MEANING: Final[dict[Verdict, str]] = {
    "answers": "a process listens there, and the way is open. That it is a worker of your job is "
    "proved when the group is made",
    "refuses": "the machine is reached, and no process listens on this port now. Before the job "
    "runs this is as good as an answer; while it runs, look at what `sealring doctor` says there "
    "about ports. Some firewalls refuse in this way too",
    "is silent": "nothing comes back: a firewall drops it, or no machine has this address. Open "
    "the port there and in the cloud's security group, for this machine's address",
    "no route": "a router or a firewall says that this machine cannot get there: give the address "
    "that this network reaches (SEALRING_ADDRESS or SEALRING_ADVERTISE there), or add the route",
    "unknown name": "no name server knows it: correct the name, or give the address",
    "cannot be tried": "this machine cannot connect to such an address",
}
"""What each verdict says, and what to do."""

_BY_ERRNO: Final[dict[int, Verdict]] = {
    0: "answers",
    errno.ECONNREFUSED: "refuses",
    errno.ETIMEDOUT: "is silent",
    errno.EAGAIN: "is silent",
    errno.EHOSTUNREACH: "no route",
    errno.ENETUNREACH: "no route",
    errno.EHOSTDOWN: "no route",
}


class Answer(NamedTuple):
    address: str
    """With the port, as it was tried; of a name that is unknown the name."""
    verdict: Verdict
    why: str
    """In the system's words."""


def try_peer(peer: str) -> list[Answer]:
    """Connects to each address of HOST:PORT once, and says what came of it."""
    host, port = _host_and_port(peer)
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as problem:
        return [Answer(peer, "unknown name", str(problem))]
    tried = dict.fromkeys((family, address) for family, _, _, _, address in found)
    return [_try(family, address) for family, address in tried]


def _host_and_port(peer: str) -> tuple[str, int]:
    host, colon, port = peer.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        colon = ""  # an IPv6 address without brackets: its end would be taken for the port
    if not (host and colon and port.isascii() and port.isdecimal() and 1 <= int(port) <= 65535):
        raise ConfigurationError(
            f"--peer is {peer!r}; pass HOST:PORT or [IPv6 address]:PORT, with a port from 1 to "
            "65535: one of SEALRING_PORTS there, or the port of --rdzv-endpoint"
        )
    return host, int(port)


def _try(family: int, address: Any) -> Answer:
    host = f"[{address[0]}]" if family == socket.AF_INET6 else address[0]
    try:
        with socket.socket(family, socket.SOCK_STREAM) as sock:
            sock.settimeout(PATIENCE_SECONDS)
            number = sock.connect_ex(address)
    except OSError as problem:
        number = problem.errno or -1
    return Answer(
        f"{host}:{address[1]}", _BY_ERRNO.get(number, "cannot be tried"), os.strerror(number)
    )
