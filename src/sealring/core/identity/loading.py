"""Parses certificates, requests, revocation lists, OCSP responses and public keys.

They come from strangers. For a malformed one `cryptography` raises ValueError, TypeError,
InvalidVersion, UnsupportedAlgorithm and more, some only when a field is first read. Each function
here reads all fields at once and raises the caller's `refusal` for every failure, so that no caller
can forget one. Ruff's rule TID251 forbids the parsers of `cryptography` in all other modules.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.types import PublicKeyTypes
from cryptography.hazmat.primitives.serialization import load_der_public_key, load_pem_public_key
from cryptography.x509 import ocsp

T = TypeVar("T")
U = TypeVar("U")


def certificate_from_der(der: bytes, refusal: Exception) -> x509.Certificate:
    return _read(x509.load_der_x509_certificate, _whole_certificate, der, refusal)


def certificate_from_pem(pem: bytes, refusal: Exception) -> x509.Certificate:
    """The first certificate in a PEM text."""
    return _read(x509.load_pem_x509_certificate, _whole_certificate, pem, refusal)


def certificates_from_pem(pem: bytes, refusal: Exception) -> list[x509.Certificate]:
    """All certificates in a PEM text; at least one."""
    return _read(x509.load_pem_x509_certificates, _whole_certificates, pem, refusal)


def require_key_and_extensions(der: bytes, refusal: Exception) -> None:
    """Checks the key and the extensions of a certificate. The native core reads the other
    fields."""
    _read(x509.load_der_x509_certificate, _key_and_extensions, der, refusal)


def request_from_pem(pem: bytes, refusal: Exception) -> x509.CertificateSigningRequest:
    return _read(x509.load_pem_x509_csr, _whole_request, pem, refusal)


def revocation_list_from(content: bytes, refusal: Exception) -> x509.CertificateRevocationList:
    """A revocation list in PEM or DER."""
    pem = content.startswith(b"-----")
    load = x509.load_pem_x509_crl if pem else x509.load_der_x509_crl
    return _read(load, _whole_list, content, refusal)


def ocsp_response_from_der(der: bytes, refusal: Exception) -> ocsp.OCSPResponse:
    return _read(ocsp.load_der_ocsp_response, _as_it_is, der, refusal)


def public_key_from_der(der: bytes, refusal: Exception) -> PublicKeyTypes:
    return _read(load_der_public_key, _as_it_is, der, refusal)


def public_key_from_pem(pem: bytes, refusal: Exception) -> PublicKeyTypes:
    return _read(load_pem_public_key, _as_it_is, pem, refusal)


def _read(
    load: Callable[[bytes], T], whole: Callable[[T], U], content: bytes, refusal: Exception
) -> U:
    try:
        return whole(load(content))
    except Exception:
        raise refusal from None


def _whole_certificate(found: x509.Certificate) -> x509.Certificate:
    """Reads the fields that are parsed on first use, so that a bad one fails here and not later."""
    _ = found.subject, found.issuer, found.extensions, found.signature_algorithm_oid
    _ = found.not_valid_before_utc, found.not_valid_after_utc
    found.public_key()
    return found


def _key_and_extensions(found: x509.Certificate) -> None:
    found.public_key()
    _ = found.extensions


def _whole_certificates(found: list[x509.Certificate]) -> list[x509.Certificate]:
    return [_whole_certificate(one) for one in found]


def _whole_request(found: x509.CertificateSigningRequest) -> x509.CertificateSigningRequest:
    _ = found.subject, found.extensions, found.is_signature_valid
    found.public_key()
    return found


def _whole_list(found: x509.CertificateRevocationList) -> x509.CertificateRevocationList:
    _ = found.issuer, found.extensions, found.last_update_utc, found.next_update_utc
    return found


def _as_it_is(found: T) -> T:
    return found
