"""What a worker answers, as plain values that are read back strictly."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Final, Literal, TypeVar

from sealring.errors import ConfigurationError
from sealring.formats.strict import read_object, strictly

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
    answer: Answer = strictly(wanted, document, where, "worker's status")
    return answer
