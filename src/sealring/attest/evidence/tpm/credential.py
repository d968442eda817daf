"""A secret that only one TPM can open, and only for one attestation key that lives in it.

Anybody can make a key and sign something that looks like a quote. So the verifier encrypts a secret
to the TPM's endorsement key (EK), which its maker has certified, together with the name of the
attestation key (AK). The TPM gives the secret out only if it holds both keys (TPM 2.0 part 1,
"credential protection"). The quote's qualifying data must then contain the secret, so only that TPM
can have made the quote.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence
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

from sealring.attest.evidence.chains import VerifiedChain, extension_of, verify_chain
from sealring.attest.evidence.encoding import first_value, sized, unknown_evidence
from sealring.attest.evidence.tpm.structures import Public, PublicKey, parse_public
from sealring.attest.evidence.trust import Trust
from sealring.errors import ForgedEvidence, MalformedEvidence

MAX_OTHERS: Final = 4
"""The most endorsement keys of one TPM, besides the one of its chain."""
_LABEL: Final = b"IDENTITY\0"
_EK_CERTIFICATE: Final = x509.ObjectIdentifier("2.23.133.8.1")
_TPM_PURPOSES: Final = {_EK_CERTIFICATE, x509.ObjectIdentifier("2.23.133.8.3")}
_FIXED_TPM, _FIXED_PARENT, _ORIGIN = 1 << 1, 1 << 4, 1 << 5
_RESTRICTED, _DECRYPT, _SIGN = 1 << 16, 1 << 17, 1 << 18
_AK: Final = _FIXED_TPM | _FIXED_PARENT | _ORIGIN | _RESTRICTED | _SIGN


def split_certificates(data: bytes) -> list[bytes]:
    """Splits DER certificates that follow each other."""
    found = []
    try:
        while data:
            found.append(first_value(data))
            data = data[len(found[-1]) :]
    except ValueError:
        raise MalformedEvidence("the other endorsement keys' certificates are not DER") from None
    if len(found) > MAX_OTHERS:
        raise MalformedEvidence(f"a TPM shows at most {MAX_OTHERS} other endorsement keys")
    return found


def subject(ek_certificate: bytes, ak: bytes, others: Sequence[bytes] = ()) -> bytes:
    """Whom a credential is for. Each part is hashed first, so no two inputs give the same bytes."""
    parts = [hashlib.sha256(one).digest() for one in (ek_certificate, ak, *others)]
    return hashlib.sha256(b"".join(parts)).digest()


def joint_secret(secrets: Sequence[bytes]) -> bytes:
    """Return one secret made of all `secrets`, which only a TPM that opened them all can know."""
    return secrets[0] if len(secrets) == 1 else hashlib.sha256(b"".join(secrets)).digest()


def machine_name(endorsement: x509.Certificate) -> str:
    """The TPM's name, by its endorsement key, because a certificate has more than one spelling."""
    key = endorsement.public_key()
    return hashlib.sha256(
        key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    ).hexdigest()


def verify_endorsement(chain: Sequence[bytes], trust: Trust) -> VerifiedChain:
    """Verifies an EK's certificate. Its chain must end at a TPM maker that the policy names."""
    verified = verify_tpm_chain(chain, trust)
    if not _encrypts(verified):
        raise ForgedEvidence("the certificate is not one for a TPM's endorsement key")
    return verified


def verify_tpm_chain(chain: Sequence[bytes], trust: Trust) -> VerifiedChain:
    """Verifies the certificate of a TPM's key: an EK, which decrypts, or an AK, which signs."""
    verified = verify_chain(chain, trust.tpm, trust)
    if not _encrypts(verified) and not _signs(verified):
        raise ForgedEvidence("the certificate is not one for a TPM's endorsement key")
    return verified


def certifies(chain: VerifiedChain, ak: PublicKey) -> bool:
    """Whether the leaf is this AK's own certificate.

    If it is, its issuer checked that the AK lives in a TPM. If not, the leaf is an EK's
    certificate, and a credential must show that the AK lives in the TPM that holds the EK.
    """
    if not _signs(chain):
        return False
    if chain.leaf.public_key() != ak:
        raise ForgedEvidence("the certificate is for another attestation key than the quote's")
    return True


def _encrypts(chain: VerifiedChain) -> bool:
    usage = extension_of(chain.leaf, x509.KeyUsage)
    able = usage is not None and (usage.key_encipherment or usage.key_agreement)
    return able and _EK_CERTIFICATE in purposes_of(chain)


def _signs(chain: VerifiedChain) -> bool:
    """Some issuers put the EK's purpose into AKs' certificates too, so the key usage decides."""
    usage = extension_of(chain.leaf, x509.KeyUsage)
    able = usage is not None and usage.digital_signature
    return able and not _encrypts(chain) and bool(_TPM_PURPOSES & purposes_of(chain))


def purposes_of(chain: VerifiedChain) -> set[x509.ObjectIdentifier]:
    """The leaf's purposes. If it names none, its issuer may be limited to one purpose."""
    for certificate in chain.certificates[:2]:
        found = extension_of(certificate, x509.ExtendedKeyUsage)
        if found is not None:
            return set(found)
    return set()


def check_ak(ak: bytes) -> Public:
    """Requires that the key never leaves its TPM and signs only what the TPM itself has made."""
    public = parse_public(ak)
    if public.attributes & (_AK | _DECRYPT) != _AK:
        raise ForgedEvidence(
            "the TPM key may leave its TPM, or signs more than the TPM's own statements"
        )
    return public


def seal_credential(ek: object, name: bytes, secret: bytes) -> bytes:
    """Encrypts a credential, with the hash and cipher of TCG's default template for such an EK."""
    algorithm, cipher_bytes = _template(ek)
    seed_bytes = algorithm.digest_size
    if isinstance(ek, rsa.RSAPublicKey):
        seed = secrets.token_bytes(seed_bytes)
        oaep = padding.OAEP(padding.MGF1(algorithm), algorithm, _LABEL)
        locked = ek.encrypt(seed, oaep)
    elif isinstance(ek, ec.EllipticCurvePublicKey):
        ours = ec.generate_private_key(ek.curve)
        mine, theirs, size = ours.public_key().public_numbers(), ek.public_numbers(), seed_bytes
        x, y, theirs_x = (n.to_bytes(size, "big") for n in (mine.x, mine.y, theirs.x))
        info = _LABEL + x + theirs_x
        seed = ConcatKDFHash(algorithm, seed_bytes, info).derive(ours.exchange(ec.ECDH(), ek))
        locked = sized(x) + sized(y)
    storage = kdfa(seed, b"STORAGE", name, cipher_bytes, algorithm)
    cipher = Cipher(AES(storage), CFB(bytes(16))).encryptor()
    hidden = cipher.update(sized(secret)) + cipher.finalize()
    outer = hmac.HMAC(kdfa(seed, b"INTEGRITY", b"", seed_bytes, algorithm), algorithm)
    outer.update(hidden + name)
    return sized(sized(outer.finalize()) + hidden) + sized(locked)


def _template(ek: object) -> tuple[hashes.HashAlgorithm, int]:
    """The hash of such an EK's name, and the size of the AES key that it uses for protection."""
    size = getattr(ek, "key_size", 0)
    curve = getattr(getattr(ek, "curve", None), "name", "")
    if (isinstance(ek, rsa.RSAPublicKey) and size == 2048) or curve == "secp256r1":
        return hashes.SHA256(), 16
    if (isinstance(ek, rsa.RSAPublicKey) and size == 3072) or curve == "secp384r1":
        return hashes.SHA384(), 32
    raise unknown_evidence(
        "endorsement keys are RSA of 2048 or 3072 bits, or on P-256 or P-384, and this is not"
    )


def kdfa(
    seed: bytes,
    label: bytes,
    context: bytes,
    size: int,
    algorithm: hashes.HashAlgorithm | None = None,
) -> bytes:
    """KDFa, which is SP 800-108's counter mode."""
    return KBKDFHMAC(
        algorithm or hashes.SHA256(), Mode.CounterMode, size, 4, 4, CounterLocation.BeforeFixed,
        label, context, None,
    ).derive(seed)  # fmt: skip
