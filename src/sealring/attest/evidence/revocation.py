"""Whether the issuers of a chain still stand by it: revocation lists and OCSP answers.

Both are fetched beforehand. A chain needs the word of the issuer of each of its authorities, and of
its leaf where the leaf says that its issuer publishes one. AMD publishes none about chip keys, and
an NVIDIA device issues its own leaf: neither leaf names a list. The certificate of an NVIDIA device
is itself an authority, so its revocation is always asked.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from typing import TypeVar

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec, padding, rsa
from cryptography.x509 import ocsp
from cryptography.x509.oid import AuthorityInformationAccessOID, ExtendedKeyUsageOID

from sealring.errors import BadCollateral, UntrustedChain

Value = TypeVar("Value", bound=x509.ExtensionType)


@dataclass(frozen=True, slots=True)
class ListSeen:
    """A revocation list or OCSP answer that was consulted, so that its age can be shown."""

    issuer: str
    made: datetime


@dataclass(frozen=True, slots=True)
class ChainContext:
    """What a chain is checked against beside its root."""

    now: datetime
    """The time at which all dates are judged."""
    lists: tuple[x509.CertificateRevocationList, ...] = ()
    answers: tuple[ocsp.OCSPResponse, ...] = ()
    """OCSP answers, as they were fetched."""


def check_revocation(
    certificates: tuple[x509.Certificate, ...], context: ChainContext
) -> tuple[tuple[ListSeen, ...], tuple[str, ...]]:
    """What was consulted, and the issuers whose word is needed and missing.

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
    """For messages and policies, so cut and printable."""
    text = certificate.subject.rfc4514_string()[:100]
    return "".join(letter if letter.isprintable() else "?" for letter in text) or "(no name)"


def _needed(certificates: tuple[x509.Certificate, ...]) -> set[int]:
    """The certificates of which revocation must be known. A chain without any is not believed."""
    below_root = range(len(certificates) - 1)
    needed = {depth for depth in below_root if depth or _publishes(certificates[depth])}
    return needed or set(below_root)


def _publishes(certificate: x509.Certificate) -> bool:
    """It names a list or an OCSP service that speaks about it."""
    points = _extension(certificate.extensions, x509.CRLDistributionPoints)
    access = _extension(certificate.extensions, x509.AuthorityInformationAccess)
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
        raise _stale(f"revocation list of {name_of(issuer)}", newest, context.now)
    return [ListSeen(name_of(issuer), one.last_update_utc) for one in in_force]


def _is_from(revocation: x509.CertificateRevocationList, issuer: x509.Certificate) -> bool:
    """Signed by this issuer: a list that only bears its name is no list of its."""
    if revocation.issuer != issuer.subject:
        return False
    try:
        return revocation.is_signature_valid(issuer.public_key())  # type: ignore[arg-type]
    except (TypeError, ValueError, UnsupportedAlgorithm):
        return False


def _covers(revocation: x509.CertificateRevocationList, certificate: x509.Certificate) -> bool:
    """The list is complete for this certificate: no delta, and not of other certificates only."""
    if _extension(revocation.extensions, x509.DeltaCRLIndicator) is not None:
        return False
    scope = _extension(revocation.extensions, x509.IssuingDistributionPoint)
    if scope is None:
        return True
    constraints = _extension(certificate.extensions, x509.BasicConstraints)
    is_ca = constraints is not None and constraints.ca
    points = _extension(certificate.extensions, x509.CRLDistributionPoints)
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
    # An authority that has put a certificate on hold does not stand by it either.
    if newest.certificate_status is not ocsp.OCSPCertStatus.GOOD:
        raise UntrustedChain(
            f"{name_of(issuer)} answers {newest.certificate_status.name} to OCSP about "
            f"{name_of(certificate)}",
            code="evidence.chain_revoked",
        )
    made, until = newest.this_update_utc, newest.next_update_utc
    if until is None or not made <= context.now <= until:
        raise _stale(f"OCSP answer of {name_of(issuer)}", made, context.now)
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
    """By an authority of the chain, or by a responder that one of them has certified for it."""
    signers: Iterable[x509.Certificate] = (
        *above,
        *(one for one in response.certificates if _may_answer(one, above, response)),
    )
    return any(_signs(one, response) for one in signers)


def _may_answer(
    responder: x509.Certificate, above: tuple[x509.Certificate, ...], response: ocsp.OCSPResponse
) -> bool:
    try:
        purposes = _extension(responder.extensions, x509.ExtendedKeyUsage)
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
        key, algorithm = signer.public_key(), response.signature_hash_algorithm
        if algorithm is None:
            return False
        if isinstance(key, ec.EllipticCurvePublicKey):
            key.verify(response.signature, response.tbs_response_bytes, ec.ECDSA(algorithm))
        elif isinstance(key, rsa.RSAPublicKey):
            key.verify(
                response.signature, response.tbs_response_bytes, padding.PKCS1v15(), algorithm
            )
        else:
            return False
    except (InvalidSignature, UnsupportedAlgorithm, ValueError):
        return False
    return True


def out_of_dates(start: datetime, now: datetime, advice: str) -> str:
    """What to do about something that is not in force now; `advice` is for what has ended."""
    if now < start:
        return "it begins later, so this machine's clock may be behind: set it"
    return advice


def _stale(what: str, made: datetime, now: datetime) -> BadCollateral:
    return BadCollateral(
        f"the {what}, made {made:%Y-%m-%d %H:%M}, is not in force at {now:%Y-%m-%d %H:%M}: "
        f"{out_of_dates(made, now, 'fetch it again')}",
        code="evidence.stale_revocation_list",
    )


def _extension(extensions: x509.Extensions, kind: type[Value]) -> Value | None:
    try:
        return extensions.get_extension_for_class(kind).value
    except x509.ExtensionNotFound:
        return None
