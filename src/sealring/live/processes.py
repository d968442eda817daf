"""Processes and their sockets, as the kernel lists them in /proc."""

from __future__ import annotations

import ipaddress
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from sealring.live.gather import own_sockets

Kind = Literal["tcp", "udp", "unix", "other"]

_LISTEN: Final = "0A"
_TCP_STATES: Final = {"01": "established", _LISTEN: "listening", "06": "time-wait"}


@dataclass(frozen=True, slots=True)
class End:
    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Socket:
    inode: int
    kind: Kind
    state: str
    local: End | None = None
    remote: End | None = None
    path: str = ""
    """Of a Unix socket, if it has one."""


@dataclass(frozen=True, slots=True)
class Process:
    pid: int
    name: str
    user: int
    pids: tuple[int, ...]
    """Its number here and in the namespaces below: a container counts from 1."""

    def sockets(self) -> list[int] | None:
        """Inodes of its open sockets; None where this user may not look."""
        try:
            return own_sockets(self.pid)
        except OSError:
            return None

    def table(self) -> dict[int, Socket]:
        """All sockets of the process's network namespace, by their inodes."""
        found: dict[int, Socket] = {}
        folder = Path(f"/proc/{self.pid}/net")
        kinds: tuple[tuple[str, Kind], ...] = (
            ("tcp", "tcp"), ("tcp6", "tcp"), ("udp", "udp"), ("udp6", "udp"),
        )  # fmt: skip
        for name, kind in kinds:
            for line in _lines(folder / name):
                each = _internet(line.split(), kind)
                found[each.inode] = each
        for line in _lines(folder / "unix"):
            fields = line.split(maxsplit=7)
            path = fields[7] if len(fields) > 7 else ""
            inode = int(fields[6])
            found[inode] = Socket(inode, "unix", "", path=path)
        return found


def family(pid: int) -> list[Process]:
    """The process and all below it; empty if there is none of that number."""
    parents: dict[int, list[int]] = {}
    known: dict[int, Process] = {}
    for entry in os.listdir("/proc"):
        if entry.isdecimal() and (each := _process(int(entry))) is not None:
            process, parent = each
            known[process.pid] = process
            parents.setdefault(parent, []).append(process.pid)
    found: list[Process] = []
    waiting = [pid]
    while waiting:
        number = waiting.pop(0)
        if number in known:
            found.append(known.pop(number))
            waiting.extend(sorted(parents.get(number, ())))
    return found


def _process(pid: int) -> tuple[Process, int] | None:
    try:
        text = Path(f"/proc/{pid}/status").read_text(errors="replace")
    except OSError:  # it has ended since
        return None
    fields = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    below = tuple(map(int, fields.get("NSpid", str(pid)).split()))
    process = Process(pid, fields["Name"].strip(), int(fields["Uid"].split()[1]), below)
    return process, int(fields["PPid"])


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(errors="replace").splitlines()[1:]
    except OSError:
        return []


def _internet(fields: list[str], kind: Kind) -> Socket:
    state = "" if kind == "udp" else _TCP_STATES.get(fields[3], "closing")
    remote = _end(fields[2])
    connected = remote.port != 0
    return Socket(int(fields[9]), kind, state, _end(fields[1]), remote if connected else None)


def _end(text: str) -> End:
    """The kernel writes an address as words of the machine's byte order, in hexadecimal."""
    address, _, port = text.partition(":")
    words = struct.pack(f"={len(address) // 8}I", *(
        int(address[at : at + 8], 16) for at in range(0, len(address), 8)
    ))  # fmt: skip
    ip = ipaddress.ip_address(words)
    if isinstance(ip, ipaddress.IPv6Address) and ip.ipv4_mapped is not None:
        ip = ip.ipv4_mapped
    return End(str(ip), int(port, 16))
