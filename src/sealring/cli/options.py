"""Options that several verbs share, and the functions that read their values."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

import typer
from cryptography import x509

from sealring.core.identity.credentials import read_authorities
from sealring.core.identity.secret import derive_authority, read_secret
from sealring.errors import ConfigurationError, MalformedStatement
from sealring.formats.files import read_limited
from sealring.formats.log.notes import MAX_NOTE_BYTES, SignatureKind, Verifier
from sealring.formats.log.policy import Log, LogPolicy, read_policy

AsJson = Annotated[bool, typer.Option("--json", help="For programs to read.")]
Authority = Annotated[
    list[Path] | None,
    typer.Option(
        "--authority",
        help="Whose workers are believed: an authority's certificates (PEM), or the secret of a "
        "job that ran under `--secret-file`.",
    ),
]
JobOfRun = Annotated[
    str | None,
    typer.Option("--job", help="The job that the run must be of; the folder's word if not given."),
]
Policy = Annotated[
    str | None,
    typer.Option(
        "--policy",
        help="Which log is believed: its verifier key, or a file of logs, witnesses and quorum "
        "(c2sp.org/tlog-policy).",
    ),
]


# ---- whose workers are believed


@dataclass(frozen=True, slots=True)
class Believed:
    authorities: tuple[x509.Certificate, ...]
    default_job: str | None
    """The default name of a job under the given secret; None without a secret."""


def believed(files: Sequence[Path] | None) -> Believed | None:
    """Reads the authorities to believe; None without files.

    A file may hold certificates or a job secret. Of a secret, only the certificate of its authority
    is kept.
    """
    found: list[x509.Certificate] = []
    default_job = None
    for path in files or ():
        if _is_pem(path):
            found += read_authorities(path)
            continue
        secret = read_secret({"SEALRING_SECRET_FILE": str(path)})
        assert secret is not None
        derived = derive_authority(secret)
        secret.wipe()
        found.append(derived.certificate)
        default_job = derived.default_job
    return Believed(tuple(found), default_job) if files else None


def _is_pem(path: Path) -> bool:
    """Whether a file is PEM. Reads only one byte, as a secret must be read into protected
    memory."""
    try:
        with path.open("rb", buffering=0) as file:
            return file.read(1) == b"-"
    except OSError as problem:
        raise ConfigurationError(f"{path} cannot be read: {problem.strerror}") from problem


def require_believed(files: Sequence[Path] | None) -> Believed:
    """Like `believed`, but raises ConfigurationError if no file is given."""
    trusted = believed(files)
    if trusted is None:
        raise ConfigurationError(
            "whose workers are believed? Pass --authority FILE: the certificate of `sealring ca "
            "init` or of the broker, or the secret of a job that ran under one"
        )
    return trusted


# ---- which log is believed


def whom_to_believe(policy: str | None) -> LogPolicy:
    """The log policy that `--policy` names, or one with only the log of the given verifier key."""
    if policy is None:
        raise ConfigurationError(
            "say whom to believe: --policy KEY, the log's verifier key, or --policy FILE"
        )
    key = policy
    if os.path.exists(policy):  # False, and no error, for a key that is too long for a file name
        content = read_limited(policy, MAX_NOTE_BYTES) or b""
        if len(content.split()) != 1:
            return read_policy(Path(policy))
        key = content.decode(errors="replace").strip()
    elif "+" not in policy:
        raise ConfigurationError(f"there is no file {policy}, and it is no verifier key")
    verifier = Verifier.parse(key)
    if verifier.kind is not SignatureKind.NOTE:
        raise MalformedStatement(
            f"the verifier key of {verifier.name} is a witness's, not a log's",
            code="log.malformed_note",
        )
    return LogPolicy((Log(verifier),))


# ---- sizes and addresses


_UNITS: Final = {"": 1, "B": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}


def parse_bytes(text: str) -> int:
    """Bytes in "4096", "4KiB" or "25MiB"."""
    match = re.fullmatch(r"(\d+)\s*([A-Za-z]*)", text.strip())
    unit = _UNITS.get(match[2].upper()) if match else None
    if match is None or unit is None or int(match[1]) == 0:
        raise ConfigurationError(f"{text!r} is not a size; write bytes, or 4KiB, 25MiB, 1GiB")
    return int(match[1]) * unit


def parse_address(text: str) -> tuple[str, int]:
    """Parses HOST:PORT or [ADDRESS]:PORT."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ConfigurationError(f"{text!r} is not HOST:PORT")
    return host.strip("[]"), int(port)
