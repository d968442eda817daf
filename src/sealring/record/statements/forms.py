"""The content of statements: what a worker did in an interval of steps, or what a step outside of
training made. Schemas: docs/interval-v1.schema.json and docs/transformation-v1.schema.json.

Counts and commitments of an interval are cumulative from the moment when a group was formed. So a
missing statement hides nothing from the next one.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final, Literal

from sealring.core.hooks import Share as Share
from sealring.errors import ConfigurationError

# ---- names with digests


DIGESTS: Final = frozenset(
    {
        "certificate",
        "configuration",
        "content",
        "evidence",
        "packages",
        "policy",
        "previous",
        "sha256",
    }
)
"""Fields of statements that hold a SHA-256 digest in lower-case hexadecimal."""
_is_sha256: Final = re.compile(r"[0-9a-f]{64}").fullmatch


@dataclass(frozen=True, slots=True)
class Checked:
    """A value whose fields in `DIGESTS` are checked to be SHA-256 in lower-case hexadecimal."""

    def __post_init__(self) -> None:
        kind = type(self)
        for name in _KNOWN.get(kind) or _digests_of(kind):
            value = getattr(self, name)
            if isinstance(value, str) and not _is_sha256(value):
                raise ConfigurationError(f"{name} is not a SHA-256 digest of 64 digits")


_KNOWN: Final[dict[type, tuple[str, ...]]] = {}
"""The digest fields of each class, kept because an audit makes many thousands of these values."""


def _digests_of(kind: type[Checked]) -> tuple[str, ...]:
    _KNOWN[kind] = tuple(one.name for one in fields(kind) if one.name in DIGESTS)
    return _KNOWN[kind]


@dataclass(frozen=True, slots=True)
class Named(Checked):
    name: str
    sha256: str


@dataclass(frozen=True, slots=True)
class Sha256(Checked):
    sha256: str


@dataclass(frozen=True, slots=True)
class Subject:
    """A name and a digest, as in-toto writes them."""

    name: str
    digest: Sha256


def as_subject(one: Named) -> dict[str, Any]:
    return {"name": one.name, "digest": {"sha256": one.sha256}}


def digest_of_file(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as problem:
        raise ConfigurationError(f"{path} cannot be read: {problem.strerror}") from None


# ---- intervals


INTERVAL_TYPE: Final = "https://sealring.github.io/sealring/interval/v1"
LAST_TIME: Final = 253402300799
"""The last second of the year 9999, where Python's dates end."""


@dataclass(frozen=True, slots=True)
class Attestation(Checked):
    """The attestation that the broker wrote into the worker's certificate."""

    label: str
    evidence: str
    policy: str
    """SHA-256 of the policy by which the broker admitted the worker."""


@dataclass(frozen=True, slots=True)
class Worker(Checked):
    """The holder of the signing certificate. All fields are read from that certificate."""

    job: str
    rank: int
    certificate: str
    attestation: Attestation | None


@dataclass(frozen=True, slots=True)
class Code(Checked):
    script: Named
    packages: str
    """The digest of the sorted lines NAME==VERSION of all installed packages."""
    sealring: str
    """sealring's version."""
    python: str
    torch: str
    container: str | None
    """The image's digest or the machine's measurement, if the worker was given one."""


@dataclass(frozen=True, slots=True)
class DataRange(Checked):
    """Positions of a dataset's global order in one epoch, from `first` to before `end`."""

    name: str
    sha256: str
    """The dataset's own digest, which does not depend on how it is sealed."""
    epoch: int
    first: int
    end: int
    seed: int | None
    """The seed of the order. None if the dataset is read in the order of its shards."""
    share: Share | None
    """None if this rank read the whole range."""

    def __post_init__(self) -> None:
        Checked.__post_init__(self)
        if self.first > self.end:
            raise ConfigurationError("a range of samples ends before it starts")


GroupState = Literal["open", "closed", "failed"]
LinkKind = Literal["collective", "message"]


@dataclass(frozen=True, slots=True)
class GroupEpoch:
    """A group that the worker is a member of. No two groups have the same (name, epoch)."""

    name: str
    epoch: str
    members: list[int]
    """The members' ranks in the job, in the group's order."""
    state: GroupState
    """The state at the end of the interval. The ends of a failed group's links may differ."""


@dataclass(frozen=True, slots=True)
class CollectiveCount:
    """Calls of one kind that this rank has completed since the group was formed."""

    group: str
    epoch: str
    kind: str
    count: int


@dataclass(frozen=True, slots=True)
class Commitment(Checked):
    """A running hash over (context, header, tags) of the data records in one direction."""

    records: int
    sha256: str


@dataclass(frozen=True, slots=True)
class LinkAccount:
    """What went over one link since the group was formed.

    If the `sent` of one end and the `received` of the other name the same number of records, they
    are equal. None means that the tags were not kept, because a GPU wrote them to memory that the
    host does not read. Links without any record are left out.
    """

    group: str
    epoch: str
    peer: int
    """The peer's rank in the job."""
    kind: LinkKind
    sent: Commitment | None
    received: Commitment | None


@dataclass(frozen=True, slots=True)
class CheckpointRef(Checked):
    name: str
    """NAME@VERSION in the vault, or the name that the script gave."""
    step: int
    """The number of steps before it."""
    sha256: str
    """The digest of the manifest."""
    content: str | None
    """A digest of the plaintext's digests and layout. It does not depend on keys, dates and
    signatures."""


@dataclass(frozen=True, slots=True)
class Privacy:
    """Privacy accounting as the script reports it. Numbers are decimal text: JSON's are doubles."""

    mechanism: str
    epsilon: str
    delta: str
    parameters: str
    """JSON text."""


@dataclass(frozen=True, slots=True)
class Interval(Checked):
    run: str
    """The run's name, equal on all ranks. A rank has one chain of statements for each run."""
    sequence: int
    """The number in this rank's chain: 0, 1, 2 ..."""
    previous: str | None
    """SHA-256 of the bytes of the envelope before it. None for the first one."""
    final: bool
    """Whether the chain ends here. Without a final statement the run was cut off."""
    world: int
    first_step: int
    end_step: int
    """The first step after the interval."""
    started: int
    """Seconds since 1970."""
    finished: int
    code: Code
    configuration: str
    data: list[DataRange]
    groups: list[GroupEpoch]
    collectives: list[CollectiveCount]
    links: list[LinkAccount]
    checkpoints_in: list[CheckpointRef]
    checkpoints_out: list[CheckpointRef]
    privacy: Privacy | None

    def __post_init__(self) -> None:
        Checked.__post_init__(self)
        if not (self.first_step <= self.end_step and self.started <= self.finished <= LAST_TIME):
            raise ConfigurationError("the interval ends before it starts, or never")
        if (self.sequence == 0) != (self.previous is None):
            raise ConfigurationError("the first statement of a chain has no previous one")
        if not self.run or len(self.run) > 255 or not self.run.isprintable():
            raise ConfigurationError("a run's name has 1 to 255 printable characters")
        self._check_named_once()

    def _check_named_once(self) -> None:
        """Refuses two entries about the same thing, because readers could choose between them."""
        groups = {(one.name, one.epoch) for one in self.groups}
        counts = {(one.group, one.epoch, one.kind) for one in self.collectives}
        links = {(one.group, one.epoch, one.kind, one.peer) for one in self.links}
        told = len(self.groups), len(self.collectives), len(self.links)
        if (len(groups), len(counts), len(links)) != told:
            raise ConfigurationError("a group, a kind of collective or a link is named twice")
        if not {key[:2] for key in counts | links} <= groups:
            raise ConfigurationError("collectives or links are of a group that is not named")

    @property
    def subjects(self) -> tuple[Named, ...]:
        """What the statement is about: the checkpoints written or, if none, the script that ran."""
        written = tuple(Named(one.name, one.sha256) for one in self.checkpoints_out)
        return written or (self.code.script,)


@dataclass(frozen=True, slots=True)
class IntervalPredicate:
    worker: Worker
    interval: Interval


# ---- transformations


TRANSFORMATION_TYPE: Final = "https://sealring.github.io/sealring/transformation/v1"

TransformationKind = Literal["ingest", "stage", "export", "evaluation"]


@dataclass(frozen=True, slots=True)
class Parameters(Checked):
    """JSON text and its SHA-256. Two stages with the same digest had the same parameters."""

    text: str
    sha256: str

    def __post_init__(self) -> None:
        Checked.__post_init__(self)
        if hashlib.sha256(self.text.encode()).hexdigest() != self.sha256:
            raise ConfigurationError("the digest of the parameters is not that of their text")


def parameters_of(value: Any) -> Parameters:
    """The parameters in one form for equal values: sorted keys, no spaces."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return Parameters(text, hashlib.sha256(text.encode()).hexdigest())


@dataclass(frozen=True, slots=True)
class Transformation:
    kind: TransformationKind
    name: str
    """The name of the stage. With its outputs it is unique within a run's folder."""
    inputs: list[Named]
    outputs: list[Named]
    """Named by the digest under which the next consumer names its input: a dataset's digest, the
    digest of a checkpoint's manifest, or a file's SHA-256."""
    code: list[Named]
    """Source files or functions that ran, with their digests."""
    parameters: Parameters
    started: int
    """Seconds since 1970."""
    finished: int

    def __post_init__(self) -> None:
        if not self.started <= self.finished <= LAST_TIME:
            raise ConfigurationError("the transformation ends before it starts, or never")
        if not self.outputs:
            raise ConfigurationError("a transformation has at least one output")

    @property
    def subjects(self) -> tuple[Named, ...]:
        return tuple(self.outputs)


@dataclass(frozen=True, slots=True)
class TransformationPredicate:
    worker: Worker | None
    """The worker that signed. None if an owner's key signed."""
    transformation: Transformation
