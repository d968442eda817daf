"""Authorities and credentials for tests, including some that must be refused."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from sealring.core.identity import Credentials, WorkerName
from sealring.core.identity.certificates import issue, make_authority
from sealring.core.identity.kept_key import KeptKey

NOW = datetime.now(UTC)
HOUR = timedelta(hours=1)


class Issuer:
    def __init__(self, name: str = "test authority") -> None:
        self.key = Ed25519PrivateKey.generate()
        self.certificate = make_authority(
            self.key, name, x509.random_serial_number(), NOW - 9000 * HOUR, NOW + 9000 * HOUR
        )

    def credentials(
        self,
        rank: int,
        *,
        job: str = "job",
        world: int | None = 4,
        now: datetime = NOW,
        lifetime: timedelta = HOUR,
        trusting: tuple[Issuer, ...] = (),
    ) -> Credentials:
        key = Ed25519PrivateKey.generate()
        certificate = issue(
            self.certificate,
            self.key,
            key.public_key(),
            WorkerName(job, rank),
            world,
            lifetime,
            now,
        )
        authorities = tuple(issuer.certificate for issuer in (self, *trusting))
        return Credentials(job, rank, certificate, authorities, KeptKey.of(key))

    def odd_certificate(
        self, *extensions: x509.ExtensionType, key: Ed25519PrivateKey | None = None
    ) -> x509.Certificate:
        """Issues a certificate with exactly these extensions."""
        builder = (
            x509.CertificateBuilder()
            .subject_name(x509.Name([]))
            .issuer_name(self.certificate.subject)
            .public_key((key or Ed25519PrivateKey.generate()).public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(NOW - HOUR)
            .not_valid_after(NOW + HOUR)
        )
        for extension in extensions:
            builder = builder.add_extension(extension, critical=False)
        return builder.sign(self.key, None)
