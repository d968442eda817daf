"""The native reader of certificates agrees with `cryptography`, also on changed certificates."""

from __future__ import annotations

import random
import warnings
from datetime import timedelta
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import dsa, ec, ed448, ed25519, padding, rsa, x25519
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import AuthorityInformationAccessOID, ExtendedKeyUsageOID, NameOID

from sealring import _native
from sealring.core.identity.certificates import (
    ATTESTATION_OID,
    WORLD_SIZE_OID,
    claims_from,
    make_authority,
)
from sealring.core.identity.verification import is_issued_by, signed_certificate
from sealring.errors import PeerNotAdmitted
from tests.codes import coded
from tests.core.identity import reference
from tests.core.identity.issuing import HOUR, NOW, Issuer
from tests.core.identity.reference import NO_WORKER, NONE, UNSIGNED, Node, Outcome, mutated, parse

ISSUER = Issuer()
AUTHORITY = ISSUER.certificate
URI = x509.UniformResourceIdentifier("spiffe://sealring/job/rank/1")
SAN = x509.SubjectAlternativeName([URI])
NOT_CA = x509.BasicConstraints(ca=False, path_length=None)
RSA_KEY = rsa.generate_private_key(65537, 2048)


def native(der: bytes, authority: x509.Certificate = AUTHORITY) -> Outcome:
    (read,) = _native.read_certificates((der,), (_native.Authority(der_of(authority)),))
    if not read.readable:
        return NONE
    if not read.signed:
        return UNSIGNED
    if not read.states_constraints or read.is_authority:
        return NO_WORKER
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            claims = claims_from(read)
    except ValueError:
        return NO_WORKER
    return claims.name.uri, claims.world, read.key, read.starts, read.ends


def der_of(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(Encoding.DER)


def signed_again(content: bytes, certificate: x509.Certificate) -> bytes:
    """Returns a certificate with this content, signed by the authority."""
    algorithm = parse(der_of(certificate))[0].parts[1]  # type: ignore[index]
    signature = Node(3, b"\0" + ISSUER.key.sign(content))
    return Node(0x30, content + algorithm.encode() + signature.encode()).encode()


def odd(*extensions: x509.ExtensionType, key: Any = None, subject: Any = ()) -> x509.Certificate:
    builder = (
        x509.CertificateBuilder()
        .subject_name(x509.Name(list(subject)))
        .issuer_name(AUTHORITY.subject)
        .public_key((key or ed25519.Ed25519PrivateKey.generate()).public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(NOW - HOUR)
        .not_valid_after(NOW + timedelta(days=36500))
    )
    for extension in extensions:
        builder = builder.add_extension(extension, critical=False)
    return builder.sign(ISSUER.key, None)


WHOLE = odd(
    SAN,
    NOT_CA,
    x509.KeyUsage(True, *[False] * 8),
    x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH]),
    x509.AuthorityKeyIdentifier(b"k" * 20, [x509.DirectoryName(AUTHORITY.subject)], 7),
    x509.CRLDistributionPoints(
        [x509.DistributionPoint([x509.UniformResourceIdentifier("http://a")], None, None, None)]
    ),
    x509.AuthorityInformationAccess(
        [x509.AccessDescription(AuthorityInformationAccessOID.OCSP, URI)]
    ),
    x509.CertificatePolicies([x509.PolicyInformation(x509.ObjectIdentifier("1.2.3"), None)]),
    x509.IssuerAlternativeName([x509.DNSName("a")]),
    x509.UnrecognizedExtension(WORLD_SIZE_OID, b"\x02\x01\x04"),
    x509.UnrecognizedExtension(ATTESTATION_OID, b"{}"),
    x509.UnrecognizedExtension(x509.ObjectIdentifier("1.2.3.4"), b"anything"),
    subject=[x509.NameAttribute(NameOID.COMMON_NAME, "a name")],
)

ISSUED = ISSUER.credentials(1).certificate
ON_A_CURVE = odd(SAN, NOT_CA, key=ec.generate_private_key(ec.SECP256R1()))


@pytest.mark.parametrize(
    "certificate",
    [
        ISSUED,
        ISSUER.credentials(65535, world=None, job="a-job_of.1").certificate,
        WHOLE,
        ON_A_CURVE,
        odd(SAN, NOT_CA, key=ec.generate_private_key(ec.SECP521R1())),
        odd(SAN, NOT_CA, key=ed448.Ed448PrivateKey.generate()),
        odd(SAN, NOT_CA, key=RSA_KEY),
    ],
    ids=["issued", "no world", "all extensions", "P-256", "P-521", "Ed448", "RSA"],
)
def test_what_a_worker_shows_is_read_alike(certificate: x509.Certificate) -> None:
    expected = reference.judged(der_of(certificate), AUTHORITY)
    assert isinstance(expected, tuple)
    assert native(der_of(certificate)) == expected


@pytest.mark.parametrize(
    "certificate",
    [
        AUTHORITY,
        Issuer().credentials(1).certificate,
        odd(),
        odd(NOT_CA),
        odd(SAN),
        odd(SAN, x509.BasicConstraints(ca=True, path_length=0)),
        odd(x509.SubjectAlternativeName([URI, URI]), NOT_CA),
        odd(x509.SubjectAlternativeName([x509.RFC822Name("a@b")]), NOT_CA),
        odd(SAN, NOT_CA, x509.UnrecognizedExtension(WORLD_SIZE_OID, b"\x02\x01\x00")),
        odd(SAN, NOT_CA, x509.UnrecognizedExtension(WORLD_SIZE_OID, b"\x02\x03\x01\x00\x01")),
        odd(SAN, NOT_CA, x509.UnrecognizedExtension(WORLD_SIZE_OID, b"\x02\x02\x00\x04")),
        odd(SAN, NOT_CA, x509.UnrecognizedExtension(WORLD_SIZE_OID, b"\x02\x01\x84")),
        odd(SAN, NOT_CA, x509.UnrecognizedExtension(WORLD_SIZE_OID, b"\x02\x01\x04\x00")),
    ],
)
def test_what_no_worker_shows_is_refused_alike(certificate: x509.Certificate) -> None:
    expected = reference.judged(der_of(certificate), AUTHORITY)
    assert expected in (UNSIGNED, NO_WORKER)
    assert native(der_of(certificate)) == expected


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.threat("J2")
def test_changed_certificates_that_the_authority_signed_are_read_alike(seed: int) -> None:
    choose = random.Random(seed)
    seen: dict[str, int] = {}
    for number in range(600):
        certificate = (ISSUED, WHOLE, ISSUED, ON_A_CURVE)[number % 4]
        der = signed_again(mutated(certificate.tbs_certificate_bytes, choose), certificate)
        expected, read = reference.judged(der, AUTHORITY), native(der)
        if certificate is ON_A_CURVE and isinstance(read, str):
            # The native reader does not check foreign keys, and leaves them to `cryptography`.
            assert isinstance(expected, str), der.hex()
        else:
            assert read == expected, der.hex()
        kind = expected if isinstance(expected, str) else "accepted"
        seen[kind] = seen.get(kind, 0) + 1
    assert seen.keys() == {NONE, UNSIGNED, NO_WORKER, "accepted"}


@pytest.mark.threat("J2")
def test_bytes_changed_at_random_are_never_signed() -> None:
    choose = random.Random(1)
    der = der_of(ISSUER.credentials(1).certificate)
    for _ in range(2000):
        changed = bytearray(der)
        changed[choose.randrange(len(der))] ^= 1 << choose.randrange(8)
        cut = bytes(changed[: choose.choice([len(der), choose.randrange(len(der))])])
        assert native(cut) in (NONE, UNSIGNED)
        assert native(cut) == reference.judged(cut, AUTHORITY), cut.hex()


@pytest.mark.parametrize(
    ("key", "algorithm", "more"),
    [
        (ed448.Ed448PrivateKey.generate(), None, {}),
        (ec.generate_private_key(ec.SECP256R1()), hashes.SHA256(), {}),
        (ec.generate_private_key(ec.SECP384R1()), hashes.SHA512(), {}),
        (RSA_KEY, hashes.SHA256(), {}),
        (RSA_KEY, hashes.SHA3_256(), {}),
        (
            RSA_KEY,
            hashes.SHA384(),
            {"rsa_padding": padding.PSS(padding.MGF1(hashes.SHA384()), padding.PSS.MAX_LENGTH)},
        ),
    ],
    ids=["Ed448", "ECDSA", "ECDSA with another curve and hash", "RSA", "RSA with SHA-3", "PSS"],
)
def test_authorities_with_other_keys_than_ours_sign(key: Any, algorithm: Any, more: Any) -> None:
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "another tool's")])
    other = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "Another tool's")])

    def made(subject: x509.Name, issuer: x509.Name, holder: Any) -> x509.CertificateBuilder:
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(issuer)
            .public_key(holder.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(NOW - HOUR)
            .not_valid_after(NOW + HOUR)
            .add_extension(SAN, critical=True)
            .add_extension(NOT_CA, critical=True)
        )

    worker = ed25519.Ed25519PrivateKey.generate()
    authority = made(name, name, key).sign(key, algorithm, **more)
    good = made(x509.Name([]), name, worker).sign(key, algorithm, **more)
    named = made(x509.Name([]), other, worker).sign(key, algorithm, **more)
    assert is_issued_by(good, (authority,))
    assert is_issued_by(good, (AUTHORITY, authority))
    for certificate, believed in ((named, authority), (good, AUTHORITY)):
        assert not is_issued_by(certificate, (believed,))
        assert reference.judged(der_of(certificate), believed) == UNSIGNED
    content = bytearray(der_of(good))
    content[-1] ^= 1
    assert native(bytes(content), authority) == UNSIGNED


@pytest.mark.parametrize(
    "key",
    [x25519.X25519PrivateKey.generate(), dsa.generate_private_key(2048)],
    ids=["X25519", "DSA"],
)
def test_a_key_that_workers_do_not_sign_with_is_refused(key: Any) -> None:
    with pytest.raises(
        PeerNotAdmitted,
        match="its public key cannot be used",
        check=coded("handshake.unknown_authority"),
    ):
        signed_certificate(odd(SAN, NOT_CA, key=key), (AUTHORITY,), "10.0.0.1:5")


@pytest.mark.threat("J3")
def test_a_compressed_point_is_the_same_key() -> None:
    """The broker revokes keys by their digest, so one key must have one digest."""
    key = ec.generate_private_key(ec.SECP256R1())
    certificate = odd(SAN, NOT_CA, key=key)
    numbers = key.public_key().public_numbers()
    point = b"\4" + numbers.x.to_bytes(32, "big") + numbers.y.to_bytes(32, "big")
    short = bytes([2 + numbers.y % 2]) + numbers.x.to_bytes(32, "big")
    (root,) = parse(certificate.tbs_certificate_bytes)
    (bits,) = [node for node in root.all() if node.content == b"\0" + point]
    bits.content = b"\0" + short
    compressed = native(signed_again(root.encode(), certificate))
    assert compressed == native(der_of(certificate))


@pytest.mark.parametrize("hours", [-1, 0, 1, 500_000])
def test_dates_of_this_century_and_the_next_are_read(hours: int) -> None:
    moment = (NOW + hours * HOUR).replace(microsecond=0)
    authority = make_authority(ISSUER.key, "dates", 1, moment - HOUR, moment)
    read = _native.read_certificate(der_of(authority))
    assert (read.starts, read.ends) == (moment.timestamp() - 3600, moment.timestamp())


def test_wrong_signatures_are_named_by_their_place() -> None:
    keys: list[Any] = [
        ed25519.Ed25519PrivateKey.generate(),
        ed448.Ed448PrivateKey.generate(),
        ec.generate_private_key(ec.SECP256R1()),
        RSA_KEY,
    ]
    pss = padding.PSS(padding.MGF1(hashes.SHA256()), padding.PSS.DIGEST_LENGTH)
    long_salt = padding.PSS(padding.MGF1(hashes.SHA256()), padding.PSS.MAX_LENGTH)
    message = b"what they sign"
    signatures = (
        keys[0].sign(message),
        keys[1].sign(message),
        keys[2].sign(message, ec.ECDSA(hashes.SHA256())),
        RSA_KEY.sign(message, pss, hashes.SHA256()),
    )
    read = tuple(_native.read_certificate(der_of(odd(SAN, NOT_CA, key=key))) for key in keys)
    assert _native.wrong_signatures(read, signatures, message) == []
    assert _native.wrong_signatures(read, signatures, b"something else") == [0, 1, 2, 3]
    assert _native.wrong_signatures(read, signatures[::-1], message) == [0, 1, 2, 3]
    assert _native.wrong_signatures(read, (b"", *signatures[1:]), message) == [0]
    salted = (*signatures[:3], RSA_KEY.sign(message, long_salt, hashes.SHA256()))
    assert _native.wrong_signatures(read, salted, message) == [3]
    with pytest.raises(ValueError, match="as many"):
        _native.wrong_signatures(read, signatures[:2], message)


def test_a_certificate_that_is_not_signed_claims_nothing() -> None:
    (read,) = _native.read_certificates((der_of(Issuer().credentials(1).certificate),), ())
    assert (read.signed, read.uri, read.key) == (False, "", "00" * 32)
    assert _native.wrong_signatures((read,), (b"",), b"") == [0]


@pytest.mark.parametrize(("hashed", "believed"), [("SHA256", True), ("SHA1", False)])
def test_an_authority_that_signs_with_sha_1_is_not_believed(hashed: str, believed: bool) -> None:
    """Neither `cryptography` nor TLS at OpenSSL's security level 1 believes it."""
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "old")])
    builder = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(RSA_KEY.public_key())
        .serial_number(1)
        .not_valid_before(NOW - HOUR)
        .not_valid_after(NOW + HOUR)
    )
    authority = builder.sign(RSA_KEY, hashes.SHA256())
    family = bytes.fromhex("2a864886f70d0101")  # PKCS #1's
    names = {"SHA256": family + b"\x0b", "SHA1": family + b"\x05"}
    content = authority.tbs_certificate_bytes.replace(names["SHA256"], names[hashed])
    algorithm = Node(0x30, Node(6, names[hashed]).encode() + b"\5\0")
    signature = RSA_KEY.sign(content, padding.PKCS1v15(), getattr(hashes, hashed)())
    der = Node(0x30, content + algorithm.encode() + Node(3, b"\0" + signature).encode()).encode()
    assert is_issued_by(x509.load_der_x509_certificate(der), (authority,)) is believed
