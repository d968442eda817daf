"""What statements say: what a worker did over an interval of steps, and what a step outside
training made. Schemas: docs/interval-v1.schema.json and docs/transformation-v1.schema.json.

Counts and commitments of an interval are cumulative: they run from the moment when a group was
formed. So a statement that is missing hides nothing from the next one.
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
"""Fields of statements that are SHA-256 digests in lower-case hexadecimal."""
_is_sha256: Final = re.compile(r"[0-9a-f]{64}").fullmatch


@dataclass(frozen=True, slots=True)
class Checked:
    """Its digests are SHA-256 in lower-case hexadecimal."""

    def __post_init__(self) -> None:
        kind = type(self)
        for name in _KNOWN.get(kind) or _digests_of(kind):
            value = getattr(self, name)
            if isinstance(value, str) and not _is_sha256(value):
                raise ConfigurationError(f"{name} is not a SHA-256 digest of 64 digits")


_KNOWN: Final[dict[type, tuple[str, ...]]] = {}
"""Of each class its fields that are digests: an audit makes many thousands of these values."""


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
"""The last second of the year 9999: dates end there."""


@dataclass(frozen=True, slots=True)
class Attestation(Checked):
    """As the broker wrote it into the worker's certificate."""

    label: str
    evidence: str
    policy: str
    """SHA-256 of the policy by which the broker admitted the worker."""


@dataclass(frozen=True, slots=True)
class Worker(Checked):
    """The holder of the certificate that signed; all of it is read from that certificate."""

    job: str
    rank: int
    certificate: str
    attestation: Attestation | None


@dataclass(frozen=True, slots=True)
class Code(Checked):
    script: Named
    packages: str
    """Of the sorted lines NAME==VERSION of all installed packages (`evidence/packages.txt`)."""
    sealring: str
    """Its version."""
    python: str
    torch: str
    container: str | None
    """The image's digest or the machine's measurement, where the worker was told one."""


@dataclass(frozen=True, slots=True)
class DataRange(Checked):
    """Positions of a dataset's global order in one epoch, from `first` up to and without `end`."""

    name: str
    sha256: str
    """The dataset's own digest, which does not depend on how it is sealed."""
    epoch: int
    first: int
    end: int
    seed: int | None
    """Of the order; None where the dataset is read in the order of its shards."""
    share: Share | None
    """None: this rank read the whole range."""

    def __post_init__(self) -> None:
        Checked.__post_init__(self)
        if self.first > self.end:
            raise ConfigurationError("a range of samples ends before it starts")


GroupState = Literal["open", "closed", "failed"]
LinkKind = Literal["collective", "message"]


@dataclass(frozen=True, slots=True)
class GroupEpoch:
    """A group of which the worker is a member. No two groups have the same (name, epoch)."""

    name: str
    epoch: str
    members: list[int]
    """Ranks of the job, in the group's order."""
    state: GroupState
    """At the end of the interval. The two ends of a failed group's links may differ."""


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

    Where the same number of records is named, the `sent` of one end equals the `received` of the
    other. None: not kept, because a GPU wrote the tags to memory that the host does not read.
    Links without any record are left out.
    """

    group: str
    epoch: str
    peer: int
    """Its rank in the job."""
    kind: LinkKind
    sent: Commitment | None
    received: Commitment | None


@dataclass(frozen=True, slots=True)
class CheckpointRef(Checked):
    name: str
    """NAME@VERSION in the vault, or the name that the script gave."""
    step: int
    """How many steps it has behind it."""
    sha256: str
    """Of the manifest."""
    content: str | None
    """Of the plaintext's digests and layout: does not depend on keys, dates and signatures."""


@dataclass(frozen=True, slots=True)
class Privacy:
    """Accounting as the script reports it. Numbers are decimal text: JSON's are doubles."""

    mechanism: str
    epsilon: str
    delta: str
    parameters: str
    """JSON text."""


@dataclass(frozen=True, slots=True)
class Interval(Checked):
    run: str
    """Names the run; the same on all ranks. A rank has one chain of statements for each run."""
    sequence: int
    """0, 1, 2 ... in this rank's chain."""
    previous: str | None
    """SHA-256 of the envelope before it, byte for byte; None for the first one."""
    final: bool
    """The chain ends here. Without a final statement the run was cut off."""
    world: int
    first_step: int
    end_step: int
    """The first step that is not part of it."""
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
        """Two accounts of one thing in one statement would let each reader take another."""
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
        """What the statement is about: the checkpoints written, or else the script that ran."""
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
    """JSON text, and its SHA-256: two stages with the same digest had the same parameters."""

    text: str
    sha256: str

    def __post_init__(self) -> None:
        Checked.__post_init__(self)
        if hashlib.sha256(self.text.encode()).hexdigest() != self.sha256:
            raise ConfigurationError("the digest of the parameters is not that of their text")


def parameters_of(value: Any) -> Parameters:
    """In one form for equal values: sorted keys, no spaces."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return Parameters(text, hashlib.sha256(text.encode()).hexdigest())


@dataclass(frozen=True, slots=True)
class Transformation:
    kind: TransformationKind
    name: str
    """Of the stage; unique within a run's folder together with its outputs."""
    inputs: list[Named]
    outputs: list[Named]
    """A digest here is the same one under which the next consumer names its input: a dataset's
    digest, a checkpoint's manifest digest, a file's SHA-256."""
    code: list[Named]
    """Source files or functions that ran, and their digests."""
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
    """The signer, where it is a worker; None where an owner's key signed."""
    transformation: Transformation
