"""Verifies a peer's certificate. Only this module can make a VerifiedPeer.

The caller gives a certificate whose private key the peer has just used (TLS's CertificateVerify).
This module checks everything else: the authority's signature (in the native core), the dates, the
job, the rank and the world size. The result is a VerifiedPeer, so that a function which needs a
verified peer can demand it in its signature.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import InitVar, dataclass
from datetime import UTC, datetime
from functools import lru_cache
from typing import NamedTuple, NoReturn

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from sealring import _native
from sealring.core.identity.certificates import CertificateClaims, claims_from
from sealring.core.identity.names import WorkerName
from sealring.errors import PeerIncompatible, PeerNotAdmitted, WrongPeer
from sealring.limits import MAX_WORLD

_SEAL = object()


@dataclass(frozen=True, slots=True)
class VerifiedPeer:
    """Proof that a peer is the worker that it claims to be. Only `admit` can make one."""

    job: str
    rank: int
    world: int | None
    fingerprint: bytes
    """SHA-256 of the peer's certificate."""
    key: str
    """SHA-256 of the peer's public key (SPKI), which does not change when it is renewed."""
    seal: InitVar[object]

    def __post_init__(self, seal: object) -> None:
        if seal is not _SEAL:
            raise TypeError("a VerifiedPeer comes from sealring.core.identity.verify only")

    def __reduce__(self) -> NoReturn:
        raise TypeError("a VerifiedPeer cannot be copied or unpickled: verify the peer instead")


class SignedCertificate(NamedTuple):
    """A worker's certificate that one of the authorities signed: the facts that never change."""

    claims: CertificateClaims
    fingerprint: bytes
    key: str
    starts: int
    """Start of validity, in seconds since 1970."""
    ends: int
    read: _native.ReadCertificate
    """Verifies signatures of the certificate's holder."""


class KnownCertificates:
    """A cache of the certificates whose signature one worker has verified.

    Each worker has its own, even if several workers share a process. Dates, revocation, policy, job
    and rank are checked anew each time. Methods may be called from any thread.
    """

    def __init__(self, most: int = 4 * MAX_WORLD) -> None:
        self._most = most
        self.signed: dict[bytes, tuple[tuple[x509.Certificate, ...], SignedCertificate]] = {}

    def get(
        self, fingerprint: bytes, authorities: tuple[x509.Certificate, ...]
    ) -> SignedCertificate | None:
        believed, signed = self.signed.get(fingerprint, ((), None))
        # The authorities may have been replaced since.
        return signed if believed == authorities else None

    def add(self, authorities: tuple[x509.Certificate, ...], signed: SignedCertificate) -> None:
        if len(self.signed) >= self._most:  # full of certificates that have been renewed since
            self.signed.clear()
        self.signed[signed.fingerprint] = authorities, signed


Reading = SignedCertificate | _native.ReadCertificate
"""A known certificate, or one that was just read. Give it to `require_signed`."""


def read_all(
    certificates: Sequence[bytes],
    fingerprints: Sequence[bytes],
    authorities: tuple[x509.Certificate, ...],
    known: KnownCertificates | None,
) -> list[Reading]:
    """Reads certificates (DER, with their SHA-256), and verifies the authority's signature on each.

    One call of the native core reads all: a group has as many certificates as members.
    """
    found: list[Reading | None] = [
        None if known is None else known.get(each, authorities) for each in fingerprints
    ]
    new = [place for place, each in enumerate(found) if each is None]
    if new:
        read = _read(tuple([certificates[place] for place in new]), authorities)
        for place, each in zip(new, read, strict=True):
            found[place] = each
    return [each for each in found if each is not None]


def require_signed(
    reading: Reading,
    authorities: tuple[x509.Certificate, ...],
    where: str,
    known: KnownCertificates | None,
) -> SignedCertificate:
    """Raises PeerNotAdmitted unless an authority signed the certificate and it is a worker's.

    Adds it to `known`. `where` names the peer's address in errors. `reading` must have been read
    with these authorities.
    """
    if isinstance(reading, SignedCertificate):
        return reading
    if not reading.signed:
        raise PeerNotAdmitted(
            f"the peer at {where} has a certificate that this job's authority did not sign: give "
            "all ranks one job secret or one SEALRING_AUTHORITY",
            code="handshake.unknown_authority",
        )
    try:
        claims = claims_from(reading)
        if not reading.states_constraints:
            raise ValueError("it has no basic constraints")
    except ValueError as problem:
        raise PeerNotAdmitted(
            f"the peer at {where} has a certificate of this authority that is not a sealring "
            f"worker's: {problem}",
            code="handshake.unknown_authority",
        ) from None
    if reading.is_authority:
        raise PeerNotAdmitted(
            f"the peer at {where} shows an authority's certificate as its own",
            code="handshake.unknown_authority",
        )
    signed = SignedCertificate(
        claims, reading.fingerprint, reading.key, reading.starts, reading.ends, reading
    )
    if known is not None:
        known.add(authorities, signed)
    return signed


def signed_certificate(
    certificate: x509.Certificate,
    authorities: tuple[x509.Certificate, ...],
    where: str,
    known: KnownCertificates | None = None,
) -> SignedCertificate:
    """`read_all` and `require_signed` for one certificate."""
    if known is None:
        return require_signed(_read_one(certificate, authorities), authorities, where, None)
    fingerprint = fingerprint_of(certificate)
    if (signed := known.get(fingerprint, authorities)) is not None:
        return signed
    der = certificate.public_bytes(Encoding.DER)
    (reading,) = read_all([der], [fingerprint], authorities, known)
    return require_signed(reading, authorities, where, known)


def verify(
    certificate: x509.Certificate,
    authorities: Sequence[x509.Certificate],
    *,
    job: str,
    world: int,
    rank: int | None,
    where: str,
    now: datetime | None = None,
) -> VerifiedPeer:
    """Verifies a certificate completely: its signature, and then all that `admit` checks."""
    signed = signed_certificate(certificate, tuple(authorities), where)
    return admit(signed, job=job, world=world, rank=rank, where=where, now=now)


def admit(
    signed: SignedCertificate,
    *,
    job: str,
    world: int,
    rank: int | None,
    where: str,
    judge: Callable[[WorkerName], None] | None = None,
    now: datetime | None = None,
    judge_dates: bool = True,
) -> VerifiedPeer:
    """Checks everything except the signature; `rank` is None if any rank is accepted.

    `where` names the peer's address in errors. `judge` raises if the worker of that name was
    revoked or the policy does not admit it. The order matters: errors up to and including `judge`
    are not `proven`, because a stranger or an evicted worker can cause them. Pass
    `judge_dates=False` only if this certificate was valid when the peer's group was formed.
    """
    claims, name = signed.claims, signed.claims.name
    if name.job != job:
        raise WrongPeer(
            f"rank {name.rank} at {where} is of job {name.job}, and this is {job}: check "
            "SEALRING_JOB and the rendezvous address on both",
            peer=name.rank,
            code="handshake.wrong_job",
        )
    if judge_dates:
        _check_dates(signed, time.time() if now is None else now.timestamp(), where)
    if judge is not None:
        judge(name)
    if rank is not None and name.rank != rank:
        raise WrongPeer(
            f"the peer at {where} was to be rank {rank} and proved to be rank {name.rank}: the "
            "rendezvous store is wrong, or two workers were started with each other's rank",
            peer=name.rank,
            proven=True,
            misdirected=True,
            code="handshake.wrong_rank",
        )
    if claims.world is not None and claims.world != world:
        raise PeerIncompatible(
            f"rank {name.rank} at {where} has a certificate for a world of {claims.world}, and "
            f"this worker counts {world}: start all workers with one WORLD_SIZE",
            peer=name.rank,
            proven=True,
            code="handshake.wrong_world_size",
        )
    if name.rank >= world:
        raise WrongPeer(
            f"rank {name.rank} at {where} does not exist in a world of {world}: start all workers "
            "with one WORLD_SIZE",
            peer=name.rank,
            proven=True,
            code="handshake.wrong_rank",
        )
    return VerifiedPeer(name.job, name.rank, claims.world, signed.fingerprint, signed.key, _SEAL)


@lru_cache(maxsize=1024)
def fingerprint_of(certificate: x509.Certificate) -> bytes:
    """SHA-256 of a certificate. Cached, because a connection needs it several times."""
    return hashlib.sha256(certificate.public_bytes(Encoding.DER)).digest()


def is_issued_by(certificate: x509.Certificate, authorities: tuple[x509.Certificate, ...]) -> bool:
    """Whether one of the authorities signed this certificate directly."""
    return _read_one(certificate, authorities).signed


@lru_cache(maxsize=1024)
def _read_one(
    certificate: x509.Certificate, authorities: tuple[x509.Certificate, ...]
) -> _native.ReadCertificate:
    """Reads one certificate. Cached for the process: the result depends only on these bytes.

    Reading a thousand statements needs the same few certificates again and again. Workers that
    verify peers use KnownCertificates instead, which is not shared in a process.
    """
    return _read((certificate.public_bytes(Encoding.DER),), authorities)[0]


def _read(
    certificates: tuple[bytes, ...], authorities: tuple[x509.Certificate, ...]
) -> list[_native.ReadCertificate]:
    return _native.read_certificates(
        certificates, tuple([_authority(each) for each in authorities])
    )


@lru_cache(maxsize=64)
def _authority(certificate: x509.Certificate) -> _native.Authority:
    return _native.Authority(certificate.public_bytes(Encoding.DER))


def _check_dates(signed: SignedCertificate, now: float, where: str) -> None:
    rank = signed.claims.name.rank
    if now > signed.ends:
        raise PeerNotAdmitted(
            f"the certificate of rank {rank} at {where} ended at {_date(signed.ends)} and "
            f"it is {_date(now)} here: issue it a new one, or set the clock",
            peer=rank,
            code="handshake.certificate_expired",
        )
    if now < signed.starts:
        raise PeerNotAdmitted(
            f"the certificate of rank {rank} at {where} starts at {_date(signed.starts)} "
            f"and it is {_date(now)} here: set the clocks of both machines",
            peer=rank,
            code="handshake.certificate_not_yet_valid",
        )


def _date(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")
