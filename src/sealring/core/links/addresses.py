"""Where this worker listens: the addresses of one interface or one address, never all of them.

SEALRING_ADDRESS is that address, or names the interface, whose IPv4 and global IPv6 addresses are
taken. Without it: the address from which this machine reaches MASTER_ADDR.
"""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from sealring.core.settings import ADDRESS
from sealring.errors import ConfigurationError

MAX_ADDRESSES: Final = 8

_SIOCGIFADDR: Final = 0x8915
_INTERFACE_NAME_BYTES: Final = 16
_IF_INET6: Final = Path("/proc/net/if_inet6")
_SCOPE_LINK: Final = 0x20
_UNUSABLE_FLAGS: Final = 0x08 | 0x40
"""Duplicate address detection failed, or has not ended yet."""


def own_addresses(environ: Mapping[str, str]) -> list[str]:
    """The IP addresses to listen on, best first."""
    chosen = ADDRESS.read(environ)
    if chosen is None:
        return [_address_towards(environ.get("MASTER_ADDR", "127.0.0.1"))]
    try:
        parsed = ipaddress.ip_address(chosen)
    except ValueError:
        return interface_addresses(chosen)[:MAX_ADDRESSES]
    if parsed.is_unspecified or parsed.is_multicast or "%" in chosen:
        raise ADDRESS.refused(chosen, "give the one address that peers shall connect to")
    return [str(parsed)]


def interface_addresses(name: str) -> list[str]:
    names = [known for _, known in socket.if_nameindex()]
    if name not in names:
        raise ADDRESS.refused(
            name,
            "set it to an IP address that peers shall connect to, or to an interface of this "
            f"machine: {', '.join(names)}",
        )
    found = _ipv4_of(name) + parse_if_inet6(_read(_IF_INET6), name)
    if not found:
        raise ConfigurationError(f"the interface {name} has no address that peers could reach")
    return found


def parse_if_inet6(table: str, name: str) -> list[str]:
    """The kernel's table: address, index, prefix, scope, flags (all hexadecimal), name."""
    found = []
    for line in table.splitlines():
        address, _, _, scope, flags, owner = line.split()
        # A link-local address means nothing without the reader's own interface.
        if owner == name and int(scope, 16) != _SCOPE_LINK and not int(flags, 16) & _UNUSABLE_FLAGS:
            found.append(str(ipaddress.IPv6Address(bytes.fromhex(address))))
    return found


def _ipv4_of(name: str) -> list[str]:
    request = struct.pack(f"{_INTERFACE_NAME_BYTES}s240x", name.encode())
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            answer = fcntl.ioctl(sock, _SIOCGIFADDR, request)
        except OSError:
            return []
    # struct ifreq: the name, then a sockaddr_in of family, port and address.
    start = _INTERFACE_NAME_BYTES + 4
    return [socket.inet_ntop(socket.AF_INET, answer[start : start + 4])]


def _address_towards(master: str) -> str:
    """The source address the kernel would use; connecting a UDP socket sends nothing."""
    # As bytes: for a text Python loads the tables of international names.
    name = master.encode() if master.isascii() else master
    try:
        candidates = socket.getaddrinfo(name, 9, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError) as problem:
        raise ConfigurationError(
            f"MASTER_ADDR {master!r} cannot be resolved ({problem}): correct it, or set "
            "SEALRING_ADDRESS"
        ) from problem
    for family, kind, protocol, _, address in candidates:
        if family not in (socket.AF_INET, socket.AF_INET6):
            continue
        try:
            with socket.socket(family, kind, protocol) as sock:
                sock.connect(address)
                found = str(sock.getsockname()[0])
        except OSError:
            continue
        if not found.startswith("fe80:"):
            return found
    raise ConfigurationError(
        f"this machine has no route to MASTER_ADDR {master!r}: set SEALRING_ADDRESS"
    )


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # a kernel without IPv6
        return ""
