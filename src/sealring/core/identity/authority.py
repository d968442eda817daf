"""An operator's own authority, kept in a directory and used by `sealring ca`.

DIR/authority.key    the private key, mode 0600; stays here
DIR/authority.pem    the certificate; goes to every worker as SEALRING_AUTHORITY
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)

from sealring.core.identity.certificates import CLOCK_SKEW, issue, make_authority
from sealring.core.identity.loading import certificate_from_pem, request_from_pem
from sealring.core.identity.names import WorkerName
from sealring.core.identity.process import read_private
from sealring.errors import BadCredential, ConfigurationError
from sealring.formats.files import read_public, write_private, write_public, writing

_AUTHORITY_LIFETIME: Final = timedelta(days=3650)
_MAX_NAME: Final = 64


@dataclass(frozen=True, slots=True)
class Issued:
    certificate: Path
    key: Path | None
    """The file of the private key, if it was made here; else None."""
    not_after: datetime


def create_authority(directory: Path, name: str) -> Path:
    """Makes a new authority in `directory`; returns its certificate's path."""
    if not 1 <= len(name) <= _MAX_NAME or not name.isprintable():
        raise ConfigurationError(f"an authority's name has 1 to {_MAX_NAME} printable characters")
    with writing(directory, "made"):
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    certificate_path = directory / "authority.pem"
    if certificate_path.exists():
        raise ConfigurationError(f"{directory} holds an authority already: choose another one")
    key = Ed25519PrivateKey.generate()
    now = datetime.now(UTC)
    certificate = make_authority(
        key, name, x509.random_serial_number(), now - CLOCK_SKEW, now + _AUTHORITY_LIFETIME
    )
    # The key first, because this write refuses to replace a file.
    write_private(directory / "authority.key", _key_pem(key))
    write_public(certificate_path, certificate.public_bytes(Encoding.PEM))
    return certificate_path


def request(name: WorkerName, out: Path) -> tuple[Path, Path]:
    """Makes a worker's key and a request for its certificate; returns the paths (request, key)."""
    key = Ed25519PrivateKey.generate()
    csr = (
        x509.CertificateSigningRequestBuilder()
        .subject_name(x509.Name([]))
        .add_extension(
            x509.SubjectAlternativeName([x509.UniformResourceIdentifier(name.uri)]), critical=True
        )
        .sign(key, None)
    )
    key_path, csr_path = _path(out, name, "key"), _path(out, name, "csr")
    write_private(key_path, _key_pem(key))
    write_public(csr_path, csr.public_bytes(Encoding.PEM))
    return csr_path, key_path


def issue_from_directory(
    directory: Path,
    name: WorkerName,
    out: Path,
    *,
    world: int | None,
    hours: float,
    request_file: Path | None,
) -> Issued:
    """Issues a worker's certificate for its request or, without one, for a new key made here."""
    if not 0 < hours <= 24 * 3650:
        raise ConfigurationError(f"--hours {hours} is not a lifetime: take more than 0")
    authority, authority_key = open_authority(directory)
    key_path = None
    if request_file is not None:
        holder = _holder_of(request_file, name)
        key = None
    else:
        key = Ed25519PrivateKey.generate()
        holder = key.public_key()
    certificate = issue(authority, authority_key, holder, name, world, timedelta(hours=hours))
    if key is not None:
        key_path = _path(out, name, "key")
        write_private(key_path, _key_pem(key))
    path = _path(out, name, "pem")
    write_public(path, certificate.public_bytes(Encoding.PEM))
    return Issued(path, key_path, certificate.not_valid_after_utc)


def _holder_of(path: Path, name: WorkerName) -> Ed25519PublicKey:
    """Returns the key in a request that is correctly signed and asks for `name` and nothing
    else."""
    content = read_public(path, "the request", BadCredential)
    csr = request_from_pem(content, BadCredential(f"the request {path} cannot be read"))
    if not csr.is_signature_valid:
        raise BadCredential(f"the request {path} is not signed by the key that it names")
    wanted = x509.SubjectAlternativeName([x509.UniformResourceIdentifier(name.uri)])
    if [extension.value for extension in csr.extensions] != [wanted]:
        raise BadCredential(f"the request {path} does not ask for {name.uri} alone")
    key = csr.public_key()
    if not isinstance(key, Ed25519PublicKey):
        raise BadCredential(f"the request {path} is not for an Ed25519 key")
    return key


def open_authority(directory: Path) -> tuple[x509.Certificate, Ed25519PrivateKey]:
    certificate_path, key_path = directory / "authority.pem", directory / "authority.key"
    pem = read_public(certificate_path, "the authority", BadCredential)
    key_pem = read_private(key_path, "the authority's key", BadCredential)
    refusal = BadCredential(f"{directory} does not hold an authority of `sealring ca init`")
    certificate = certificate_from_pem(pem, refusal)
    try:
        key = load_pem_private_key(key_pem, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        raise refusal from None
    if not isinstance(key, Ed25519PrivateKey) or key.public_key() != certificate.public_key():
        raise BadCredential(f"the key {key_path} is not the one of {certificate_path}")
    now = datetime.now(UTC)
    if certificate.not_valid_after_utc < now:
        raise BadCredential(f"the authority in {directory} has expired: make a new one")
    if now < certificate.not_valid_before_utc:
        # A certificate issued now would not be valid yet, or would end before it begins.
        raise BadCredential(
            f"the authority in {directory} is valid from "
            f"{certificate.not_valid_before_utc.isoformat()}, and it is "
            f"{now.isoformat(timespec='seconds')} on this machine: set its clock"
        )
    return certificate, key


def _path(out: Path, name: WorkerName, suffix: str) -> Path:
    with writing(out, "made"):
        out.mkdir(mode=0o700, parents=True, exist_ok=True)
    return out / f"{name.job}-rank-{name.rank}.{suffix}"


def _key_pem(key: Ed25519PrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
