"""Evidence of our own making, under roots of our own, with every knob an attacker would turn."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature
from cryptography.hazmat.primitives.hashes import SHA256, SHA384
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import NameOID

from sealring.identity.attestation import Challenge, Evidence, Trust

NOW = datetime(2026, 6, 1, tzinfo=UTC)
DAY = timedelta(days=1)
CHALLENGE = Challenge(bytes(range(32)), b"a worker's public key")
MEASUREMENT = b"\x5a" * 48
CHIP = bytes(range(64))
TCB = {"bootloader": 3, "tee": 0, "snp": 8, "microcode": 115}
PLAIN_POLICY = 0x30000
OIDS = {"bootloader": "3.1", "tee": "3.2", "snp": "3.3", "microcode": "3.8", "fmc": "3.9"}
LAYOUT = {"bootloader": 0, "tee": 1, "snp": 6, "microcode": 7}
TURIN_LAYOUT = {"fmc": 0, "bootloader": 1, "tee": 2, "snp": 3, "microcode": 7}
USAGES = (
    "digital_signature", "content_commitment", "key_encipherment", "data_encipherment",
    "key_agreement", "key_cert_sign", "crl_sign", "encipher_only", "decipher_only",
)  # fmt: skip


class Amd:
    """A stand-in for AMD: root, intermediate and one chip's key."""

    def __init__(
        self,
        product: str = "Milan",
        *,
        vlek: bool = False,
        chip: bytes = CHIP,
        tcb: dict[str, int] = TCB,
        leaf_days: int = 100,
        ask_is_ca: bool = True,
        stated_product: str | None = None,
        critical: bool = False,
    ) -> None:
        self.product, self.vlek, self.tcb, self.critical = product, vlek, tcb, critical
        self.ark_key, self.ask_key, self.key = (
            ec.generate_private_key(ec.SECP384R1()) for _ in range(3)
        )
        ask_name = f"SEV-VLEK-{product}" if vlek else f"SEV-{product}"
        self.ark = self._make(f"ARK-{product}", self.ark_key, None, ca=True)
        self.ask = self._make(ask_name, self.ask_key, (self.ark, self.ark_key), ca=ask_is_ca)
        stated = (stated_product or product).encode() + b"-B0"
        extensions = {"2": b"\x16" + bytes([len(stated)]) + stated}
        for name, value in tcb.items():
            body = value.to_bytes(2 if value > 127 else 1, "big")
            extensions[OIDS[name]] = bytes([2, len(body)]) + body
        if not vlek:
            extensions["4"] = chip
        leaf_name = "SEV-VLEK" if vlek else "SEV-VCEK"
        issuer = (self.ask, self.ask_key)
        self.leaf = self._make(leaf_name, self.key, issuer, False, leaf_days, extensions)

    def _make(
        self,
        name: str,
        key: ec.EllipticCurvePrivateKey,
        issuer: tuple[x509.Certificate, ec.EllipticCurvePrivateKey] | None,
        ca: bool,
        days: int = 1000,
        extensions: dict[str, bytes] | None = None,
    ) -> x509.Certificate:
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(issuer[0].subject if issuer else subject)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(NOW - 100 * DAY)
            .not_valid_after(NOW + days * DAY)
            .add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
            .add_extension(
                x509.KeyUsage(**{use: use == "key_cert_sign" and ca for use in USAGES}),
                critical=True,
            )
        )
        for oid, value in (extensions or {}).items():
            number = x509.ObjectIdentifier(f"1.3.6.1.4.1.3704.1.{oid}")
            builder = builder.add_extension(
                x509.UnrecognizedExtension(number, value), self.critical
            )
        return builder.sign(issuer[1] if issuer else key, SHA384())

    @property
    def chain(self) -> tuple[bytes, ...]:
        return tuple(one.public_bytes(Encoding.DER) for one in (self.leaf, self.ask, self.ark))

    def trust(
        self,
        *lists: x509.CertificateRevocationList,
        now: datetime = NOW,
        product: str | None = None,
    ) -> Trust:
        root = self.ark.fingerprint(SHA256()).hex()
        return Trust(now, amd={root: product or self.product}, lists=lists)

    def revocation_list(
        self, *revoked: x509.Certificate, days_old: int = 1, days_left: int = 10
    ) -> x509.CertificateRevocationList:
        builder = (
            x509.CertificateRevocationListBuilder()
            .issuer_name(self.ark.subject)
            .last_update(NOW - days_old * DAY)
            .next_update(NOW + days_left * DAY)
        )
        for one in revoked:
            builder = builder.add_revoked_certificate(
                x509.RevokedCertificateBuilder()
                .serial_number(one.serial_number)
                .revocation_date(NOW - days_old * DAY)
                .build()
            )
        return builder.sign(self.ark_key, SHA384())

    def report(
        self,
        *,
        challenge: Challenge = CHALLENGE,
        policy: int = PLAIN_POLICY,
        tcb: dict[str, int] | None = None,
        chip: bytes | None = None,
        version: int = 2,
        vmpl: int = 0,
        algorithm: int = 1,
        measurement: bytes = MEASUREMENT,
    ) -> bytes:
        raw = bytearray(0x2A0)
        raw[0:4] = version.to_bytes(4, "little")
        raw[8:16] = policy.to_bytes(8, "little")
        raw[0x30:0x34] = vmpl.to_bytes(4, "little")
        raw[0x34:0x38] = algorithm.to_bytes(4, "little")
        raw[0x48:0x4C] = (4 if self.vlek else 0).to_bytes(4, "little")
        raw[0x50:0x90] = challenge.report_data("snp")
        raw[0x90:0xC0] = measurement
        layout = TURIN_LAYOUT if self.product == "Turin" else LAYOUT
        for name, value in (tcb or self.tcb).items():
            raw[0x180 + layout[name]] = value
        own = b"" if self.vlek else (chip if chip is not None else CHIP)
        raw[0x1A0:0x1E0] = own.ljust(64, b"\0")
        r, s = decode_dss_signature(self.key.sign(bytes(raw), ec.ECDSA(SHA384())))
        return bytes(raw) + r.to_bytes(72, "little") + s.to_bytes(72, "little") + bytes(368)

    def evidence(self, report: bytes | None = None) -> Evidence:
        return Evidence("snp", CHALLENGE, {"report": report or self.report()}, self.chain)
