"""What one worker vouches for over one interval: an in-toto statement v1 in a DSSE envelope.

The predicate is docs/interval-v1.schema.json. The signer fills in `worker` from its certificate;
who reads a statement checks that both agree. The certificate's digest covers what the broker wrote
into it: the evidence, and the policy that admitted the worker.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any, Final, TypeVar

from cryptography import x509

from sealring.errors import ConfigurationError, ForgedStatement, MalformedStatement
from sealring.identity import verify
from sealring.identity.certificates import claims_of
from sealring.identity.credentials import Credentials
from sealring.identity.verification import VerifiedPeer
from sealring.limits import MAX_WORLD
from sealring.provenance.envelopes import open_envelope, read_json, seal_envelope
from sealring.strict import strictly

STATEMENT_TYPE: Final = "https://in-toto.io/Statement/v1"
PREDICATE_TYPE: Final = "https://sealring.github.io/sealring/interval/v1"
T = TypeVar("T")
_SHA256: Final = re.compile(r"[0-9a-f]{64}")
_DIGESTS: Final = ("sha256", "certificate", "configuration", "sent", "received")
_LAST_TIME: Final = 253402300799
"""The last second of the year 9999: dates end there."""


@dataclass(frozen=True, slots=True)
class _Checked:
    """Its digests are SHA-256 in lower-case hexadecimal."""

    def __post_init__(self) -> None:
        for name in _DIGESTS:
            value = getattr(self, name, None)
            if isinstance(value, str) and not _SHA256.fullmatch(value):
                raise ConfigurationError(f"{name} is not a SHA-256 digest of 64 digits")


@dataclass(frozen=True, slots=True)
class Named(_Checked):
    name: str
    sha256: str


@dataclass(frozen=True, slots=True)
class DataRange:
    """Samples of a vault, from `first` up to and without `end`."""

    vault: str
    first: int
    end: int


@dataclass(frozen=True, slots=True)
class GroupEpoch:
    name: str
    epoch: int
    members: list[int]


@dataclass(frozen=True, slots=True)
class CollectiveCount:
    kind: str
    count: int


@dataclass(frozen=True, slots=True)
class LinkCommitment(_Checked):
    """Running hashes over (context, tag) of all records, so that both ends' accounts must agree."""

    peer: int
    sent: str
    received: str


@dataclass(frozen=True, slots=True)
class Interval(_Checked):
    first_step: int
    end_step: int
    started: int
    """Seconds since 1970."""
    finished: int
    code: list[Named]
    configuration: str
    data: list[DataRange]
    groups: list[GroupEpoch]
    collectives: list[CollectiveCount]
    links: list[LinkCommitment]
    checkpoints_in: list[Named]
    checkpoints_out: list[Named]

    def __post_init__(self) -> None:
        _Checked.__post_init__(self)
        if not (self.first_step <= self.end_step and self.started <= self.finished <= _LAST_TIME):
            raise ConfigurationError("the interval ends before it starts, or never")


@dataclass(frozen=True, slots=True)
class Worker(_Checked):
    job: str
    rank: int
    certificate: str


@dataclass(frozen=True, slots=True)
class Predicate:
    worker: Worker
    interval: Interval


@dataclass(frozen=True, slots=True)
class VerifiedStatement:
    """`verify_statement` makes it."""

    worker: VerifiedPeer
    subjects: tuple[Named, ...]
    interval: Interval


def parse_interval(data: bytes) -> Interval:
    return _typed(Interval, read_json(data), "interval")


def sign_statement(
    interval: Interval, subjects: Sequence[Named], credentials: Credentials
) -> bytes:
    """The envelope, as bytes for a log."""
    if not subjects:
        raise ConfigurationError("a statement is about something: name a subject")
    worker = Worker(credentials.job, credentials.rank, credentials.fingerprint.hex())
    statement = {
        "_type": STATEMENT_TYPE,
        "subject": [{"name": one.name, "digest": {"sha256": one.sha256}} for one in subjects],
        "predicateType": PREDICATE_TYPE,
        "predicate": asdict(Predicate(worker, interval)),
    }
    return seal_envelope(json.dumps(statement, separators=(",", ":")).encode(), credentials)


def verify_statement(
    envelope: bytes, authorities: Sequence[x509.Certificate], now: datetime | None = None
) -> VerifiedStatement:
    """Checks the signature, the certificate as of the interval's end, and who it says it is.

    With `now`, the certificate must be valid at that time as well: a log's owner asks for that
    when a statement arrives, so that a worker cannot add to the past with a certificate of then.
    """
    opened = open_envelope(envelope, authorities)
    subjects, predicate = _parse_statement(opened.payload)
    finished = datetime.fromtimestamp(predicate.interval.finished, UTC)
    for moment in (finished, now) if now is not None else (finished,):
        worker = _holder(opened.certificate, authorities, moment)
    says = predicate.worker
    if (says.job, says.rank, says.certificate) != (
        worker.job,
        worker.rank,
        worker.fingerprint.hex(),
    ):
        raise ForgedStatement(
            f"the statement is about rank {says.rank} of {says.job[:80]!r}, and its certificate is "
            f"of rank {worker.rank} of {worker.job}, or is another one of it"
        )
    return VerifiedStatement(worker, subjects, predicate.interval)


def _holder(
    certificate: x509.Certificate, authorities: Sequence[x509.Certificate], moment: datetime
) -> VerifiedPeer:
    try:
        claims = claims_of(certificate)
    except ValueError as problem:
        raise ForgedStatement(
            f"the statement's certificate is not a sealring worker's: {problem}"
        ) from None
    return verify(
        certificate,
        authorities,
        job=claims.name.job,
        world=claims.world or MAX_WORLD,
        rank=None,
        where="the statement",
        now=moment,
    )


def _parse_statement(payload: bytes) -> tuple[tuple[Named, ...], Predicate]:
    value = read_json(payload)
    if not isinstance(value, dict) or value.keys() != {
        "_type",
        "subject",
        "predicateType",
        "predicate",
    }:
        raise MalformedStatement("the payload is not an in-toto statement with these four fields")
    if value["_type"] != STATEMENT_TYPE or value["predicateType"] != PREDICATE_TYPE:
        raise MalformedStatement(
            f"the statement is of another type or version than {PREDICATE_TYPE}"
        )
    if not isinstance(value["subject"], list) or not value["subject"]:
        raise MalformedStatement("the statement has no subject")
    subjects = tuple(_subject(each) for each in value["subject"])
    return subjects, _typed(Predicate, value["predicate"], "predicate")


def _subject(value: Any) -> Named:
    if not isinstance(value, dict) or value.keys() != {"name", "digest"}:
        raise MalformedStatement("a subject has a name and a digest")
    digest = value["digest"]
    if not isinstance(digest, dict) or digest.keys() != {"sha256"}:
        raise MalformedStatement("a subject's digest is its sha256")
    return _typed(Named, {"name": value["name"], "sha256": digest["sha256"]}, "subject")


def _typed(wanted: type[T], value: Any, where: str) -> T:
    try:
        found: T = strictly(wanted, value, where, "statement")
        return found
    except ConfigurationError as problem:
        raise MalformedStatement(str(problem)) from None
