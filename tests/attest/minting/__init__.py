"""Evidence made by the tests under roots of their own, with every detail open to change.

Tests alter it and measure its verification. No pinned root vouches for any of it. This module has
authorities, and the certificates and revocation lists that they issue.

amd           SEV-SNP reports
tpm           quotes and event logs; a virtual TPM that an SNP report vouches for, as on Azure
intel         TDX and SGX quotes, with their collateral
nvidia        GPU and switch reports, and reference measurements
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature
from cryptography.hazmat.primitives.hashes import SHA256, SHA384
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509 import ocsp
from cryptography.x509.oid import NameOID

from sealring.attest.evidence import Challenge

NOW: Final = datetime(2026, 6, 1, tzinfo=UTC)
DAY: Final = timedelta(days=1)
CHALLENGE: Final = Challenge(bytes(range(32)), b"a worker's public key")
_P256_ORDER: Final = 2**256 - 2**224 + 2**192 - 0x4319055258E8617B0C46353D039CDAAF
_P384_ORDER: Final = 2**384 - int("389CB27E0BC8D220A7E5F24DB74F58851313E695333AD68D", 16)
_USAGES: Final = (
    "digital_signature", "content_commitment", "key_encipherment", "data_encipherment",
    "key_agreement", "key_cert_sign", "crl_sign", "encipher_only", "decipher_only",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Holder:
    """A certificate and its key."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey

    @property
    def der(self) -> bytes:
        return self.certificate.public_bytes(Encoding.DER)

    @property
    def fingerprint(self) -> str:
        return self.certificate.fingerprint(SHA256()).hex()

    def revocation_list(
        self, *revoked: x509.Certificate, days_old: int = 1, days_left: int = 10
    ) -> x509.CertificateRevocationList:
        builder = (
            x509.CertificateRevocationListBuilder()
            .issuer_name(self.certificate.subject)
            .last_update(NOW - days_old * DAY)
            .next_update(NOW + days_left * DAY)
            .add_extension(x509.CRLNumber(1), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key()),
                critical=False,
            )
        )
        for one in revoked:
            builder = builder.add_revoked_certificate(
                x509.RevokedCertificateBuilder()
                .serial_number(one.serial_number)
                .revocation_date(NOW - days_old * DAY)
                .build()
            )
        return builder.sign(self.key, _hash(self.key))

    def answer(
        self,
        about: Holder,
        *,
        status: ocsp.OCSPCertStatus = ocsp.OCSPCertStatus.GOOD,
        reason: x509.ReasonFlags | None = None,
        responder: Holder | None = None,
        days_old: int = 1,
        days_left: int = 10,
    ) -> ocsp.OCSPResponse:
        """An OCSP answer about a certificate that this authority issued."""
        signer = responder or self
        revoked = status is ocsp.OCSPCertStatus.REVOKED
        builder = ocsp.OCSPResponseBuilder().add_response(
            cert=about.certificate,
            issuer=self.certificate,
            algorithm=SHA384(),
            cert_status=status,
            this_update=NOW - days_old * DAY,
            next_update=NOW + days_left * DAY,
            revocation_time=NOW - days_old * DAY if revoked else None,
            revocation_reason=reason,
        )
        builder = builder.responder_id(ocsp.OCSPResponderEncoding.HASH, signer.certificate)
        if responder is not None:
            builder = builder.certificates([responder.certificate])
        return builder.sign(signer.key, _hash(signer.key))


def issue(
    name: str,
    issuer: Holder | None,
    *,
    ca: bool,
    curve: ec.EllipticCurve | None = None,
    public_key: object = None,
    days_old: int = 100,
    days: int = 1000,
    usage: Sequence[str] = (),
    extensions: Sequence[x509.ExtensionType] = (),
    critical: bool = False,
) -> Holder:
    """Issues a certificate. `public_key` may be another's, whose private half we do not have."""
    key = ec.generate_private_key(curve or ec.SECP384R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    uses = {"key_cert_sign", "crl_sign"} if ca else set(usage)
    flags: Mapping[str, bool] = {use: use in uses for use in _USAGES}
    above = issuer.key if issuer else key
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer.certificate.subject if issuer else subject)
        .public_key(public_key or key.public_key())  # type: ignore[arg-type]
        .serial_number(x509.random_serial_number())
        .not_valid_before(NOW - days_old * DAY)
        .not_valid_after(NOW + days * DAY)
        .add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
        .add_extension(x509.KeyUsage(**flags), critical=True)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(above.public_key()), critical=False
        )
    )
    for extension in extensions:
        builder = builder.add_extension(extension, critical)
    return Holder(builder.sign(above, _hash(above)), key)


def sign(key: ec.EllipticCurvePrivateKey, message: bytes) -> tuple[int, int]:
    """Returns r and the smaller s, as a worker sends a signature of its hardware."""
    r, s = decode_dss_signature(key.sign(message, ec.ECDSA(_hash(key))))
    # Written independently of the verifier's code.
    order = _P256_ORDER if isinstance(key.curve, ec.SECP256R1) else _P384_ORDER
    return r, min(s, order - s)


def pem(*holders: Holder) -> str:
    return "".join(one.certificate.public_bytes(Encoding.PEM).decode() for one in holders)


def _hash(key: ec.EllipticCurvePrivateKey) -> SHA256 | SHA384:
    return SHA256() if isinstance(key.curve, ec.SECP256R1) else SHA384()
