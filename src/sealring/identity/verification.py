"""The only maker of a VerifiedPeer.

The caller brings a certificate whose private key the peer has just used (TLS's CertificateVerify);
everything else is decided here and nowhere else: the signature, the dates, the job, the rank and
the world size. The answer is a value that cannot be made otherwise, so that code which needs a
verified peer says so in its signature.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import InitVar, dataclass
from datetime import UTC, datetime
from functools import lru_cache
from typing import NoReturn

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from sealring.errors import (
    CertificateExpired,
    CertificateNotYetValid,
    UnknownAuthority,
    WrongJob,
    WrongRank,
    WrongWorldSize,
)
from sealring.identity.certificates import CertificateClaims, claims_of
from sealring.identity.names import WorkerName
from sealring.limits import MAX_WORLD

_SEAL = object()


@dataclass(frozen=True, slots=True)
class VerifiedPeer:
    """Proof that a peer is the worker it says it is. Only `verify` can make one."""

    job: str
    rank: int
    world: int | None
    fingerprint: bytes
    """SHA-256 of its certificate."""
    key: str
    """SHA-256 of its public key (SPKI), which stays the same when a certificate is renewed."""
    seal: InitVar[object]

    def __post_init__(self, seal: object) -> None:
        if seal is not _SEAL:
            raise TypeError("a VerifiedPeer comes from sealring.identity.verify only")

    def __reduce__(self) -> NoReturn:
        raise TypeError("a VerifiedPeer cannot be copied or unpickled: verify the peer instead")


@dataclass(frozen=True, slots=True)
class SignedClaims:
    """What never changes about a certificate that one of these authorities signed."""

    authorities: tuple[x509.Certificate, ...]
    claims: CertificateClaims
    key: str


class KnownCertificates:
    """Certificates whose signature one worker has verified: it need not be verified again.

    A worker's own: several workers in one process do not share it. Dates, revocation, policy, job
    and rank are judged anew each time. Methods may be called from any thread.
    """

    def __init__(self, most: int = 4 * MAX_WORLD) -> None:
        self._most = most
        self._signed: dict[bytes, SignedClaims] = {}

    def get(
        self, fingerprint: bytes, authorities: Sequence[x509.Certificate]
    ) -> SignedClaims | None:
        signed = self._signed.get(fingerprint)
        # Another authority may have taken the place of the one that signed it.
        return signed if signed is not None and signed.authorities == tuple(authorities) else None

    def add(self, fingerprint: bytes, signed: SignedClaims) -> None:
        if len(self._signed) >= self._most:  # certificates that were renewed many times
            self._signed.clear()
        self._signed[fingerprint] = signed


def verify(
    certificate: x509.Certificate,
    authorities: Sequence[x509.Certificate],
    *,
    job: str,
    world: int,
    rank: int | None,
    where: str,
    judge: Callable[[WorkerName], None] | None = None,
    now: datetime | None = None,
    judge_dates: bool = True,
    known: KnownCertificates | None = None,
    fingerprint: bytes | None = None,
) -> VerifiedPeer:
    """Check everything a certificate must say to be admitted; `rank` is None if any rank will do.

    `where` names the peer's address in errors. `judge` raises if the worker of that name was
    revoked or does not pass the policy. The order matters: what fails up to and including `judge`
    is not `proven`, because a stranger or an evicted worker can cause it. Without `judge_dates` the
    caller knows that this very certificate was in date when the peer's group was formed.
    `fingerprint` is the SHA-256 of the bytes that the caller has read the certificate from.
    """
    if fingerprint is None:
        fingerprint = fingerprint_of(certificate)
    signed = None if known is None else known.get(fingerprint, authorities)
    if signed is None:
        signed = _signed(
            certificate, authorities, where, is_issued_by if known is None else signed_by
        )
        if known is not None:
            known.add(fingerprint, signed)
    claims, name = signed.claims, signed.claims.name
    who = f"rank {name.rank} at {where}"
    if name.job != job:
        raise WrongJob(
            f"{who} is of job {name.job}, and this is {job}: check SEALRING_JOB and the rendezvous "
            "address on both",
            peer=name.rank,
        )
    if judge_dates:
        _check_dates(certificate, now or datetime.now(UTC), who, name.rank)
    if judge is not None:
        judge(name)
    if rank is not None and name.rank != rank:
        raise WrongRank(
            f"the peer at {where} was to be rank {rank} and proved to be rank {name.rank}: the "
            "rendezvous store is wrong, or two workers were started with each other's rank",
            peer=name.rank,
            proven=True,
        )
    if claims.world is not None and claims.world != world:
        raise WrongWorldSize(
            f"{who} has a certificate for a world of {claims.world}, and this worker counts "
            f"{world}: start all workers with one WORLD_SIZE",
            peer=name.rank,
            proven=True,
        )
    if name.rank >= world:
        raise WrongRank(
            f"{who} does not exist in a world of {world}: start all workers with one WORLD_SIZE",
            peer=name.rank,
            proven=True,
        )
    return VerifiedPeer(name.job, name.rank, claims.world, fingerprint, signed.key, _SEAL)


@lru_cache(maxsize=1024)
def fingerprint_of(certificate: x509.Certificate) -> bytes:
    """SHA-256 of it. Kept: a connection needs those of its two ends several times."""
    return hashlib.sha256(certificate.public_bytes(Encoding.DER)).digest()


def signed_by(certificate: x509.Certificate, authority: x509.Certificate) -> bool:
    """Whether `authority` signed this very certificate, with no other in between."""
    try:
        certificate.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature, UnsupportedAlgorithm):
        return False
    return True


@lru_cache(maxsize=1024)
def is_issued_by(certificate: x509.Certificate, authority: x509.Certificate) -> bool:
    """The same, remembered for the whole process: it depends on the bytes of the two alone.

    A reader of a thousand statements meets the same few certificates. Workers that share a process
    do not share it: each has its own KnownCertificates.
    """
    return signed_by(certificate, authority)


def _signed(
    certificate: x509.Certificate,
    authorities: Sequence[x509.Certificate],
    where: str,
    check: Callable[[x509.Certificate, x509.Certificate], bool],
) -> SignedClaims:
    if not any(check(certificate, authority) for authority in authorities):
        raise UnknownAuthority(
            f"the peer at {where} has a certificate that this job's authority did not sign: give "
            "all ranks one job secret or one SEALRING_AUTHORITY"
        )
    try:
        claims = claims_of(certificate)
        constraints = certificate.extensions.get_extension_for_class(x509.BasicConstraints).value
    except (ValueError, x509.ExtensionNotFound) as problem:
        raise UnknownAuthority(
            f"the peer at {where} has a certificate of this authority that is not a sealring "
            f"worker's: {problem}"
        ) from None
    if constraints.ca:
        raise UnknownAuthority(f"the peer at {where} shows an authority's certificate as its own")
    public_key = certificate.public_key().public_bytes(
        Encoding.DER, PublicFormat.SubjectPublicKeyInfo
    )
    return SignedClaims(tuple(authorities), claims, hashlib.sha256(public_key).hexdigest())


def _check_dates(certificate: x509.Certificate, now: datetime, who: str, rank: int) -> None:
    if now > certificate.not_valid_after_utc:
        raise CertificateExpired(
            f"the certificate of {who} ended at {certificate.not_valid_after_utc.isoformat()} and "
            f"it is {now.isoformat(timespec='seconds')} here: issue it a new one, or set the clock",
            peer=rank,
        )
    if now < certificate.not_valid_before_utc:
        raise CertificateNotYetValid(
            f"the certificate of {who} starts at {certificate.not_valid_before_utc.isoformat()} "
            f"and it is {now.isoformat(timespec='seconds')} here: set the clocks of both machines",
            peer=rank,
        )
