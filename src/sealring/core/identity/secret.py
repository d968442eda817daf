"""The job secret, and the authority that every holder derives from it.

The authority is not a service. Each worker derives the authority's key from the secret, signs a
certificate for the worker's own key, and forgets the authority's key. A process makes its own key
once, so that all its groups and sessions show the same key. So each holder of the secret can be any
rank of the job.

A worker shows its certificate to everybody who connects. With that certificate an attacker can test
guesses of the secret offline. So the secret must be 256 random bits (`openssl rand -hex 32`), and a
text that is visibly something else is refused.
"""

from __future__ import annotations

import os
import re
import string
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.hashes import SHA256

from sealring import _native
from sealring.core.identity.certificates import issue, make_authority
from sealring.core.identity.kept_key import KeptKey
from sealring.core.identity.names import WorkerName
from sealring.core.identity.process import read_secret_file, shut_out_debuggers
from sealring.core.no_fork import OwnLock
from sealring.core.settings import SECRET, SECRET_FILE
from sealring.errors import BadCredential, ConfigurationError
from sealring.limits import CERTIFICATE_HOURS, KEY_BYTES

OF_THE_RUN: Final = "_SEALRING_SECRET_OF_THE_RUN"
"""Set by `sealring run` if it made the workers' secret, which is lost after the run."""
_SALT: Final = b"sealring-1 job secret"
_MAKE_ONE: Final = (
    "a worker shows everybody who connects a certificate by which guesses can be tested. Make a "
    "new secret with `umask 077; openssl rand -hex 32 > job.secret` and give it to all ranks"
)
_TRIMMED: Final = re.compile(rb"\s*(.*?)\s*", re.DOTALL)
_HEXADECIMAL: Final = re.compile(rb"[0-9a-fA-F]{64}")
_BASE64: Final = re.compile(rb"[A-Za-z0-9+/_-]{43}=")
_HEX_DIGITS: Final = {ord(digit): int(digit, 16) for digit in string.hexdigits}
_BASE64_DIGITS: Final = {
    ord(digit): value
    for end in ("+/", "-_")
    for value, digit in enumerate(
        string.ascii_uppercase + string.ascii_lowercase + string.digits + end
    )
}
_PRINTABLE: Final = frozenset(string.printable.encode())
_MIN_DISTINCT: Final = 12
_MAX_DEVIATION: Final = 64
"""Eight standard deviations of the number of ones among 256 random bits."""

# Fixed, because all holders must derive the same certificate. The end is RFC 5280's value for
# certificates that do not expire: users replace the secret instead.
_NOT_BEFORE: Final = datetime(2024, 1, 1, tzinfo=UTC)
_NOT_AFTER: Final = datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class JobAuthority:
    """The authority derived from a secret. Its key signs a certificate and is then dropped."""

    certificate: x509.Certificate
    default_job: str
    key: Ed25519PrivateKey = field(repr=False)

    def issue_to_self(
        self, name: WorkerName, world: int, now: datetime | None = None
    ) -> tuple[x509.Certificate, KeptKey]:
        """Returns this process's certificate and key as that worker; reissued after an hour."""
        now = now or datetime.now(UTC)
        own = self._own(name, world)
        made, certificate = own.newest
        # `made <= now`: if the clock was set back, the old certificate would not be valid yet.
        if certificate is None or not made <= now < made + _SHOWN_FOR:
            lifetime = timedelta(hours=CERTIFICATE_HOURS)
            key = own.key.load().public_key()
            assert isinstance(key, Ed25519PublicKey)
            certificate = issue(self.certificate, self.key, key, name, world, lifetime, now)
            own.newest = (now, certificate)
        return certificate, own.key

    def _own(self, name: WorkerName, world: int) -> _OwnIdentity:
        # A forked child is another worker, and its copy of the parent's seeds is zeros.
        whose = (os.getpid(), self.certificate.fingerprint(SHA256()), name.job, name.rank, world)
        with _own_lock:
            if whose not in _own_identities:
                _own_identities[whose] = _OwnIdentity(
                    KeptKey.of_seed(_native.Secret.random(KEY_BYTES))
                )
            return _own_identities[whose]


@dataclass(slots=True)
class _OwnIdentity:
    """This process's key and certificate as one worker of one job."""

    key: KeptKey = field(repr=False)
    newest: tuple[datetime, x509.Certificate | None] = (_NOT_BEFORE, None)
    """The newest certificate, and when it was made."""


_SHOWN_FOR: Final = timedelta(hours=1)
"""After this time a process makes a new certificate for its next group. Until then all its groups
show the same one, which every peer verifies only once."""
_own_identities: Final[dict[tuple[int, bytes, str, int, int], _OwnIdentity]] = {}
"""The keys are process, authority, job, rank and world."""
_own_lock: Final = OwnLock()


def read_secret(environ: Mapping[str, str]) -> _native.Secret | None:
    """The job secret as the bytes of its text, or None if none is configured."""
    value, path = SECRET.read(environ), SECRET_FILE.read(environ)
    if value is not None and path is not None:
        raise ConfigurationError(
            "both SEALRING_SECRET and SEALRING_SECRET_FILE are set: unset one of them"
        )
    if value is not None:
        shut_out_debuggers(environ)
        # The variable itself stays in the environment.
        encoded = bytearray(value.encode("utf-8", "surrogateescape"))
        return _check(_native.Secret(encoded), SECRET.name)
    if path == "":
        raise ConfigurationError(
            "SEALRING_SECRET_FILE is set and empty: set it to the secret's file, or unset it"
        )
    if path is not None:
        content = read_secret_file(Path(path), "the job secret", _bad)
        return _check(content, f"the job secret in {path}")
    return None


def derive_authority(secret: _native.Secret) -> JobAuthority:
    """Derives the authority, which is the same for every holder of the secret.

    The job's name is not part of the derivation. So a worker with the right secret and another
    SEALRING_JOB is refused by the name in its certificate, with the precise error
    handshake.wrong_job instead of handshake.unknown_authority.
    """
    key = Ed25519PrivateKey.from_private_bytes(memoryview(_derive(secret, b"authority key", 32)))
    job = default_job(secret)
    serial = int.from_bytes(_derive(secret, b"authority serial", 16), "big") | 1
    certificate = make_authority(key, f"authority of {job}", serial, _NOT_BEFORE, _NOT_AFTER)
    return JobAuthority(certificate, job, key)


def default_job(secret: _native.Secret) -> str:
    """The job's name if SEALRING_JOB is not set."""
    return "job-" + bytes(_derive(secret, b"job name", 4)).hex()


def fingerprint(secret: _native.Secret) -> str:
    """A short value shown to users, so that they see which machine has another secret."""
    return bytes(_derive(secret, b"fingerprint", 4)).hex()


def derive_store_key(secret: _native.Secret) -> _native.Secret:
    """The key of the job's sealed stores before there is a group."""
    return _derive(secret, b"store key", KEY_BYTES)


def _derive(secret: _native.Secret, purpose: bytes, length: int) -> _native.Secret:
    return secret.derive(_SALT, b"sealring-1 " + purpose, length)


def _bad(problem: str) -> BadCredential:
    return BadCredential(problem, code="configuration.bad_secret")


def _check(raw: _native.Secret, where: str) -> _native.Secret:
    # Editors and `echo` add a newline to a file, which the same secret in a variable lacks.
    found = _TRIMMED.fullmatch(memoryview(raw))
    assert found is not None
    start, end = found.span(1)
    secret = raw.part(start, end - start)
    view, key = memoryview(secret), bytearray(KEY_BYTES)
    try:
        if not decode_secret(view, key):
            raise _bad(
                f"{where} is not {KEY_BYTES} random bytes, as 64 hexadecimal digits or in base64: "
                f"{_MAKE_ONE}"
            )
        if pattern := _pattern(view, key):
            raise _bad(f"{where} is not random: {pattern}: {_MAKE_ONE}")
    finally:
        key[:] = bytes(KEY_BYTES)  # no copy of a secret is left in Python's memory
    return secret


def decode_secret(text: memoryview, key: bytearray) -> bool:
    """Decodes the text into `key`; returns False if it has no known encoding."""
    if _HEXADECIMAL.fullmatch(text):
        for at in range(KEY_BYTES):
            key[at] = _HEX_DIGITS[text[2 * at]] << 4 | _HEX_DIGITS[text[2 * at + 1]]
        return True
    # Base64 only with padding: without it, any 43 letters would be accepted.
    if _BASE64.fullmatch(text):
        for at in range(KEY_BYTES):
            # Eight bits from two digits of six bits, of which 0, 2 or 4 are used up.
            first, used = divmod(8 * at, 6)
            pair = _BASE64_DIGITS[text[first]] << 6 | _BASE64_DIGITS[text[first + 1]]
            key[at] = pair >> (4 - used) & 0xFF
        return _BASE64_DIGITS[text[42]] & 0x3 == 0  # else a second spelling of the same bytes
    return False


def _pattern(text: memoryview, key: bytearray) -> str | None:
    """Why these bytes are not random; None if no check finds a reason.

    Each check refuses fewer than one in 10^9 random secrets. The checks find texts that people make
    up or encode. They cannot find a bad random generator.
    """
    differences = {(second - first) % 256 for first, second in pairwise(key)}
    ones = sum(byte.bit_count() for byte in key)
    if len(set(key)) < _MIN_DISTINCT or len(differences) < _MIN_DISTINCT:
        return "its bytes follow a pattern"
    if abs(ones - 4 * KEY_BYTES) > _MAX_DEVIATION:
        return "it has far more of one bit than of the other"
    if all(byte in _PRINTABLE for byte in key):
        return "it is encoded text"
    if all(chr(byte).isdigit() for byte in text):
        return "it has decimal digits only"
    letters = [chr(byte) for byte in text if chr(byte).isalpha()]
    one_case = all(map(str.islower, letters)) or all(map(str.isupper, letters))
    if text[-1] == ord("=") and one_case:
        return "its letters are all of one case"
    return None
