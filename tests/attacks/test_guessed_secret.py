"""An attacker connects once, without a certificate, and tests guesses of the job secret offline."""

from __future__ import annotations

import base64
import secrets
import ssl
import string

import pytest
from cryptography import x509

from sealring import _native
from sealring.core.handshake import accept
from sealring.core.identity import Credentials, load_credentials
from sealring.core.identity.secret import decode_secret, derive_authority, read_secret
from sealring.core.identity.verification import is_issued_by
from sealring.errors import BadCredential
from tests.codes import coded
from tests.core.handshake.meeting import connected, in_background, soon, terms

SENTENCE = "correct horse battery staple and thirty more"


def seen_by_a_stranger(credentials: Credentials) -> x509.Certificate:
    """The certificate that a worker shows in an anonymous TLS handshake."""
    near, far = connected()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["sealring"])
    own = terms(0, job=credentials.job, world=1, members=(0,))
    with (
        in_background(lambda: accept(far, credentials, own, soon())),
        context.wrap_socket(near) as tls,
    ):
        shown = tls.getpeercert(binary_form=True)
    assert shown is not None
    return x509.load_der_x509_certificate(shown)


def guessed(shown: x509.Certificate, guesses: list[str]) -> str | None:
    for guess in filter(None, guesses):
        if is_issued_by(shown, (derive_authority(_native.Secret(guess.encode())).certificate,)):
            return guess
    return None


GUESSABLE = {
    "a sentence": SENTENCE,
    "a sentence without spaces": SENTENCE.title().replace(" ", ""),
    "words with dashes": SENTENCE.replace(" ", "-"),
    "zeros": "0" * 64,
    "a repeated word": "deadbeef" * 8,
    "all digits in turn": "0123456789abcdef" * 4,
    "bytes in turn": bytes(range(32)).hex(),
    "bytes in turn, by another step": bytes(7 * n % 256 for n in range(32)).hex(),
    "decimal digits": "31415926535897932384626433832795" * 2,
    "a sentence in hexadecimal": SENTENCE[:32].encode().hex(),
    "a sentence in base64": base64.b64encode(SENTENCE[:32].encode()).decode(),
    "bytes in turn in base64": base64.b64encode(bytes(range(32))).decode(),
    "few ones": bytes(1 << (n * 5 % 8) if n % 3 else n for n in range(32)).hex(),
    "too short": secrets.token_hex(31),
    "too long": secrets.token_hex(33),
    "base64 without padding": secrets.token_urlsafe(32),
    "nothing": "",
}


def attack(secret: str) -> None:
    credentials = load_credentials(0, 1, {"SEALRING_SECRET": secret})
    found = guessed(seen_by_a_stranger(credentials), list(GUESSABLE.values()))
    pytest.fail(f"after one connection the secret is known: {found!r}")


@pytest.mark.parametrize("secret", GUESSABLE.values(), ids=GUESSABLE.keys())
@pytest.mark.threat("K13")
def test_a_secret_that_can_be_guessed_from_one_connection_is_refused(secret: str) -> None:
    with pytest.raises(
        BadCredential, match="openssl rand -hex 32", check=coded("configuration.bad_secret")
    ) as refusal:
        attack(secret)
    assert not secret or secret not in str(refusal.value)


def decoded(secret: str) -> bytes:
    key = bytearray(32)
    assert decode_secret(memoryview(secret.encode()), key)
    return bytes(key)


@pytest.mark.threat("K13")
def test_random_bytes_are_accepted() -> None:
    for _ in range(2000):
        key = secrets.token_bytes(32)
        for secret in (
            key.hex(),
            key.hex().upper(),
            base64.b64encode(key).decode(),
            base64.urlsafe_b64encode(key).decode(),
            f" {key.hex()}\n",
        ):
            read = read_secret({"SEALRING_SECRET": secret})
            assert bytes(memoryview(read)) == secret.strip().encode()  # type: ignore[arg-type]
            assert decoded(secret.strip()) == key


def test_another_spelling_of_the_last_base64_digit_is_refused() -> None:
    digits = string.ascii_uppercase + string.ascii_lowercase + string.digits + "+/"
    text = base64.b64encode(secrets.token_bytes(32)).decode()
    other = text[:42] + digits[digits.index(text[42]) + 1] + "="
    assert base64.b64decode(other) == base64.b64decode(text)
    with pytest.raises(BadCredential, check=coded("configuration.bad_secret")):
        read_secret({"SEALRING_SECRET": other})


def test_the_certificate_that_a_stranger_sees_confirms_a_guess() -> None:
    """Shows why the secret must be random: one connection lets a stranger test guesses."""
    secret = secrets.token_hex(32)
    credentials = load_credentials(0, 1, {"SEALRING_SECRET": secret})
    shown = seen_by_a_stranger(credentials)
    assert guessed(shown, [*GUESSABLE.values(), secret]) == secret
    assert guessed(shown, list(GUESSABLE.values())) is None
