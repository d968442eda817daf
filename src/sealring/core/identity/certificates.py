"""What certificates contain, and how they are made.

    authority   CA, path length 0, may only name URIs on the host `sealring`
    worker      not a CA; one URI, spiffe://sealring/<job>/rank/<n>; usable at both ends of TLS; an
                extension of sealring with the world size; if a broker issued it, another one with
                what the worker's evidence showed

`claims_of` only reads a certificate. `verification` decides whether to believe it.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Final, NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from sealring import _native
from sealring.core.identity.loading import require_key_and_extensions
from sealring.core.identity.names import URI_HOST, WorkerName
from sealring.errors import BadCredential
from sealring.limits import MAX_WORLD

# OIDs made from random UUIDs (arc 2.25), which need no registry.
WORLD_SIZE_OID: Final = x509.ObjectIdentifier("2.25.147685129265757417221629964167862304279")
ATTESTATION_OID: Final = x509.ObjectIdentifier("2.25.164840930545808883315512490553320677893")

CLOCK_SKEW: Final = timedelta(minutes=5)
"""A fresh certificate starts this long ago, for peers whose clocks are behind ours."""


class CertificateClaims(NamedTuple):
    """What a certificate says about its holder. It proves nothing by itself."""

    name: WorkerName
    world: int | None


@lru_cache(maxsize=1024)
def claims_of(certificate: x509.Certificate) -> CertificateClaims:
    """Reads a worker's certificate; raises ValueError, which says why it is not one."""
    return claims_from(_native.read_certificate(certificate.public_bytes(Encoding.DER)))


def claims_from(read: _native.ReadCertificate) -> CertificateClaims:
    """Like `claims_of`, for a certificate that the native core has read."""
    if not read.readable:
        raise ValueError("it cannot be read")
    if problem := read.problem:
        raise ValueError(problem)
    if foreign := read.foreign:
        _require_readable(foreign)
    name = WorkerName.parse(read.uri)
    if name is None:
        raise ValueError("its URI is not spiffe://sealring/<job>/rank/<n>")
    return CertificateClaims(name, read.world)


def _require_readable(der: bytes) -> None:
    """Checks a certificate with a key or extensions that sealring does not issue.

    The native core has checked the kinds that sealring issues.
    """
    require_key_and_extensions(der, ValueError("its key or its extensions cannot be read"))


def make_authority(
    key: Ed25519PrivateKey,
    common_name: str,
    serial: int,
    not_before: datetime,
    not_after: datetime,
) -> x509.Certificate:
    subject = x509.Name(
        [
            x509.NameAttribute(NameOID.ORGANIZATION_NAME, "sealring"),
            x509.NameAttribute(NameOID.COMMON_NAME, common_name),
        ]
    )
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(serial)
        .not_valid_before(not_before)
        .not_valid_after(not_after)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(authority=True), critical=True)
        .add_extension(
            x509.NameConstraints([x509.UniformResourceIdentifier(URI_HOST)], None), critical=True
        )
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, None)
    )


def check_rank(rank: int, world: int | None) -> None:
    if world is not None and not (1 <= world <= MAX_WORLD and rank < world):
        raise BadCredential(f"rank {rank} does not exist in a world of {world}")


def issue(
    authority: x509.Certificate,
    authority_key: Ed25519PrivateKey,
    holder: Ed25519PublicKey,
    name: WorkerName,
    world: int | None,
    lifetime: timedelta,
    now: datetime | None = None,
    *,
    attestation: bytes | None = None,
) -> x509.Certificate:
    """Issues a worker's certificate. Its subject is empty: the URI is the worker's only name.

    `attestation` is the extension with what the issuer saw of the worker's evidence
    (attest/evidence/worker.py).
    """
    check_rank(name.rank, world)
    extensions = []
    if world is not None:
        extensions.append((WORLD_SIZE_OID, encode_integer(world)))
    if attestation is not None:
        extensions.append((ATTESTATION_OID, attestation))
    return issue_leaf(
        authority,
        authority_key,
        holder,
        [x509.UniformResourceIdentifier(name.uri)],
        [ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH],
        lifetime,
        now or datetime.now(UTC),
        extensions,
    )


def issue_leaf(
    authority: x509.Certificate,
    authority_key: Ed25519PrivateKey,
    holder: Ed25519PublicKey,
    names: Sequence[x509.GeneralName],
    purposes: Sequence[x509.ObjectIdentifier],
    lifetime: timedelta,
    now: datetime,
    extensions: Sequence[tuple[x509.ObjectIdentifier, bytes]] = (),
) -> x509.Certificate:
    """Issues a certificate with these names and no subject, which cannot issue others."""
    identifier = authority.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
    builder = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([]))
        .issuer_name(authority.subject)
        .public_key(holder)
        .serial_number(x509.random_serial_number())
        .not_valid_before(max(now - CLOCK_SKEW, authority.not_valid_before_utc))
        .not_valid_after(min(now + lifetime, authority.not_valid_after_utc))
        .add_extension(x509.SubjectAlternativeName(names), critical=True)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(authority=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(holder), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(identifier),
            critical=False,
        )
    )
    for oid, content in extensions:
        builder = builder.add_extension(x509.UnrecognizedExtension(oid, content), critical=False)
    return builder.sign(authority_key, None)


def encode_integer(value: int) -> bytes:
    """Encodes a non-negative DER INTEGER."""
    body = value.to_bytes(value.bit_length() // 8 + 1, "big")
    return bytes((2, len(body))) + body


def _key_usage(*, authority: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not authority,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=authority,
        crl_sign=authority,
        encipher_only=False,
        decipher_only=False,
    )
