"""Signed statements: in-toto statements v1 in DSSE envelopes.

    interval/v1         what a worker did over an interval of steps (forms)
    transformation/v1   what an ingest, a stage, an export or an evaluation made (forms)

A worker signs with the key of its certificate. `worker` in the predicate repeats what that
certificate says, and a reader checks that both agree. An owner signs a transformation with a key
that readers get separately from the statement.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)

from sealring.core.hooks import evidence_judge
from sealring.core.identity import verify
from sealring.core.identity.certificates import ATTESTATION_OID, claims_of
from sealring.core.identity.credentials import Credentials
from sealring.core.identity.loading import certificate_from_pem, public_key_from_pem
from sealring.core.identity.process import read_private, read_secret_file
from sealring.core.identity.verification import VerifiedPeer, is_issued_by
from sealring.errors import ConfigurationError, ForgedStatement, MalformedStatement
from sealring.formats.files import read_public, write_private, write_public
from sealring.formats.log.notes import Signer
from sealring.formats.signed import key_id, parse_envelope, read_statement, seal_envelope
from sealring.formats.strict import strictly
from sealring.limits import MAX_WORLD
from sealring.record.statements.forms import (
    INTERVAL_TYPE,
    TRANSFORMATION_TYPE,
    Attestation,
    Interval,
    IntervalPredicate,
    Named,
    Subject,
    Transformation,
    TransformationPredicate,
    Worker,
    as_subject,
)

STATEMENT_TYPE: Final = "https://in-toto.io/Statement/v1"
_PREDICATES: Final[dict[str, Any]] = {
    INTERVAL_TYPE: IntervalPredicate,
    TRANSFORMATION_TYPE: TransformationPredicate,
}


@dataclass(frozen=True, slots=True)
class _Head:
    """A statement without its predicate."""

    _type: str
    subject: list[Subject]
    predicateType: str  # noqa: N815


@dataclass(frozen=True, slots=True)
class VerifiedStatement:
    """A statement whose signature and signer were verified. `verify_statement` makes it."""

    digest: str
    """SHA-256 of the envelope's bytes, which the next statement names as `previous`."""
    signer: VerifiedPeer | str
    """The worker that signed, or the key id (SHA-256 of the public key) of the owner that did."""
    worker: Worker | None
    subjects: tuple[Named, ...]
    content: Interval | Transformation
    payload: bytes
    """The signed bytes of the statement itself."""
    certificate: x509.Certificate | None
    """The worker's certificate. None if an owner signed."""


def of_another_run(found: VerifiedStatement, run: str, job: str) -> str:
    """The other run or job that a statement belongs to. Empty if it belongs to this one."""
    if found.worker is not None and found.worker.job != job:
        return f"of job {found.worker.job}"
    if isinstance(found.content, Interval) and found.content.run != run:
        return f"of run {found.content.run}"
    return ""


def statement_digest(envelope: bytes) -> str:
    return hashlib.sha256(envelope).hexdigest()


def sign_statement(
    content: Interval | Transformation, signer: Credentials | Ed25519PrivateKey
) -> bytes:
    """Signs a statement and returns its envelope. The content names the subjects."""
    worker = worker_of(signer.certificate) if isinstance(signer, Credentials) else None
    predicate: IntervalPredicate | TransformationPredicate
    if isinstance(content, Transformation):
        kind, predicate = TRANSFORMATION_TYPE, TransformationPredicate(worker, content)
    elif worker is not None:
        kind, predicate = INTERVAL_TYPE, IntervalPredicate(worker, content)
    else:
        raise ConfigurationError("an interval is signed by the worker that it is about")
    statement = {
        "_type": STATEMENT_TYPE,
        "subject": [as_subject(one) for one in content.subjects],
        "predicateType": kind,
        "predicate": asdict(predicate),
    }
    return seal(json.dumps(statement, separators=(",", ":")).encode(), signer)


def seal(payload: bytes, signer: Credentials | Ed25519PrivateKey) -> bytes:
    """Signs a payload. A worker's envelope carries its certificate; an owner's does not."""
    if isinstance(signer, Credentials):
        pem = signer.certificate.public_bytes(Encoding.PEM)
        return seal_envelope(payload, signer.private_key, pem)
    return seal_envelope(payload, signer)


@dataclass(frozen=True, slots=True)
class OpenedEnvelope:
    """A payload and its signer: a certificate that an authority issued, or an owner's key."""

    payload: bytes
    signer: x509.Certificate | Ed25519PublicKey


def open_envelope(
    data: bytes,
    authorities: Sequence[x509.Certificate],
    owners: Sequence[Ed25519PublicKey] = (),
) -> OpenedEnvelope:
    """Checks the signature, and that an authority issued the certificate or that an owner signed.

    The payload is not read before. The caller checks the dates.
    """
    envelope = parse_envelope(data)
    signer: x509.Certificate | Ed25519PublicKey
    if envelope.certificate is not None:
        signer = _certificate(envelope.certificate)
        if not is_issued_by(signer, tuple(authorities)):
            raise ForgedStatement("the statement's certificate is not of an authority to believe")
        envelope.check(signer.public_key())
    else:
        known = {key_id(owner): owner for owner in owners}
        if envelope.keyid not in known:
            raise ForgedStatement("the statement is signed by a key that is not an owner's")
        signer = known[envelope.keyid]
        envelope.check(signer)
    return OpenedEnvelope(envelope.payload, signer)


@lru_cache(maxsize=1024)
def _certificate(pem: bytes) -> x509.Certificate:
    """A certificate, parsed only once, because many statements carry the same one."""
    refusal = MalformedStatement("the statement's certificate cannot be read")
    found = certificate_from_pem(pem, refusal)
    if found.public_bytes(Encoding.PEM) != pem:
        raise MalformedStatement("the statement's certificate has something beside it")
    return found


def verify_statement(
    envelope: bytes,
    authorities: Sequence[x509.Certificate],
    now: datetime | None = None,
    *,
    owners: Sequence[Ed25519PublicKey] = (),
) -> VerifiedStatement:
    """Checks the signature, the certificate as of the statement's end, and the signer's name.

    With `now`, the certificate must also be valid at that time. A log's owner asks for that when a
    statement arrives, so that a worker cannot add to the past with an old certificate. `owners` are
    the keys that may sign transformations without a certificate.
    """
    opened = open_envelope(envelope, authorities, owners)
    subjects, predicate = parse_statement(opened.payload)
    content = (
        predicate.interval if isinstance(predicate, IntervalPredicate) else predicate.transformation
    )
    if subjects != content.subjects:
        raise ForgedStatement("the statement's subjects are not those that its predicate names")
    digest, says = statement_digest(envelope), predicate.worker
    if isinstance(opened.signer, Ed25519PublicKey):
        if isinstance(content, Interval) or says is not None:
            raise ForgedStatement("an owner's key signed a statement that speaks for a worker")
        owner = key_id(opened.signer)
        return VerifiedStatement(digest, owner, None, subjects, content, opened.payload, None)
    finished = datetime.fromtimestamp(content.finished, UTC)
    for moment in (finished, now) if now is not None else (finished,):
        holder = _holder(opened.signer, authorities, moment)
    if says != worker_of(opened.signer):
        whom = f"rank {says.rank} of {says.job[:80]!r}" if says is not None else "no worker"
        raise ForgedStatement(
            f"the statement is about {whom}, and its certificate is of rank {holder.rank} of "
            f"{holder.job}, or is another one of it, or says something else of its evidence"
        )
    if isinstance(content, Interval) and not (
        holder.rank < content.world and holder.world in (None, content.world)
    ):
        raise ForgedStatement(
            f"the statement of rank {holder.rank} names a world of {content.world}, and its "
            f"certificate is for one of {holder.world}"
        )
    return VerifiedStatement(digest, holder, says, subjects, content, opened.payload, opened.signer)


@lru_cache(maxsize=1024)
def worker_of(certificate: x509.Certificate) -> Worker:
    """What a statement says about its signer. The caller must have checked the issuer."""
    with _of_a_worker():
        name = claims_of(certificate).name
        attestation = _attestation(certificate)
    fingerprint = certificate.fingerprint(hashes.SHA256()).hex()
    return Worker(name.job, name.rank, fingerprint, attestation)


@contextlib.contextmanager
def _of_a_worker() -> Iterator[None]:
    try:
        yield
    except ValueError as problem:
        raise ForgedStatement(
            f"the statement's certificate is not a sealring worker's: {problem}"
        ) from None


def _attestation(certificate: x509.Certificate) -> Attestation | None:
    try:
        certificate.extensions.get_extension_for_oid(ATTESTATION_OID)
    except x509.ExtensionNotFound:
        return None
    # Looked up only here: verifiers take long to import, and most jobs have no broker.
    claimed = evidence_judge.one().claims_in(certificate)
    assert claimed is not None
    return Attestation(claimed.label, claimed.evidence_digest, claimed.policy_digest)


def _holder(
    certificate: x509.Certificate, authorities: Sequence[x509.Certificate], moment: datetime
) -> VerifiedPeer:
    with _of_a_worker():
        claims = claims_of(certificate)
    return verify(
        certificate,
        authorities,
        job=claims.name.job,
        world=claims.world or MAX_WORLD,
        rank=None,
        where="the statement",
        now=moment,
    )


def parse_statement(
    payload: bytes,
) -> tuple[tuple[Named, ...], IntervalPredicate | TransformationPredicate]:
    """Reads a statement strictly. The caller must have checked the signature."""
    value = read_statement(payload)
    stated = value.pop("predicate", None) if isinstance(value, dict) else None
    head = strictly(_Head, value, "the payload", "statement", MalformedStatement)
    if head._type != STATEMENT_TYPE or head.predicateType not in _PREDICATES:
        raise MalformedStatement(
            f"the statement is of another type or version than {' and '.join(_PREDICATES)}"
        )
    if not head.subject:
        raise MalformedStatement("the statement has no subject")
    predicate: IntervalPredicate | TransformationPredicate = strictly(
        _PREDICATES[head.predicateType], stated, "predicate", "statement", MalformedStatement
    )
    return tuple(Named(one.name, one.digest.sha256) for one in head.subject), predicate


# ---- key files: PEM for owners, keys of signed notes for logs and witnesses; all are Ed25519


def create_owner(path: Path) -> Path:
    """Writes a new key (mode 0600) and its public half to `path`.pub, whose path it returns."""
    key = Ed25519PrivateKey.generate()
    write_private(path, key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    public = path.with_name(f"{path.name}.pub")
    spki = PublicFormat.SubjectPublicKeyInfo
    write_public(public, key.public_key().public_bytes(Encoding.PEM, spki))
    return public


def read_owner_key(path: Path) -> Ed25519PrivateKey:
    content = read_secret_file(path, "the owner's key", ConfigurationError)
    try:
        key = load_pem_private_key(memoryview(content), password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, Ed25519PrivateKey):
        raise ConfigurationError(f"{path} is not an unencrypted PEM file of an Ed25519 key")
    return key


def read_owner(path: Path) -> Ed25519PublicKey:
    content = read_public(path, "the owner's public key", ConfigurationError)
    refusal = ConfigurationError(f"{path} is not a PEM file of an Ed25519 public key")
    key = public_key_from_pem(content, refusal)
    if not isinstance(key, Ed25519PublicKey):
        raise refusal
    return key


def read_signer(path: Path) -> Signer:
    """Reads a signer key from a file that no other user can read."""
    content = read_private(path, "the signer key", ConfigurationError)
    return Signer.parse(content.decode("utf-8", "replace").strip())


def write_signer(path: Path, signer: Signer) -> None:
    write_private(path, (signer.encode() + "\n").encode())


def write_key_pair(path: Path, signer: Signer) -> Path:
    """Writes a new signer key, and beside it its verifier key NAME.vkey, whose path it returns.

    Nothing is overwritten: the verifier key is written only after a new signer key was.
    """
    beside = path.with_name(f"{path.name.removesuffix('.key')}.vkey")
    if os.path.lexists(beside):
        raise ConfigurationError(
            f"{beside} is there already and will not be overwritten: move it away first"
        )
    write_signer(path, signer)
    write_public(beside, f"{signer.verifier.encode()}\n".encode())
    return beside
