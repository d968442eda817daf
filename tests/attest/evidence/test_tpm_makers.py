"""Certificates as real TPM makers issue them: without a purpose, not quite DER, or for AKs."""

from __future__ import annotations

import base64
import hashlib
from dataclasses import replace
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding

from sealring.attest.evidence import Evidence, Trust, judge, parse_policy, verify_evidence
from sealring.attest.evidence.chains import load_certificate, verify_chain
from sealring.attest.evidence.encoding import with_sets_in_order
from sealring.attest.evidence.tpm.credential import (
    certifies,
    verify_endorsement,
    verify_tpm_chain,
)
from sealring.errors import AttestationError, ForgedEvidence, MalformedEvidence, UntrustedChain
from tests.attest.evidence.vectors import vectors
from tests.attest.minting import CHALLENGE, NOW
from tests.attest.minting.tpm import Maker, public_of, sign
from tests.codes import coded

MAKER = Maker()
GOOGLE = {
    "pca": ("ca/gcp_ek_ak_ca_intermediate_v3.crt", "ca/gcp_ek_ak_ca_root.crt"),
    "uca": ("ca/tpm_ek_intermediate_3.crt", "ca/tpm_ek_root_1.cer"),
}


def der_of(path: Path) -> bytes:
    content = path.read_bytes()
    if not content.startswith(b"-----"):
        return content
    return base64.b64decode(b"".join(content.strip().splitlines()[1:-1]))


def google(issuer: str, key: str) -> tuple[tuple[bytes, ...], Trust]:
    folder = vectors("tpm")
    names = (f"gce_{issuer}_tpm_{key}_cert.pem", *GOOGLE[issuer])
    chain = tuple(der_of(folder / name) for name in names)
    root = x509.load_der_x509_certificate(chain[-1]).fingerprint(SHA256()).hex()
    return chain, Trust(load_certificate(chain[0]).not_valid_before_utc, tpm=frozenset({root}))


@pytest.mark.parametrize("issuer", ["pca", "uca"])
@pytest.mark.parametrize("key", ["rsa", "ecc"])
def test_googles_endorsement_keys(issuer: str, key: str) -> None:
    """Today's issuer writes no purpose into them, but its own certificate is limited to one."""
    chain, trust = google(issuer, f"{key}_enc")
    assert verify_endorsement(chain, trust).root in trust.tpm


@pytest.mark.parametrize("issuer", ["pca", "uca"])
@pytest.mark.parametrize("key", ["rsa", "ecc"])
def test_googles_attestation_keys(issuer: str, key: str) -> None:
    chain, trust = google(issuer, f"{key}_sign")
    with pytest.raises(ForgedEvidence, match="endorsement key"):
        verify_endorsement(chain, trust)
    verified = verify_tpm_chain(chain, trust)
    assert certifies(verified, verified.leaf.public_key())  # type: ignore[arg-type]
    with pytest.raises(ForgedEvidence, match="another attestation key"):
        certifies(verified, MAKER.ak_key.public_key())


@pytest.mark.parametrize("name", ["0100", "1110", "1111", "2110", "2111"])
def test_nuvotons_roots_whose_names_are_not_in_order(name: str) -> None:
    raw = der_of(vectors("tpm") / f"NUVO_{name}.pem")
    with pytest.raises(ValueError, match="InvalidSetOrdering"):
        _ = x509.load_der_x509_certificate(raw).issuer
    root = load_certificate(raw)
    assert f"Nuvoton TPM Root CA {name}" in root.subject.rfc4514_string()
    pinned = frozenset({hashlib.sha256(raw).hexdigest()})
    trust = Trust(root.not_valid_before_utc, tpm=pinned)
    # The root is signed by itself, over its bytes as they are.
    assert verify_chain((raw, raw), pinned, trust).leaf.subject == root.subject
    bent = bytearray(raw)
    bent[raw.index(b"Nuvoton TPM") + 2] ^= 1
    with pytest.raises(UntrustedChain):
        verify_chain((bytes(bent), raw), pinned, trust)


def unordered() -> tuple[bytes, bytes]:
    """A certificate of the tests' maker, signed with a set in its issuer's name reversed."""
    pair = x509.RelativeDistinguishedName(
        [
            x509.NameAttribute(x509.NameOID.COUNTRY_NAME, "TW"),
            x509.NameAttribute(x509.NameOID.COMMON_NAME, "maker"),
        ]
    )
    name = x509.Name([pair])
    key = ec.generate_private_key(ec.SECP256R1())
    usage = dict.fromkeys(
        (
            "digital_signature", "content_commitment", "key_encipherment", "data_encipherment",
            "key_agreement", "crl_sign", "encipher_only", "decipher_only",
        ),
        False,
    )  # fmt: skip
    root = (
        x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
        .serial_number(1).not_valid_before(NOW).not_valid_after(NOW.replace(year=2030))
        .add_extension(x509.BasicConstraints(True, None), True)
        .add_extension(x509.KeyUsage(key_cert_sign=True, **usage), True)
        .sign(key, SHA256())
    )  # fmt: skip
    leaf = (
        x509.CertificateBuilder().subject_name(x509.Name([])).issuer_name(name)
        .public_key(MAKER.ek.certificate.public_key()).serial_number(2).not_valid_before(NOW)
        .not_valid_after(NOW.replace(year=2030)).sign(key, SHA256())
    )  # fmt: skip
    tbs = leaf.tbs_certificate_bytes
    encoded = name.public_bytes()
    members = sorted(
        x509.Name([x509.RelativeDistinguishedName([one])]).public_bytes()[4:] for one in pair
    )
    turned = encoded.replace(b"".join(members), b"".join(reversed(members)))
    assert turned != encoded
    tbs = tbs.replace(encoded, turned)
    signature = key.sign(tbs, ec.ECDSA(SHA256()))
    bits = b"\x03" + bytes([len(signature) + 1]) + b"\0" + signature
    body = tbs + bytes.fromhex("300a06082a8648ce3d040302") + bits
    return b"\x30\x82" + len(body).to_bytes(2, "big") + body, root.public_bytes(Encoding.DER)


def test_a_certificate_below_such_a_root_counts_as_its_issuer_signed_it() -> None:
    leaf, root = unordered()
    pinned = frozenset({x509.load_der_x509_certificate(root).fingerprint(SHA256()).hex()})
    trust = Trust(NOW, tpm=pinned)
    assert verify_chain((leaf, root), pinned, trust).leaf.serial_number == 2
    # With its sets sorted, it is not what the issuer signed.
    ordered = with_sets_in_order(leaf)
    assert ordered != leaf
    for other in (ordered, leaf[:-1] + bytes([leaf[-1] ^ 1])):
        with pytest.raises(UntrustedChain, match="did not issue"):
            verify_chain((other, root), pinned, trust)
    for cut in (leaf[:-1], leaf + b"\0", b"\x30\x80\0\0", b"\x30" * 40, b""):
        with pytest.raises(MalformedEvidence):
            load_certificate(cut)


def certified(maker: Maker) -> Evidence:
    chain = (maker.ak_certificate.der, *maker.chain[1:])
    return replace(maker.evidence(CHALLENGE), chain=chain)


def test_a_quote_by_a_key_that_has_a_certificate_needs_no_credential() -> None:
    evidence = certified(MAKER)
    worker = verify_evidence(evidence, CHALLENGE, MAKER.trust())
    assert worker.guest["ak_certificate"] == 1
    with pytest.raises(AttestationError, check=coded("evidence.not_bound")):
        verify_evidence(evidence, replace(CHALLENGE, nonce=bytes(32)), MAKER.trust())
    own = ec.generate_private_key(ec.SECP256R1())
    forged = {"ak": public_of(own), "signature": sign(own, evidence.parts["quote"])}
    with pytest.raises(ForgedEvidence, match="another attestation key"):
        verify_evidence(
            replace(evidence, parts={**evidence.parts, **forged}), CHALLENGE, MAKER.trust()
        )


def test_a_policy_says_whether_such_certificates_count() -> None:
    worker = verify_evidence(certified(MAKER), CHALLENGE, MAKER.trust())
    policy = f"""version = 1
[freshness]
require_revocation_lists = false
[tpm]
roots = ["{MAKER.root.fingerprint}"]
pcrs = {{4 = ["{worker.registers["pcr4"]}"]}}
unchecked = ["pcr0", "pcr7", "ima"]
"""
    refused = [rule for rule in judge(parse_policy(policy), worker, None).rules if rule.refusal]
    assert [(one.name, one.refusal) for one in refused] == [
        ("ak_certificate", "policy.guest_not_allowed")
    ]
    assert judge(parse_policy(policy + "ak_certificates = true\n"), worker, None).admitted
