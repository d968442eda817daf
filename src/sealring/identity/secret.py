"""The job secret, and the authority that every holder of it derives alike.

Nobody runs this authority: each worker derives its key, signs one certificate for its own fresh key
and forgets it. Holding the secret is therefore the right to be any rank of the job.

A worker shows a certificate signed by this authority to whoever connects to it, which lets anyone
test guesses of the secret at leisure. It must be random (`openssl rand -hex 32`); a sentence of 32
letters is not.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from sealring import _native
from sealring.errors import BadSecret, ConfigurationError
from sealring.identity.certificates import issue, make_authority
from sealring.identity.names import WorkerName
from sealring.identity.private_files import read_secret_file
from sealring.identity.process import shut_out_debuggers
from sealring.limits import CERTIFICATE_HOURS, KEY_BYTES, MIN_SECRET_BYTES

_SALT: Final = b"sealring-1 job secret"
_MAKE_ONE: Final = "make one with `openssl rand -hex 32`"
_MIN_DISTINCT_BYTES: Final = 8
_TEXT: Final = re.compile(rb"\s*(.*?)\s*", re.DOTALL)

# Fixed, because all holders must derive one and the same certificate. The end is the one RFC 5280
# gives to certificates that do not expire: the secret is what is replaced, not this.
_NOT_BEFORE: Final = datetime(2024, 1, 1, tzinfo=UTC)
_NOT_AFTER: Final = datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class JobAuthority:
    """The authority a secret stands for. Its key signs one certificate and is then dropped."""

    certificate: x509.Certificate
    default_job: str
    key: Ed25519PrivateKey = field(repr=False)

    def issue_to_self(
        self, name: WorkerName, world: int, now: datetime | None = None
    ) -> tuple[x509.Certificate, Ed25519PrivateKey]:
        key = Ed25519PrivateKey.generate()
        lifetime = timedelta(hours=CERTIFICATE_HOURS)
        certificate = issue(
            self.certificate, self.key, key.public_key(), name, world, lifetime, now
        )
        return certificate, key


def read_secret(environ: Mapping[str, str]) -> _native.Secret | None:
    """The job secret as its UTF-8 bytes, or None if none is configured."""
    value, path = environ.get("SEALRING_SECRET"), environ.get("SEALRING_SECRET_FILE")
    if value is not None and path is not None:
        raise ConfigurationError(
            "both SEALRING_SECRET and SEALRING_SECRET_FILE are set: unset one of them"
        )
    if value is not None:
        shut_out_debuggers(environ)
        # The variable itself stays in the environment, where this copy came from.
        encoded = bytearray(value.encode("utf-8", "surrogateescape"))
        return _check(_native.Secret(encoded), "SEALRING_SECRET")
    if path is not None:
        content = read_secret_file(Path(path), "the job secret", BadSecret)
        return _check(content, f"the job secret in {path}")
    return None


def derive_authority(secret: _native.Secret) -> JobAuthority:
    """The same for every holder of the secret, on any machine.

    The job's name is not mixed in: a worker with the right secret and another SEALRING_JOB is
    refused by the name in its certificate, and then told WrongJob instead of UnknownAuthority.
    """
    key = Ed25519PrivateKey.from_private_bytes(memoryview(_derive(secret, b"authority key", 32)))
    job = default_job(secret)
    serial = int.from_bytes(_derive(secret, b"authority serial", 16), "big") | 1
    certificate = make_authority(key, f"authority of {job}", serial, _NOT_BEFORE, _NOT_AFTER)
    return JobAuthority(certificate, job, key)


def default_job(secret: _native.Secret) -> str:
    """The job's name where nobody gave it one."""
    return "job-" + bytes(_derive(secret, b"job name", 4)).hex()


def derive_store_key(secret: _native.Secret) -> _native.Secret:
    """What the job's sealed stores are keyed with, before there is a group."""
    return _derive(secret, b"store key", KEY_BYTES)


def _derive(secret: _native.Secret, purpose: bytes, length: int) -> _native.Secret:
    return secret.derive(_SALT, b"sealring-1 " + purpose, length)


def _check(raw: _native.Secret, where: str) -> _native.Secret:
    view = memoryview(raw)
    try:
        if max(view, default=0) > 0x7F:  # or it is ASCII, of which no copy need be made
            str(view, "utf-8")
    except UnicodeDecodeError:
        raise BadSecret(f"{where} is not UTF-8 text: {_MAKE_ONE}") from None
    # Editors and `echo` add a newline that the same secret in a variable does not have.
    found = _TEXT.fullmatch(view)
    assert found is not None
    start, end = found.span(1)
    secret = raw.part(start, end - start)
    if len(secret) < MIN_SECRET_BYTES:
        raise BadSecret(
            f"{where} has {len(secret)} bytes and needs at least {MIN_SECRET_BYTES}: {_MAKE_ONE}"
        )
    if len(set(memoryview(secret))) < _MIN_DISTINCT_BYTES:
        raise BadSecret(f"{where} is a repetition of a few characters: {_MAKE_ONE}")
    return secret
