"""Tells which sockets of a job are sealed links, which are something else, and which are unknown.

A socket counts as sealed only if the worker that holds it names it as a link of a group. A socket
that no worker names is not sealed by sealring. If no worker answers for a process, its sockets are
unknown.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from sealring.errors import ConfigurationError
from sealring.observe.directory import chosen_directory, pid_of
from sealring.observe.gather import own_sockets
from sealring.observe.status import SocketStatus, StatusSocket, TorchGroup, read_all

Verdict = Literal["sealed", "not sealed", "store", "set-up", "local", "unknown"]
ALARMS: Final = frozenset(("not sealed", "unknown"))


@dataclass(frozen=True, slots=True)
class WatchedSocket:
    inode: int
    kind: str
    state: str
    local: str
    remote: str
    verdict: Verdict
    why: str


@dataclass(frozen=True, slots=True)
class WatchedProcess:
    pid: int
    name: str
    answers: bool
    """Whether it is a worker that answers."""
    listed_by: Literal["kernel", "worker"] | None
    """Where the list of sockets comes from. None if there is no list."""
    groups: list[TorchGroup]
    sockets: list[WatchedSocket]


def watch(pid: int, environ: Mapping[str, str]) -> list[WatchedProcess]:
    processes = family(pid)
    if not processes:
        raise ConfigurationError(f"there is no process {pid}")
    statuses = {
        process.pid: status
        for process in processes
        if (status := _status(process, environ)) is not None
    }
    # A forked child has its parent's sockets open too.
    links = {link.inode: link for status in statuses.values() for link in status.links}
    stores = _addresses({status.store for status in statuses.values() if status.store})
    setting_up = {inode for status in statuses.values() for inode in status.setting_up}
    known = Known(links, stores, setting_up)
    return [_watched(process, statuses.get(process.pid), known) for process in processes]


@dataclass(frozen=True, slots=True)
class Known:
    links: dict[int, StatusSocket]
    stores: set[tuple[str, int]]
    setting_up: set[int]


def _status(process: Process, environ: Mapping[str, str]) -> SocketStatus | None:
    place = chosen_directory(environ, process.user)
    if place is None:
        return None
    try:
        found = read_all(
            SocketStatus,
            place,
            user=process.user,
            only=lambda name: pid_of(name) in process.pids,
        )
    except ConfigurationError:
        return None
    # The pid is the worker's own, and another container's worker may have the same: then unknown.
    same = [each for each in found.answers if each.pid in process.pids]
    return same[0] if len(same) == 1 else None


def _watched(process: Process, status: SocketStatus | None, known: Known) -> WatchedProcess:
    inodes = process.sockets()
    listed_by: Literal["kernel", "worker"] | None = "kernel"
    if inodes is None:
        inodes, listed_by = (None, None) if status is None else (status.own, "worker")
    table = process.table() if inodes else {}
    if listed_by == "kernel" and not table.keys() >= set(inodes or ()):
        # Keeps the sockets of the table and those still open: the others were closed in between.
        now = set(process.sockets() or ())
        inodes = [inode for inode in inodes or () if inode in table or inode in now]
    sockets = [
        _judged(table.get(inode, Socket(inode, "other", "")), status, known)
        for inode in inodes or ()
    ]
    return WatchedProcess(
        pid=process.pid,
        name=process.name,
        answers=status is not None,
        listed_by=listed_by,
        groups=[] if status is None else status.torch_groups,
        sockets=sockets,
    )


def _judged(each: Socket, status: SocketStatus | None, known: Known) -> WatchedSocket:
    verdict, why = verdict_of(each, status, known)
    return WatchedSocket(
        inode=each.inode,
        kind=each.kind,
        state=each.state,
        local=str(each.local) if each.local else each.path,
        remote=str(each.remote) if each.remote else "",
        verdict=verdict,
        why=why,
    )


def verdict_of(each: Socket, status: SocketStatus | None, known: Known) -> tuple[Verdict, str]:
    if (link := known.links.get(each.inode)) is not None:
        way = "" if link.transport == "tcp" else "; records go through shared memory, sealed too"
        return "sealed", f"link to rank {link.peer} of group {link.group}{way}"
    if each.kind == "unix":
        return "local", "a Unix socket: stays on this machine"
    if each.inode in known.setting_up:
        what = "takes connections" if each.state == "listening" else "a connection"
        return "set-up", f"{what} for a link that is being made, under TLS"
    if each.kind == "other":
        return "unknown", "neither TCP, UDP nor Unix, or of another network namespace"
    if _meets(each, known.stores):
        return "store", "torch's store, which carries no tensors"
    if status is None:
        return "unknown", "no worker answers for this process"
    if status.links_left_out:
        return "unknown", f"the worker has {status.links_left_out} links more than it lists"
    plaintext = sorted({group.backend for group in status.torch_groups if not group.sealed})
    beside = f"; the process has groups of {', '.join(plaintext)}" if plaintext else ""
    return "not sealed", f"not a link of sealring's{beside}"


def _meets(each: Socket, stores: set[tuple[str, int]]) -> bool:
    if each.kind != "tcp":
        return False
    ends = [end for end in (each.local, each.remote) if end is not None]
    if each.state == "listening":  # often at all addresses
        return any(end.port == port for end in ends for _, port in stores)
    return any((end.host, end.port) in stores for end in ends)


def _addresses(stores: set[str]) -> set[tuple[str, int]]:
    found: set[tuple[str, int]] = set()
    for each in stores:
        host, _, port = each.rpartition(":")
        if not port.isdecimal():
            continue
        try:
            answers = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
        except OSError:
            continue
        found |= {(str(address[0]), int(port)) for *_, address in answers}
    return found


# ---- processes and their sockets, from the kernel's /proc

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
    """The path of a Unix socket, if it has one."""


@dataclass(frozen=True, slots=True)
class Process:
    pid: int
    name: str
    user: int
    pids: tuple[int, ...]
    """The process's number here and in inner namespaces: a container counts from 1."""

    def sockets(self) -> list[int] | None:
        """Inodes of its open sockets. None if this user may not see them."""
        try:
            return own_sockets(self.pid)
        except OSError:
            return None

    def table(self) -> dict[int, Socket]:
        """All sockets of the process's network namespace, by inode."""
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
    """The process and all its descendants. Empty if there is no such process."""
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
    except OSError:  # it has ended in the meantime
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
    """An address from /proc: words in the machine's byte order, in hexadecimal."""
    address, _, port = text.partition(":")
    words = struct.pack(f"={len(address) // 8}I", *(
        int(address[at : at + 8], 16) for at in range(0, len(address), 8)
    ))  # fmt: skip
    ip = ipaddress.ip_address(words)
    if isinstance(ip, ipaddress.IPv6Address) and ip.ipv4_mapped is not None:
        ip = ip.ipv4_mapped
    return End(str(ip), int(port, 16))
