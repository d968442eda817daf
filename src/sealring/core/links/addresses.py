"""Where this worker listens, and where its peers are told to connect.

It listens on one address or on those of one interface, never on all. SEALRING_ADDRESS is that
address, or names the interface, whose IPv4 and global IPv6 addresses are taken. Without it: the
address from which this machine reaches MASTER_ADDR.

SEALRING_PORTS has the only ports that a worker may listen on. SEALRING_ADVERTISE has an address
that an address translation leads here; peers are told it first, and then the worker's own ones.
"""

from __future__ import annotations

import fcntl
import ipaddress
import re
import socket
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from sealring.core.settings import ADDRESS, ADVERTISE, PORTS, Setting
from sealring.errors import ConfigurationError

MAX_ADDRESSES: Final = 8

_SIOCGIFADDR: Final = 0x8915
_INTERFACE_NAME_BYTES: Final = 16
_IF_INET6: Final = Path("/proc/net/if_inet6")
_SCOPE_LINK: Final = 0x20
_UNUSABLE_FLAGS: Final = 0x08 | 0x40
"""Duplicate address detection failed, or has not ended yet."""


_PORT_RANGE: Final = re.compile(r"([0-9]{1,5})(?:-([0-9]{1,5}))?")
_HOST_AND_PORTS: Final = re.compile(r"\[([^\[\]]*)\](?::(.+))?|([^:]*)(?::(.+))?")
"""[IPv6 address]:ports, or IPv4 address:ports."""

IpAddress = ipaddress.IPv4Address | ipaddress.IPv6Address


@dataclass(frozen=True, slots=True)
class Reach:
    """Where a worker listens and what its peers are told."""

    hosts: tuple[str, ...]
    """The IP addresses to listen on, best first."""
    ports: tuple[int, ...] = ()
    """The only ports to listen on; empty: whichever the system chooses."""
    advertised: str = ""
    """An IP address that leads here; "": none."""
    advertised_ports: tuple[int, ...] = ()
    """The port there for each of `ports`; empty: the same ports."""

    def announced(self, bound: Sequence[tuple[str, int]]) -> list[tuple[str, int]]:
        """What peers are told of a worker that listens at these addresses and ports."""
        if not self.advertised:
            return list(bound)
        alike = [port for host, port in bound if (":" in host) == (":" in self.advertised)]
        port = (alike or [bound[0][1]])[0]
        if self.advertised_ports:
            port = self.advertised_ports[self.ports.index(port)]
        first = (self.advertised, port)
        return [first, *(each for each in bound if each != first)][:MAX_ADDRESSES]


def read_reach(environ: Mapping[str, str]) -> Reach:
    """What SEALRING_ADDRESS, SEALRING_PORTS and SEALRING_ADVERTISE say, or a ConfigurationError."""
    ports = read_ports(environ)
    host, outside = read_advertised(environ, ports)
    return Reach(tuple(own_addresses(environ)), ports, host, outside)


def read_ports(environ: Mapping[str, str]) -> tuple[int, ...]:
    """The ports of SEALRING_PORTS in its order; none if it is unset."""
    written = PORTS.read(environ)
    return () if written is None else _ports(PORTS, written, written)


def read_advertised(
    environ: Mapping[str, str], ports: Sequence[int]
) -> tuple[str, tuple[int, ...]]:
    """The address of SEALRING_ADVERTISE and its ports, one for each of `ports`, if it has any."""
    written = ADVERTISE.read(environ)
    if written is None:
        return "", ()
    try:
        return _advertisable(written, ipaddress.ip_address(written)), ()
    except ValueError:
        pass
    found = _HOST_AND_PORTS.fullmatch(written)
    host, outside = (found[1] or found[3], found[2] or found[4]) if found else ("", None)
    try:
        address = _advertisable(written, ipaddress.ip_address(host))
    except ValueError:
        raise ADVERTISE.refused(
            written,
            "give the IP address at which peers reach this machine, and its ports if they differ: "
            "203.0.113.7, 203.0.113.7:29600-29663 or [2001:db8::7]:29600-29663. A name is not "
            "taken, because it can mean another address elsewhere: `getent hosts NAME` shows what "
            "it means here",
        ) from None
    if outside is None:
        return address, ()
    mapped = _ports(ADVERTISE, written, outside)
    if not ports:
        raise ADVERTISE.refused(written, f"its ports stand for those of {PORTS.name}: set that too")
    if len(mapped) != len(ports):
        raise ADVERTISE.refused(
            written,
            f"it has {len(mapped)} ports and {PORTS.name} has {len(ports)}: give one for each, in "
            "the same order",
        )
    return address, mapped


def _ports(row: Setting[Any], written: str, listed: str) -> tuple[int, ...]:
    found: list[int] = []
    for part in listed.split(","):
        match = _PORT_RANGE.fullmatch(part.strip())
        if match is None:
            raise row.refused(
                written, f"{part!r} is no port and no range: write them as 29600-29663,29700"
            )
        first, last = int(match[1]), int(match[2] or match[1])
        if not (1 <= first <= 65535 and 1 <= last <= 65535):
            raise row.refused(written, f"{part.strip()} is not within 1 to 65535")
        if first > last:
            raise row.refused(written, f"write {last}-{first}: a range begins with its lowest port")
        found += range(first, last + 1)
    if len(set(found)) < len(found):
        twice = next(port for port in found if found.count(port) > 1)
        raise row.refused(written, f"it has port {twice} twice")
    return tuple(found)


def plain_address(address: IpAddress) -> IpAddress:
    """An IPv4 address that is written as an IPv6 one (::ffff:10.0.0.1) as the IPv4 address."""
    return getattr(address, "ipv4_mapped", None) or address


def _advertisable(written: str, address: IpAddress) -> str:
    address = plain_address(address)
    if address.is_unspecified or address.is_multicast or address.is_link_local or "%" in written:
        raise ADVERTISE.refused(
            written, f"give the one address at which peers reach this machine: {address} is none"
        )
    return str(address)


def own_addresses(environ: Mapping[str, str]) -> list[str]:
    """The IP addresses to listen on, best first."""
    chosen = ADDRESS.read(environ)
    if chosen is None:
        return [_address_towards(environ.get("MASTER_ADDR", "127.0.0.1"))]
    try:
        parsed = plain_address(ipaddress.ip_address(chosen))
    except ValueError:
        return interface_addresses(chosen)[:MAX_ADDRESSES]
    alone = parsed.version == 6 and parsed.is_link_local  # means nothing without an interface
    if parsed.is_unspecified or parsed.is_multicast or alone or "%" in chosen:
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
    """Reads the kernel's table of IPv6 addresses.

    Its columns are address, index, prefix, scope and flags (all hexadecimal), and name.
    """
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
    """The source address that the kernel would use. Connecting a UDP socket sends nothing."""
    # As bytes, because for a str Python would load its tables of international names.
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
