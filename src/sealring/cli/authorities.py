"""Whose workers are believed: authorities' certificates, or the job's secret."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from cryptography import x509

from sealring.core.identity.credentials import read_authorities
from sealring.core.identity.secret import derive_authority, read_secret
from sealring.errors import ConfigurationError

SecretFile = Annotated[
    Path | None,
    typer.Option(help="The secret of a job that ran under --secret-file, for an authority."),
]


@dataclass(frozen=True, slots=True)
class Believed:
    authorities: tuple[x509.Certificate, ...]
    default_job: str | None
    """The name of a job under the secret that was given none; None without a secret."""


def believed(authorities: Sequence[Path], secret_file: Path | None) -> Believed | None:
    """None if neither is given. Of the secret's authority only the certificate is kept."""
    found = tuple(one for path in authorities for one in read_authorities(path))
    if secret_file is None:
        return Believed(found, None) if found else None
    secret = read_secret({"SEALRING_SECRET_FILE": str(secret_file)})
    assert secret is not None
    derived = derive_authority(secret)
    secret.wipe()
    return Believed((*found, derived.certificate), derived.default_job)


def require_believed(authorities: Sequence[Path], secret_file: Path | None) -> Believed:
    """Refuses to believe everybody."""
    trusted = believed(authorities, secret_file)
    if trusted is None:
        raise ConfigurationError(
            "whose workers are believed? Pass --authority FILE (`sealring ca init`, or the "
            "broker's), or --secret-file FILE for a job that ran under a secret"
        )
    return trusted
