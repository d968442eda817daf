"""A worker's answer, as plain values that are read back strictly."""

from __future__ import annotations

import dataclasses
import json
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Generic, Literal, TypeVar

from sealring.core.identity.process import peer_of
from sealring.errors import ConfigurationError
from sealring.formats.strict import read_object, strictly
from sealring.observe.directory import PrivateDirectory

FORMAT: Final = 1
MOST_BYTES: Final = 4 << 20
"""The most bytes of an answer."""

Answer = TypeVar("Answer", "WorkerStatus", "SocketStatus")


@dataclass(frozen=True, slots=True)
class ErrorStatus:
    text: str
    """The class and the text of the exception, shortened."""
    age_s: float


@dataclass(frozen=True, slots=True)
class PeerStatus:
    rank: int
    """The rank in the job."""
    host: str
    transport: Literal["tcp", "shm"]
    waited_s: float
    """The total time that this worker slept while it needed a record from the peer."""


@dataclass(frozen=True, slots=True)
class GroupStatus:
    id: str
    name: str
    rank: int
    """The rank within the group."""
    size: int
    state: Literal["open", "failed", "closed"]
    age_s: float
    sealed_bytes: int
    opened_bytes: int
    gpu_wire: str | None
    """None if no GPU tensor was used so far."""
    peers: list[PeerStatus]
    """The peers that were waited for longest come first. Of a large group, only these are shown."""
    last_error: ErrorStatus | None


@dataclass(frozen=True, slots=True)
class Count:
    """The sum over all groups of the same name."""

    metric: str
    """The plain name of one of metrics.COUNTERS."""
    group: str
    label: str
    """What the metric distinguishes: a peer's rank, an operation, an error's class. `all` if there
    are too many."""
    value: float


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    job: str
    rank: int
    size: int
    """The number of ranks in the job."""
    host: str
    pid: int
    version: str
    """sealring's version."""
    time_s: float
    """Seconds since 1970, by the worker's clock."""
    monotonic_ns: int
    identity: Literal["secret", "certificate", "broker"]
    certificate_ends_s: float
    """Seconds since 1970."""
    sealed_only: bool
    groups_open: int
    groups: list[GroupStatus]
    """The default group, then the newest. At most gather.MOST_GROUPS."""
    counts: list[Count]

    @property
    def sealed_bytes(self) -> int:
        return self._total("sealed_bytes")

    @property
    def opened_bytes(self) -> int:
        return self._total("opened_bytes")

    def _total(self, metric: str) -> int:
        return int(sum(each.value for each in self.counts if each.metric == metric))

    @property
    def last_error(self) -> ErrorStatus | None:
        known = [each.last_error for each in self.groups if each.last_error is not None]
        return min(known, key=lambda error: error.age_s, default=None)


@dataclass(frozen=True, slots=True)
class StatusSocket:
    inode: int
    group: str
    peer: int
    transport: Literal["tcp", "shm"]


@dataclass(frozen=True, slots=True)
class TorchGroup:
    name: str
    backend: str
    size: int
    sealed: bool


@dataclass(frozen=True, slots=True)
class SocketStatus:
    """Which of a worker's sockets are links of its groups."""

    pid: int
    own: list[int]
    """Inodes of all sockets that the process has open, as it lists them itself."""
    links: list[StatusSocket]
    links_left_out: int
    setting_up: list[int]
    """Inodes of the sockets on which links are being made, under TLS or one of its sessions."""
    store: str | None
    """HOST:PORT of torch's store."""
    torch_groups: list[TorchGroup]


def encode(kind: str, answer: WorkerStatus | SocketStatus) -> bytes:
    """The answer as one line, so that a reader knows where it ends."""
    head = {"sealring": kind, "format": FORMAT}
    text = json.dumps({**head, **dataclasses.asdict(answer)}, separators=(",", ":"))
    return text.encode() + b"\n"


def decode(wanted: type[Answer], kind: str, line: bytes, where: str) -> Answer:
    refusal = ConfigurationError(f"{where} did not answer as a worker does")
    document = read_object(line, refusal)
    if document.pop("sealring", None) != kind:
        raise refusal
    if (form := document.pop("format", None)) != FORMAT:
        raise ConfigurationError(
            f"{where} answers in format {form!r}, and this sealring reads {FORMAT}: use the "
            "sealring that the worker uses"
        )
    return strictly(wanted, document, where, "worker's status")


# ---- asks all workers of a directory at once, each for a bounded time


SECONDS: Final = 3.0
_AT_ONCE: Final = 16
_KINDS: Final = {WorkerStatus: "status", SocketStatus: "sockets"}


@dataclass(slots=True)
class Reading(Generic[Answer]):
    answers: list[Answer] = field(default_factory=list)
    stale: list[str] = field(default_factory=list)
    """Sockets of workers that ended without removing them."""
    silent: dict[str, str] = field(default_factory=dict)
    """Sockets whose worker gave no answer, with the reason."""


def read_all(
    wanted: type[Answer],
    path: Path,
    *,
    user: int | None = None,
    only: Callable[[str], bool] = lambda name: True,
) -> Reading[Answer]:
    """The answers of all workers that have a socket. Empty if there is no directory."""
    reading: Reading[Answer] = Reading()
    try:
        directory = PrivateDirectory(path, user=user)
    except FileNotFoundError:
        return reading

    def add(name: str) -> None:
        try:
            reading.answers.append(ask(wanted, directory, name))
        except (ConnectionRefusedError, FileNotFoundError):  # no listener, or just ended
            reading.stale.append(name)
        except (OSError, ConfigurationError) as problem:
            reading.silent[name] = str(problem)

    with closing(directory), ThreadPoolExecutor(_AT_ONCE) as pool:
        list(pool.map(add, filter(only, directory.sockets())))
    return reading


def ask(wanted: type[Answer], directory: PrivateDirectory, name: str) -> Answer:
    deadline = time.monotonic() + SECONDS
    kind = _KINDS[wanted]
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        _connect(sock, directory.address(name), deadline)
        worker = peer_of(sock)
        if worker.uid != directory.user:
            raise ConfigurationError(f"{name} is a socket of user {worker.uid}")
        sock.sendall(f"{kind}\n".encode())
        line = _read_line(sock, deadline)
    return decode(wanted, kind, line, f"the worker at {name}")


def _connect(sock: socket.socket, address: str, deadline: float) -> None:
    while True:
        sock.settimeout(_left(deadline))
        try:
            sock.connect(address)
            return
        except BlockingIOError:  # other readers are waiting there
            time.sleep(0.02)


def _read_line(sock: socket.socket, deadline: float) -> bytes:
    parts: list[bytes] = []
    size = 0
    while not (parts and parts[-1].endswith(b"\n")):
        sock.settimeout(_left(deadline))
        part = sock.recv(1 << 16)
        if not part:
            raise ConfigurationError("the worker closed the connection without an answer")
        parts.append(part)
        size += len(part)
        if size > MOST_BYTES:
            raise ConfigurationError(f"the worker's answer is longer than {MOST_BYTES} bytes")
    return b"".join(parts)


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError(f"no answer within {SECONDS:.0f} s")
    return left
