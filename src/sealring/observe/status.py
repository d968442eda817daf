"""What a worker answers, as plain values that are read back strictly."""

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
"""No answer is longer."""

Answer = TypeVar("Answer", "WorkerStatus", "SocketStatus")


@dataclass(frozen=True, slots=True)
class ErrorStatus:
    text: str
    """The exception's class and text, shortened."""
    age_s: float


@dataclass(frozen=True, slots=True)
class PeerStatus:
    rank: int
    """In the job."""
    host: str
    transport: Literal["tcp", "shm"]
    waited_s: float
    """How long this worker slept while the peer owed it a record, in all."""


@dataclass(frozen=True, slots=True)
class GroupStatus:
    id: str
    name: str
    rank: int
    """Within the group."""
    size: int
    state: Literal["open", "failed", "closed"]
    age_s: float
    sealed_bytes: int
    opened_bytes: int
    gpu_wire: str | None
    """None where no tensor of a GPU has come yet."""
    peers: list[PeerStatus]
    """Those that were waited for longest come first; of a large group only these."""
    last_error: ErrorStatus | None


@dataclass(frozen=True, slots=True)
class Count:
    """The sum over all groups of one name, one after the other."""

    metric: str
    """The plain name of one of recorder.metrics.COUNTERS."""
    group: str
    label: str
    """What the metric counts apart: a peer's rank, an operation, an error's class. `all` where
    these are too many."""
    value: float


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    job: str
    rank: int
    size: int
    """How many ranks the job has."""
    host: str
    pid: int
    version: str
    """Of sealring."""
    time_s: float
    """Since 1970, by the worker's clock."""
    monotonic_ns: int
    identity: Literal["secret", "certificate", "broker"]
    certificate_ends_s: float
    """Since 1970."""
    sealed_only: bool
    groups_open: int
    groups: list[GroupStatus]
    """The default group, then the newest; at most gather.MOST_GROUPS."""
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
class LinkSocket:
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
    """Inodes of all sockets that the process has open, as it sees them itself."""
    links: list[LinkSocket]
    links_left_out: int
    setting_up: list[int]
    """Inodes of the sockets on which links are being made, under TLS or a session of it."""
    store: str | None
    """HOST:PORT of torch's store."""
    torch_groups: list[TorchGroup]


def encode(kind: str, answer: WorkerStatus | SocketStatus) -> bytes:
    """One line, so that its end is known without the connection's."""
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


# ---- questions to all workers of a directory, at once, for a bounded time each


SECONDS: Final = 3.0
_AT_ONCE: Final = 16
_KINDS: Final = {WorkerStatus: "status", SocketStatus: "sockets"}


@dataclass(slots=True)
class Reading(Generic[Answer]):
    answers: list[Answer] = field(default_factory=list)
    stale: list[str] = field(default_factory=list)
    """Sockets of workers that ended without removing them."""
    silent: dict[str, str] = field(default_factory=dict)
    """Sockets whose worker gave no answer, and why."""


def read_all(
    wanted: type[Answer],
    path: Path,
    *,
    user: int | None = None,
    only: Callable[[str], bool] = lambda name: True,
) -> Reading[Answer]:
    """The answers of all workers whose socket is there; none where there is no directory."""
    reading: Reading[Answer] = Reading()
    try:
        directory = PrivateDirectory(path, user=user)
    except FileNotFoundError:
        return reading

    def add(name: str) -> None:
        try:
            reading.answers.append(ask(wanted, directory, name))
        except (ConnectionRefusedError, FileNotFoundError):  # no listener, or it has just ended
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
        except BlockingIOError:  # other readers wait there already
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
