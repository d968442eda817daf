"""Whether a verifier's own copy of Intel's statements is Intel's.

dcap-qvl checks it too, but says of collateral that is not Intel's what it says of a quote that is
forged. Checked apart, the error names whose file it is.
"""

from __future__ import annotations

from typing import Any

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import encode_dss_signature
from cryptography.hazmat.primitives.hashes import SHA256

from sealring.attest.evidence.chains import split_pem, verify_chain
from sealring.attest.evidence.trust import Trust
from sealring.core.identity.loading import certificate_from_der, revocation_list_from
from sealring.errors import (
    AttestationError,
    BadCollateral,
    ChainExpired,
    ChainRevoked,
    StaleRevocationList,
)
from sealring.formats.strict import read_json


def check_statements(text: str, family: str, trust: Trust) -> None:
    """Raises BadCollateral if a statement or a list in the file is not signed by Intel.

    StaleRevocationList: its signer's certificate is not valid now. ChainRevoked: Intel revoked it.
    """
    fields: dict[str, Any] = read_json(text)
    try:
        for name in ("tcb_info", "qe_identity"):
            signer = _signer(fields[f"{name}_issuer_chain"], trust)
            signature = bytes.fromhex(fields[f"{name}_signature"])
            half = len(signature) // 2
            numbers = (int.from_bytes(part, "big") for part in (signature[:half], signature[half:]))
            _public(signer).verify(
                encode_dss_signature(*numbers), fields[name].encode(), ec.ECDSA(SHA256())
            )
        chain = split_pem(fields["pck_crl_issuer_chain"].encode())
        _signer(fields["pck_crl_issuer_chain"], trust)
        for name, issuer in (("pck_crl", chain[0]), ("root_ca_crl", chain[-1])):
            found = revocation_list_from(bytes.fromhex(fields[name]), ValueError(name))
            key = _public(certificate_from_der(issuer, ValueError(name)))
            if not found.is_signature_valid(key):
                raise InvalidSignature
    except ChainRevoked:
        raise
    except ChainExpired as problem:
        raise StaleRevocationList(
            f"this verifier's own Intel collateral for {family} is not in force, fetch it again or "
            f"set the clock: {problem}"
        ) from None
    except (InvalidSignature, KeyError, TypeError, ValueError, AttestationError):
        raise BadCollateral(
            f"this verifier's own Intel collateral for {family} is not signed by Intel: the worker "
            "is not to blame; fetch the file again"
        ) from None


def _signer(pem: str, trust: Trust) -> x509.Certificate:
    return verify_chain(split_pem(pem.encode()), trust.intel, trust).leaf


def _public(certificate: x509.Certificate) -> ec.EllipticCurvePublicKey:
    key = certificate.public_key()
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise ValueError("Intel signs with keys on P-256")
    return key
