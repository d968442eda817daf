"""This worker's credentials, read from its environment. There are three kinds:

    a job secret        SEALRING_SECRET or SEALRING_SECRET_FILE [, SEALRING_JOB]
    an operator's CA    SEALRING_CERTIFICATE, SEALRING_KEY, SEALRING_AUTHORITY [, SEALRING_JOB]
    a broker            SEALRING_BROKER, SEALRING_AUTHORITY, SEALRING_POLICY, SEALRING_JOB

In SEALRING_CERTIFICATE and SEALRING_KEY, `{rank}` stands for the worker's rank, so that all workers
can have the same environment. attest/broker/enrolment.py holds and renews a broker's certificate. A
worker cannot run without credentials.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final, Protocol

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from sealring import _native
from sealring.core.identity.certificates import CertificateClaims, claims_of
from sealring.core.identity.kept_key import KeptKey, PrivateKey
from sealring.core.identity.loading import certificates_from_pem
from sealring.core.identity.names import WorkerName, check_job
from sealring.core.identity.process import read_secret_file
from sealring.core.identity.secret import derive_authority, read_secret
from sealring.core.identity.verification import fingerprint_of, is_issued_by
from sealring.core.settings import AUTHORITY, BROKER, CERTIFICATE, JOB, KEY
from sealring.errors import BadCredential, ConfigurationError
from sealring.formats.files import read_public

PEER_EVIDENCE: Final = "peer_evidence"
"""The name of a group setting that exists only if a broker issued the certificates."""
_RENEWAL = timedelta(hours=1)
"""A certificate that expires within this time is replaced before it is used again."""
_FILES = tuple(row.name for row in (CERTIFICATE, KEY, AUTHORITY))


class JudgedPeer(Protocol):
    """A peer whose certificate the policy admits."""

    @property
    def admission(self) -> Admission: ...
    def check_evidence(self, evidence: bytes, who: str) -> None:
        """Raises unless the evidence belongs to the certificate's key and the policy admits it."""


class Admission(Protocol):
    """A worker's policy: judges peers beyond the validity of their certificates."""

    @property
    def evidence(self) -> bytes:
        """This worker's own evidence, to show to peers."""

    @property
    def evidence_limit(self) -> int:
        """The most bytes of evidence to accept from a peer; 0 if peers show no evidence."""

    def check_certificate(
        self, certificate: x509.Certificate, name: WorkerName, who: str
    ) -> JudgedPeer:
        """Raises if the worker was revoked, or if the policy does not admit what it attested."""


@dataclass(frozen=True, slots=True)
class Credentials:
    """A worker's certificate and key, and the authorities that it trusts. Printing it is safe."""

    job: str
    rank: int
    certificate: x509.Certificate
    authorities: tuple[x509.Certificate, ...]
    key: KeptKey = field(repr=False, compare=False)
    """The certificate's private key."""
    admission: Admission | None = None
    """The policy for peers; None if no broker issued the certificates."""

    @property
    def settings(self) -> dict[str, int]:
        """The settings for judging peers that must be equal on all members of a group."""
        if self.admission is None:
            return {}
        return {PEER_EVIDENCE: int(self.admission.evidence_limit > 0)}

    @property
    def private_key(self) -> PrivateKey:
        """The key, loaded for one use: see `KeptKey.load`."""
        return self.key.load()

    @property
    def fingerprint(self) -> bytes:
        return fingerprint_of(self.certificate)


def kept_for_later(credentials: Credentials, world: int) -> Callable[[], Credentials]:
    """Returns a function that returns these credentials, with the certificate renewed if needed."""
    kept = credentials

    def now() -> Credentials:
        nonlocal kept
        if datetime.now(UTC) > kept.certificate.not_valid_after_utc - _RENEWAL:
            # If this fails, the old certificate is used until peers refuse it by its dates.
            with contextlib.suppress(ConfigurationError):
                renewed = load_credentials(kept.rank, world).certificate
                if renewed.public_key() == kept.certificate.public_key():
                    kept = replace(kept, certificate=renewed)
        return kept

    return now


def check_dates(credentials: Credentials) -> None:
    """Raises BadCredential for a certificate that has expired or is not valid yet."""
    now, certificate = datetime.now(UTC), credentials.certificate
    here = f"it is {now.isoformat(timespec='seconds')} on this machine"
    whose = f"the certificate of this worker, rank {credentials.rank},"
    if now > certificate.not_valid_after_utc:
        raise BadCredential(
            f"{whose} ended at {certificate.not_valid_after_utc.isoformat()}, and {here}: issue a "
            "new one (`sealring ca issue`), or set the clock"
        )
    if now < certificate.not_valid_before_utc:
        raise BadCredential(
            f"{whose} starts at {certificate.not_valid_before_utc.isoformat()}, and {here}: set "
            "the clock"
        )


def load_credentials(
    rank: int, world: int, environ: Mapping[str, str] | None = None
) -> Credentials:
    """Returns this worker's identity; raises ConfigurationError, which says what to set.

    With a job secret a process issues itself a certificate, and a new one for the same key after an
    hour.

    Dates are checked when a group is made (`check_dates`), not here: an expired certificate still
    says whose checkpoints this worker trusts.
    """
    environ = os.environ if environ is None else environ
    if not 0 <= rank < world:
        raise ConfigurationError(f"rank {rank} does not exist in a world of {world}")
    job = JOB.read(environ)
    if job is not None:
        check_job(job)
    files = [name for name in _FILES if name in environ]
    secret = read_secret(environ)
    if secret is not None and files:
        raise ConfigurationError(
            f"a job secret and {' and '.join(files)} are set: a worker has one identity, "
            "unset one or the other"
        )
    if secret is not None:
        return _from_secret(secret, job, rank, world)
    if BROKER.read(environ):
        raise ConfigurationError(
            "with SEALRING_BROKER a worker's identity comes from there: it is given to process "
            "groups, and only to them"
        )
    if files:
        return _from_files(environ, job, rank, world)
    raise ConfigurationError(
        "this worker has no identity. On one machine, `sealring run` in place of torchrun gives "
        "its workers one. Otherwise give all ranks one job secret: run `umask 077; openssl rand "
        "-hex 32 > job.secret` once, copy job.secret to each machine and set "
        "SEALRING_SECRET_FILE=job.secret; or give each rank a certificate from `sealring ca` in "
        "SEALRING_CERTIFICATE, SEALRING_KEY and SEALRING_AUTHORITY",
        code="configuration.no_identity",
    )


def _from_secret(secret: _native.Secret, job: str | None, rank: int, world: int) -> Credentials:
    authority = derive_authority(secret)
    name = WorkerName(job or authority.default_job, rank)
    certificate, key = authority.issue_to_self(name, world)
    return Credentials(name.job, rank, certificate, (authority.certificate,), key)


def _from_files(environ: Mapping[str, str], job: str | None, rank: int, world: int) -> Credentials:
    if missing := [name for name in _FILES if not environ.get(name)]:
        raise ConfigurationError(
            f"{' and '.join(missing)} must be set too: {', '.join(_FILES)} go together"
        )
    certificate_path, key_path = (
        Path(environ[name].replace("{rank}", str(rank))) for name in _FILES[:2]
    )
    certificate = _one_certificate(certificate_path)
    authorities = read_authorities(Path(environ[_FILES[2]]))
    key = _private_key(key_path)
    if key.public_key() != certificate.public_key():
        raise BadCredential(f"the key {key_path} is not the one of {certificate_path}")
    claims = _own_claims(certificate, certificate_path)
    _check_claims(claims, certificate_path, job, rank, world)
    if not is_issued_by(certificate, authorities):
        raise BadCredential(
            f"the certificate {certificate_path} was not issued by an authority in "
            f"{environ[_FILES[2]]}: its issuer itself must be in that file"
        )
    return Credentials(claims.name.job, rank, certificate, authorities, KeptKey.of(key))


def _check_claims(
    claims: CertificateClaims, path: Path, job: str | None, rank: int, world: int
) -> None:
    if job is not None and claims.name.job != job:
        raise BadCredential(
            f"the certificate {path} is for job {claims.name.job}, and SEALRING_JOB is {job}"
        )
    if claims.name.rank != rank:
        raise BadCredential(
            f"the certificate {path} is for rank {claims.name.rank}, and this worker is rank "
            f"{rank}: put {{rank}} into SEALRING_CERTIFICATE and SEALRING_KEY"
        )
    if claims.world is not None and claims.world != world:
        raise BadCredential(
            f"the certificate {path} is for a world of {claims.world}, and this one has {world}"
        )


def _one_certificate(path: Path) -> x509.Certificate:
    certificates = _certificates(path, "the certificate")
    if len(certificates) != 1:
        raise BadCredential(
            f"{path} holds {len(certificates)} certificates: put the worker's alone there and its "
            "issuer into SEALRING_AUTHORITY"
        )
    return certificates[0]


def read_authorities(path: Path) -> tuple[x509.Certificate, ...]:
    authorities = tuple(_certificates(path, "the authority"))
    for authority in authorities:
        try:
            constraints = authority.extensions.get_extension_for_class(x509.BasicConstraints).value
        except (ValueError, x509.ExtensionNotFound):
            constraints = None
        # Every certificate in this file is trusted as an authority, so a worker's must not be here.
        if constraints is None or not constraints.ca:
            raise BadCredential(
                f"a certificate in {path} ({authority.subject.rfc4514_string() or 'unnamed'}) is "
                "not an authority's"
            )
    return authorities


def _certificates(path: Path, what: str) -> list[x509.Certificate]:
    content = read_public(path, what, BadCredential)
    return certificates_from_pem(content, BadCredential(f"{what} {path} is not a PEM certificate"))


def _private_key(path: Path) -> PrivateKey:
    content = read_secret_file(path, "the key", BadCredential)
    try:
        key = load_pem_private_key(memoryview(content), password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        # The parser's error is left out on purpose: it may quote the file.
        raise BadCredential(f"the key {path} is not an unencrypted PEM private key") from None
    if not isinstance(key, PrivateKey):
        raise BadCredential(f"the key {path} is of a kind that TLS 1.3 cannot sign with")
    return key


def _own_claims(certificate: x509.Certificate, path: Path) -> CertificateClaims:
    try:
        return claims_of(certificate)
    except ValueError as problem:
        raise BadCredential(
            f"the certificate {path} is not a sealring worker's: {problem}"
        ) from None
