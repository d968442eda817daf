"""Certificates verified whole, links, dates, revocation; and the vendors' roots, by fingerprint."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec, padding, rsa
from cryptography.hazmat.primitives.serialization import Encoding

from sealring.attest.evidence.encoding import signed_part, with_sets_in_order
from sealring.attest.evidence.revocation import (
    ChainContext,
    ListSeen,
    check_revocation,
    name_of,
    out_of_dates,
)
from sealring.core.identity.loading import certificate_from_der, certificates_from_pem
from sealring.errors import MalformedEvidence, UntrustedChain

AMD_ROOTS: Final[Mapping[str, str]] = {
    "69d063b45344d26a2e94e1f4210de49ef555308287d4c174445c95639a540bcd": "Milan",
    "4c6598d19c18719c5dfd4a7d335f674e5bfe1d8f800cea2cf270c10d103db2f1": "Genoa",
    "1f084161a44bb6d93778a904877d4819cafa5d05ef4193b2ded9dd9c73dd3f6a": "Turin",
}
INTEL_ROOTS: Final = frozenset({"44a0196b2b99f889b8e149e95b807a350e7424964399e885a7cbb8ccfab674d3"})
NVIDIA_ROOTS: Final = frozenset(
    {"102bf659d5419614c9d8e6aecebc80454eb26b1df6a769ac720b9a690b167b48"}
)
NVIDIA_REFERENCE_ROOTS: Final = frozenset(
    {"12977b5115acb0381179279fffeb5a8c4d264971ebb32298023a465fa41df5d1"}
)


@dataclass(frozen=True, slots=True)
class VerifiedChain:
    certificates: tuple[x509.Certificate, ...]
    root: str
    """The root's fingerprint."""
    not_after: datetime
    """When the first of them ends."""
    lists: tuple[ListSeen, ...]
    unlisted: tuple[str, ...]
    """Issuers whose word on revocation is needed, and of which there is none (revocation.py)."""

    @property
    def leaf(self) -> x509.Certificate:
        return self.certificates[0]


def verify_chain(
    chain: Sequence[bytes], roots: Collection[str], context: ChainContext
) -> VerifiedChain:
    """Leaf first, root last. The root is believed by its fingerprint, the rest by their issuers."""
    if not chain:
        raise UntrustedChain("the evidence brings no certificates")
    certificates = tuple(load_certificate(der) for der in chain)
    root = hashlib.sha256(chain[-1]).hexdigest()
    if root not in roots:
        raise UntrustedChain(
            f"the chain ends at {name_of(certificates[-1])} ({root[:16]}…), not a pinned root"
        )
    for depth, issuer in enumerate(certificates[1:]):
        _check_link(chain[depth], certificates[depth], issuer, depth)
    if len(certificates) == 1:
        _check_authority(certificates[0], 0)
    for certificate in certificates:
        _check_understood(certificate)
        _check_dates(certificate, context.now)
    lists, unlisted = check_revocation(certificates, context)
    not_after = min(certificate.not_valid_after_utc for certificate in certificates)
    return VerifiedChain(certificates, root, not_after, lists, unlisted)


def load_certificate(der: bytes) -> x509.Certificate:
    """Its fields. Some makers' are not quite DER: then its bytes are not the given ones."""
    try:
        try:
            return _load(der)
        except ValueError:
            return _load(with_sets_in_order(der))
    except Exception:  # strange bytes may fail anywhere
        raise MalformedEvidence("a certificate of the chain cannot be read") from None


def _load(der: bytes) -> x509.Certificate:
    with warnings.catch_warnings():
        # AMD's VCEKs have serial number 0, of which cryptography warns. They are real.
        warnings.simplefilter("ignore")
        return certificate_from_der(der, ValueError())


def split_pem(text: bytes) -> tuple[bytes, ...]:
    """The certificates (DER) of a text that holds them in their usual form, and nothing else."""
    found = _read_pem(text)
    if _write_pem(found) != text:
        raise MalformedEvidence("the certificates are not written in their one usual form")
    return tuple(one.public_bytes(Encoding.DER) for one in found)


def usual_pem(text: bytes) -> bytes:
    """The certificates of a text, in the form that `split_pem` takes."""
    return _write_pem(_read_pem(text))


def _read_pem(text: bytes) -> list[x509.Certificate]:
    unreadable = MalformedEvidence("a certificate of the chain cannot be read")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # As above.
        return certificates_from_pem(text, unreadable)


def _write_pem(certificates: Sequence[x509.Certificate]) -> bytes:
    return b"".join(one.public_bytes(Encoding.PEM) for one in certificates)


def _check_link(
    der: bytes, certificate: x509.Certificate, issuer: x509.Certificate, cas_below: int
) -> None:
    """`issuer` signed `certificate`, and may. A root's signature on itself would say nothing."""
    check_issued(der, certificate, issuer)
    _check_authority(issuer, cas_below)


def check_issued(der: bytes, certificate: x509.Certificate, issuer: x509.Certificate) -> None:
    """`issuer` signed `certificate`, whose bytes are `der`."""
    try:
        if certificate.public_bytes(Encoding.DER) == der:
            certificate.verify_directly_issued_by(issuer)
        else:
            _check_loose(der, certificate, issuer)
    except (InvalidSignature, UnsupportedAlgorithm, TypeError, ValueError) as problem:
        pair = f"{name_of(issuer)} did not issue {name_of(certificate)}"
        raise UntrustedChain(f"{pair}: {type(problem).__name__}") from None


def _check_loose(der: bytes, certificate: x509.Certificate, issuer: x509.Certificate) -> None:
    """The issuer's signature over the bytes as they came, whose fields were read from a copy."""
    if certificate.issuer != issuer.subject:
        raise ValueError("another issuer's name")
    key, algorithm = issuer.public_key(), certificate.signature_hash_algorithm
    how, signed = certificate.signature_algorithm_parameters, signed_part(der)
    if algorithm is None:
        raise ValueError("a signature without a hash")
    if isinstance(key, ec.EllipticCurvePublicKey) and isinstance(how, ec.ECDSA):
        key.verify(certificate.signature, signed, how)
    elif isinstance(key, rsa.RSAPublicKey) and isinstance(how, padding.PKCS1v15 | padding.PSS):
        key.verify(certificate.signature, signed, how, algorithm)
    else:
        raise ValueError("a signature that does not go with the key")


def _check_authority(issuer: x509.Certificate, cas_below: int) -> None:
    """It is a CA, with room for what is below it."""
    try:
        extensions = issuer.extensions
        constraints = extensions.get_extension_for_class(x509.BasicConstraints).value
        usage = extensions.get_extension_for_class(x509.KeyUsage).value
    except x509.ExtensionNotFound:
        raise UntrustedChain(f"{name_of(issuer)} does not say that it may issue") from None
    if not constraints.ca or not usage.key_cert_sign:
        raise UntrustedChain(f"{name_of(issuer)} may not issue certificates")
    if constraints.path_length is not None and constraints.path_length < cas_below:
        raise UntrustedChain(f"{name_of(issuer)} may not have that many issuers below it")


def _check_understood(certificate: x509.Certificate) -> None:
    """A critical extension limits its certificate; one we cannot read may forbid just this use."""
    for extension in certificate.extensions:
        if extension.critical and isinstance(extension.value, x509.UnrecognizedExtension):
            raise UntrustedChain(
                f"{name_of(certificate)} has the critical extension {extension.oid.dotted_string}, "
                "which is not known"
            )


def _check_dates(certificate: x509.Certificate, now: datetime) -> None:
    start, end = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if not start <= now <= end:
        advice = "have the machine's certificates renewed, or set the clock"
        raise UntrustedChain(
            f"{name_of(certificate)} is valid from {start:%Y-%m-%d %H:%M} to {end:%Y-%m-%d %H:%M}, "
            f"and the check is made for {now:%Y-%m-%d %H:%M}: {out_of_dates(start, now, advice)}",
            code="evidence.chain_expired",
        )
