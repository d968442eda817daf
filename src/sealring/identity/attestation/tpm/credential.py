"""A secret that only one TPM can open, and only for one attestation key that lives in it.

Anybody can make a key and sign what looks like a quote. So the verifier encrypts a secret to the
TPM's endorsement key (EK, whose certificate is its maker's) under the name of the attestation key
(AK); the TPM gives it out only if it holds both (TPM 2.0 part 1, "credential protection"). The
secret then goes into the quote's qualifying data: one who could not open it cannot have made it.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from cryptography import x509
from cryptography.hazmat.decrepit.ciphers.modes import CFB
from cryptography.hazmat.primitives import hashes, hmac
from cryptography.hazmat.primitives.asymmetric import ec, padding, rsa
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.kdf.concatkdf import ConcatKDFHash
from cryptography.hazmat.primitives.kdf.kbkdf import KBKDFHMAC, CounterLocation, Mode
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from sealring.errors import ForgedEvidence, UnknownEvidence
from sealring.identity.attestation.chains import VerifiedChain, verify_chain
from sealring.identity.attestation.roots import Trust
from sealring.identity.attestation.tpm.structures import Public, parse_public

_LABEL: Final = b"IDENTITY\0"
_EK_CERTIFICATE: Final = x509.ObjectIdentifier("2.23.133.8.1")
_FIXED_TPM, _FIXED_PARENT, _ORIGIN = 1 << 1, 1 << 4, 1 << 5
_RESTRICTED, _DECRYPT, _SIGN = 1 << 16, 1 << 17, 1 << 18
_AK: Final = _FIXED_TPM | _FIXED_PARENT | _ORIGIN | _RESTRICTED | _SIGN


@dataclass(frozen=True, slots=True)
class Credential:
    """What the verifier keeps (`Challenge.credential`), and what it sends to the TPM."""

    expected: bytes
    blob: bytes
    """TPM2B_ID_OBJECT, then TPM2B_ENCRYPTED_SECRET."""


def make_credential(chain: Sequence[bytes], ak: bytes, trust: Trust) -> Credential:
    """For a TPM that brings its EK's chain and the AK's public part (TPMT_PUBLIC)."""
    endorsement = verify_endorsement(chain, trust)
    name = check_ak(ak).name
    secret = secrets.token_bytes(32)
    blob = seal_credential(endorsement.leaf.public_key(), name, secret)
    return Credential(subject(chain[0], ak) + secret, blob)


def subject(ek_certificate: bytes, ak: bytes) -> bytes:
    """Whom a credential is for. Both are hashed first, so no two pairs meet."""
    parts = hashlib.sha256(ek_certificate).digest() + hashlib.sha256(ak).digest()
    return hashlib.sha256(parts).digest()


def machine_name(endorsement: x509.Certificate) -> str:
    """The TPM by its endorsement key: its certificate can be spelled in more than one way."""
    key = endorsement.public_key()
    return hashlib.sha256(
        key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    ).hexdigest()


def verify_endorsement(chain: Sequence[bytes], trust: Trust) -> VerifiedChain:
    """A maker of TPMs, one that the policy names, issued the leaf for an EK."""
    verified = verify_chain(chain, trust.tpm, trust)
    try:
        extensions = verified.leaf.extensions
        usage = extensions.get_extension_for_class(x509.KeyUsage).value
        allowed = usage.key_encipherment or usage.key_agreement
        purposes = extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
        allowed = allowed and _EK_CERTIFICATE in purposes
    except x509.ExtensionNotFound:
        allowed = False
    if not allowed:
        raise ForgedEvidence("the certificate is not one for a TPM's endorsement key")
    return verified


def check_ak(ak: bytes) -> Public:
    """The key never leaves its TPM and signs only what the TPM itself has made."""
    public = parse_public(ak)
    if public.attributes & (_AK | _DECRYPT) != _AK:
        raise ForgedEvidence(
            "the TPM key may leave its TPM, or signs more than the TPM's own statements"
        )
    return public


def seal_credential(ek: object, name: bytes, secret: bytes) -> bytes:
    """With the symmetric algorithms of TCG's default EK templates: SHA-256 and AES-128."""
    if isinstance(ek, rsa.RSAPublicKey) and ek.key_size == 2048:
        seed = secrets.token_bytes(32)
        oaep = padding.OAEP(padding.MGF1(hashes.SHA256()), hashes.SHA256(), _LABEL)
        locked = ek.encrypt(seed, oaep)
    elif isinstance(ek, ec.EllipticCurvePublicKey) and isinstance(ek.curve, ec.SECP256R1):
        ours = ec.generate_private_key(ek.curve)
        mine, theirs = ours.public_key().public_numbers(), ek.public_numbers()
        x, y, theirs_x = (n.to_bytes(32, "big") for n in (mine.x, mine.y, theirs.x))
        info = _LABEL + x + theirs_x
        seed = ConcatKDFHash(hashes.SHA256(), 32, info).derive(ours.exchange(ec.ECDH(), ek))
        locked = _sized(x) + _sized(y)
    else:
        raise UnknownEvidence("endorsement keys are RSA of 2048 bits or on P-256, and this is not")
    cipher = Cipher(AES(_derive(seed, b"STORAGE", name, 16)), CFB(bytes(16))).encryptor()
    hidden = cipher.update(_sized(secret)) + cipher.finalize()
    outer = hmac.HMAC(_derive(seed, b"INTEGRITY", b"", 32), hashes.SHA256())
    outer.update(hidden + name)
    return _sized(_sized(outer.finalize()) + hidden) + _sized(locked)


def _derive(seed: bytes, label: bytes, context: bytes, size: int) -> bytes:
    """KDFa is SP 800-108's counter mode."""
    return KBKDFHMAC(
        hashes.SHA256(), Mode.CounterMode, size, 4, 4, CounterLocation.BeforeFixed,
        label, context, None,
    ).derive(seed)  # fmt: skip


def _sized(data: bytes) -> bytes:
    return len(data).to_bytes(2, "big") + data
