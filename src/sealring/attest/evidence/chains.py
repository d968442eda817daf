"""Verifies certificate chains (links, dates, revocation), and pins the vendors' roots."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from typing import Any, Final, Protocol, TypeVar

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec, padding
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509 import ocsp
from cryptography.x509.oid import AuthorityInformationAccessOID, ExtendedKeyUsageOID

from sealring.attest.evidence.encoding import check_signed, signed_part, with_sets_in_order
from sealring.core.identity.loading import certificate_from_der, certificates_from_pem
from sealring.errors import AttestationError, MalformedEvidence, UntrustedChain

Value = TypeVar("Value", bound=x509.ExtensionType)


class _Extended(Protocol):
    """A certificate or a revocation list."""

    @property
    def extensions(self) -> x509.Extensions: ...


@dataclass(frozen=True, slots=True)
class ListSeen:
    """A revocation list or OCSP answer that was consulted, so that its age can be shown."""

    issuer: str
    made: datetime


@dataclass(frozen=True, slots=True)
class ChainContext:
    """What a chain is checked against, besides its root."""

    now: datetime
    """The time at which all dates are judged."""
    lists: tuple[x509.CertificateRevocationList, ...] = ()
    answers: tuple[ocsp.OCSPResponse, ...] = ()
    """OCSP answers, as fetched."""


def check_revocation(
    certificates: tuple[x509.Certificate, ...], context: ChainContext
) -> tuple[tuple[ListSeen, ...], tuple[str, ...]]:
    """Returns the lists that were consulted, and the issuers for which a needed list is missing.

    Raises UntrustedChain, with the code evidence.chain_revoked, if an issuer has revoked a
    certificate or put it on hold.
    """
    seen: list[ListSeen] = []
    unlisted: list[str] = []
    needed = _needed(certificates)
    for depth, (certificate, issuer) in enumerate(pairwise(certificates)):
        words = [
            *_from_lists(certificate, issuer, context),
            *_from_answers(certificate, certificates[depth + 1 :], context),
        ]
        if words:
            seen += words
        elif depth in needed:
            unlisted.append(name_of(issuer))
    return tuple(seen), tuple(unlisted)


def name_of(certificate: x509.Certificate) -> str:
    """The subject, cut and made printable, for messages and policies."""
    text = certificate.subject.rfc4514_string()[:100]
    return "".join(letter if letter.isprintable() else "?" for letter in text) or "(no name)"


def _needed(certificates: tuple[x509.Certificate, ...]) -> set[int]:
    """The certificates whose revocation state must be known. Each chain has at least one."""
    below_root = range(len(certificates) - 1)
    needed = {depth for depth in below_root if depth or _publishes(certificates[depth])}
    return needed or set(below_root)


def _publishes(certificate: x509.Certificate) -> bool:
    """Whether the certificate names a revocation list or an OCSP service for itself."""
    points = extension_of(certificate, x509.CRLDistributionPoints)
    access = extension_of(certificate, x509.AuthorityInformationAccess)
    services = [one.access_method for one in access or ()]
    return points is not None or AuthorityInformationAccessOID.OCSP in services


def _from_lists(
    certificate: x509.Certificate, issuer: x509.Certificate, context: ChainContext
) -> list[ListSeen]:
    lists = [one for one in context.lists if _is_from(one, issuer)]
    for one in lists:
        if one.get_revoked_certificate_by_serial_number(certificate.serial_number):
            raise UntrustedChain(
                f"{name_of(issuer)} has revoked {name_of(certificate)}",
                code="evidence.chain_revoked",
            )
    whole = [one for one in lists if _covers(one, certificate)]
    in_force = [
        one
        for one in whole
        if one.next_update_utc and one.last_update_utc <= context.now <= one.next_update_utc
    ]
    if whole and not in_force:
        newest = max(one.last_update_utc for one in whole)
        raise stale(f"revocation list of {name_of(issuer)}", newest, context.now)
    return [ListSeen(name_of(issuer), one.last_update_utc) for one in in_force]


def _is_from(revocation: x509.CertificateRevocationList, issuer: x509.Certificate) -> bool:
    """Whether this issuer signed the list. Bearing the issuer's name is not enough."""
    if revocation.issuer != issuer.subject:
        return False
    try:
        return revocation.is_signature_valid(issuer.public_key())  # type: ignore[arg-type]
    except (TypeError, ValueError, UnsupportedAlgorithm):
        return False


def _covers(revocation: x509.CertificateRevocationList, certificate: x509.Certificate) -> bool:
    """Whether the list is not a delta and its scope includes this certificate."""
    if extension_of(revocation, x509.DeltaCRLIndicator) is not None:
        return False
    scope = extension_of(revocation, x509.IssuingDistributionPoint)
    if scope is None:
        return True
    constraints = extension_of(certificate, x509.BasicConstraints)
    is_ca = constraints is not None and constraints.ca
    points = extension_of(certificate, x509.CRLDistributionPoints)
    named = {name for point in points or () for name in point.full_name or ()}
    return not (
        scope.indirect_crl
        or scope.only_some_reasons
        or scope.only_contains_attribute_certs
        or (scope.only_contains_user_certs and is_ca)
        or (scope.only_contains_ca_certs and not is_ca)
        or (scope.full_name and named and not named & set(scope.full_name))
    )


def _from_answers(
    certificate: x509.Certificate, above: tuple[x509.Certificate, ...], context: ChainContext
) -> list[ListSeen]:
    """The newest OCSP answer about this certificate, whose issuer is the first of `above`."""
    issuer = above[0]
    answers = [
        one
        for response in context.answers
        for one in response.responses
        if _is_about(one, certificate, issuer) and _is_signed(response, above)
    ]
    if not answers:
        return []
    newest = max(answers, key=lambda one: one.this_update_utc)
    # A certificate on hold is refused too: its authority does not vouch for it.
    if newest.certificate_status is not ocsp.OCSPCertStatus.GOOD:
        raise UntrustedChain(
            f"{name_of(issuer)} answers {newest.certificate_status.name} to OCSP about "
            f"{name_of(certificate)}",
            code="evidence.chain_revoked",
        )
    made, until = newest.this_update_utc, newest.next_update_utc
    if until is None or not made <= context.now <= until:
        raise stale(f"OCSP answer of {name_of(issuer)}", made, context.now)
    return [ListSeen(name_of(issuer), made)]


def _is_about(
    answer: ocsp.OCSPSingleResponse, certificate: x509.Certificate, issuer: x509.Certificate
) -> bool:
    if answer.serial_number != certificate.serial_number:
        return False
    try:
        asked = ocsp.OCSPRequestBuilder()
        about = asked.add_certificate(certificate, issuer, answer.hash_algorithm).build()
    except (UnsupportedAlgorithm, ValueError):  # a hash that is not known
        return False
    found = (answer.issuer_name_hash, answer.issuer_key_hash)
    return found == (about.issuer_name_hash, about.issuer_key_hash)


def _is_signed(response: ocsp.OCSPResponse, above: tuple[x509.Certificate, ...]) -> bool:
    """Whether the signer is an authority of the chain, or a responder that such a one certified."""
    signers: Iterable[x509.Certificate] = (
        *above,
        *(one for one in response.certificates if _may_answer(one, above, response)),
    )
    return any(_signs(one, response) for one in signers)


def _may_answer(
    responder: x509.Certificate, above: tuple[x509.Certificate, ...], response: ocsp.OCSPResponse
) -> bool:
    try:
        purposes = extension_of(responder, x509.ExtendedKeyUsage)
    except ValueError:
        return False
    if purposes is None or ExtendedKeyUsageOID.OCSP_SIGNING not in purposes:
        return False
    if not (
        responder.not_valid_before_utc <= response.produced_at_utc <= responder.not_valid_after_utc
    ):
        return False
    for issuer in above:
        try:
            responder.verify_directly_issued_by(issuer)
        except (InvalidSignature, UnsupportedAlgorithm, TypeError, ValueError):
            continue
        return True
    return False


def _signs(signer: x509.Certificate, response: ocsp.OCSPResponse) -> bool:
    try:
        algorithm = response.signature_hash_algorithm
        if algorithm is None:
            return False
        check_signed(
            signer.public_key(), response.signature, response.tbs_response_bytes, algorithm
        )
    except (InvalidSignature, UnsupportedAlgorithm, ValueError):
        return False
    return True


def out_of_dates(start: datetime, now: datetime, advice: str) -> str:
    """Return `advice` for something that has ended, or other advice if it begins later."""
    if now < start:
        return "it begins later, so this machine's clock may be behind: set it"
    return advice


def stale(what: str, made: datetime, now: datetime) -> AttestationError:
    return AttestationError(
        f"the {what}, made {made:%Y-%m-%d %H:%M}, is not in force at {now:%Y-%m-%d %H:%M}: "
        f"{out_of_dates(made, now, 'fetch it again')}",
        code="evidence.stale_revocation_list",
    )


def extension_of(found: _Extended, kind: type[Value]) -> Value | None:
    try:
        return found.extensions.get_extension_for_class(kind).value
    except x509.ExtensionNotFound:
        return None


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
    """When the first certificate of the chain ends."""
    lists: tuple[ListSeen, ...]
    unlisted: tuple[str, ...]
    """Issuers whose revocation list is needed and missing."""

    @property
    def leaf(self) -> x509.Certificate:
        return self.certificates[0]

    @property
    def standing(self) -> dict[str, Any]:
        """The fields of Claims about revocation and the chain's end."""
        return {"lists": self.lists, "unlisted": self.unlisted, "not_after": self.not_after}


def verify_chain(
    chain: Sequence[bytes], roots: Collection[str], context: ChainContext
) -> VerifiedChain:
    """Verifies a chain, leaf first. The root is trusted by fingerprint, the rest by signatures."""
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
    """Reads a certificate. Some makers' are not quite DER: then its encoding differs from `der`."""
    try:
        try:
            return _load(der)
        except ValueError:
            return _load(with_sets_in_order(der))
    except Exception:  # strange bytes may fail anywhere
        raise MalformedEvidence("a certificate of the chain cannot be read") from None


def _load(der: bytes) -> x509.Certificate:
    with warnings.catch_warnings():
        # AMD's VCEKs have serial number 0, about which cryptography warns.
        warnings.simplefilter("ignore")
        return certificate_from_der(der, ValueError())


def split_pem(text: bytes) -> tuple[bytes, ...]:
    """The certificates (DER) of a PEM text. The text must be in the usual form, nothing else."""
    found = _read_pem(text)
    if _write_pem(found) != text:
        raise MalformedEvidence("the certificates are not written in their one usual form")
    return tuple(one.public_bytes(Encoding.DER) for one in found)


def usual_pem(text: bytes) -> bytes:
    """Rewrites the certificates of a text in the form that `split_pem` takes."""
    return _write_pem(_read_pem(text))


def _read_pem(text: bytes) -> list[x509.Certificate]:
    unreadable = MalformedEvidence("a certificate of the chain cannot be read")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # as in _load
        return certificates_from_pem(text, unreadable)


def _write_pem(certificates: Sequence[x509.Certificate]) -> bytes:
    return b"".join(one.public_bytes(Encoding.PEM) for one in certificates)


def _check_link(
    der: bytes, certificate: x509.Certificate, issuer: x509.Certificate, cas_below: int
) -> None:
    """Requires that `issuer` signed `certificate`, and that it is a CA that may do so."""
    check_issued(der, certificate, issuer)
    _check_authority(issuer, cas_below)


def chain_of(leaf: bytes, issuers: Sequence[bytes]) -> tuple[tuple[bytes, ...], str]:
    """The certificate's chain, root last, and the name of the first issuer that is missing."""
    known = {der: load_certificate(der) for der in (leaf, *issuers)}
    chain = [leaf]
    while (last := known[chain[-1]]).subject != last.issuer:
        above = next((der for der in issuers if _issued(chain[-1], last, known[der])), None)
        if above is None or above in chain:
            return tuple(chain), last.issuer.rfc4514_string()
        chain.append(above)
    return tuple(chain), ""


def _issued(der: bytes, certificate: x509.Certificate, issuer: x509.Certificate) -> bool:
    try:
        check_issued(der, certificate, issuer)
    except UntrustedChain:
        return False
    return True


def check_issued(der: bytes, certificate: x509.Certificate, issuer: x509.Certificate) -> None:
    """Raises UntrustedChain unless `issuer` signed `certificate`, whose bytes are `der`."""
    try:
        if certificate.public_bytes(Encoding.DER) == der:
            certificate.verify_directly_issued_by(issuer)
        else:
            _check_loose(der, certificate, issuer)
    except (InvalidSignature, UnsupportedAlgorithm, TypeError, ValueError) as problem:
        pair = f"{name_of(issuer)} did not issue {name_of(certificate)}"
        raise UntrustedChain(f"{pair}: {type(problem).__name__}") from None


def _check_loose(der: bytes, certificate: x509.Certificate, issuer: x509.Certificate) -> None:
    """Checks the issuer's signature over bytes that are not quite DER, as they came."""
    if certificate.issuer != issuer.subject:
        raise ValueError("another issuer's name")
    algorithm, pad = (
        certificate.signature_hash_algorithm,
        certificate.signature_algorithm_parameters,
    )
    if algorithm is None or not isinstance(pad, ec.ECDSA | padding.PKCS1v15 | padding.PSS):
        raise ValueError("a signature of no known form")
    key, signed = issuer.public_key(), signed_part(der)
    if isinstance(key, ec.EllipticCurvePublicKey) is not isinstance(pad, ec.ECDSA):
        raise ValueError("a signature that does not go with the key")
    rsa_pad = None if isinstance(pad, ec.ECDSA) else pad
    check_signed(key, certificate.signature, signed, algorithm, rsa_pad)


def _check_authority(issuer: x509.Certificate, cas_below: int) -> None:
    """Requires that `issuer` is a CA that may have so many CAs below it."""
    constraints = extension_of(issuer, x509.BasicConstraints)
    usage = extension_of(issuer, x509.KeyUsage)
    if constraints is None or usage is None:
        raise UntrustedChain(f"{name_of(issuer)} does not say that it may issue")
    if not constraints.ca or not usage.key_cert_sign:
        raise UntrustedChain(f"{name_of(issuer)} may not issue certificates")
    if constraints.path_length is not None and constraints.path_length < cas_below:
        raise UntrustedChain(f"{name_of(issuer)} may not have that many issuers below it")


def _check_understood(certificate: x509.Certificate) -> None:
    """Refuses a critical extension that we cannot read: it may forbid this very use."""
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
