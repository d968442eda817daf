"""`sealring statement`: what a worker or an owner vouches for, signed."""

from __future__ import annotations

import sys
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from sealring.cli.authorities import SecretFile, believed
from sealring.cli.terminal import print_json, say
from sealring.core.identity.credentials import load_credentials
from sealring.errors import ConfigurationError
from sealring.formats.files import read_limited, write_public
from sealring.formats.log.tree import MAX_ENTRY_BYTES
from sealring.record.provenance.intervals import Interval
from sealring.record.provenance.owners import create_owner, read_owner, read_owner_key
from sealring.record.provenance.statements import (
    VerifiedStatement,
    parse_interval,
    parse_transformation,
    sign_statement,
    verify_statement,
)

app = typer.Typer(
    help="Sign and check what a worker or an owner vouches for.", no_args_is_help=True
)


class Kind(StrEnum):
    INTERVAL = "interval"
    TRANSFORMATION = "transformation"


@app.command()
def key(
    path: Annotated[Path, typer.Argument(help="The key's file; PATH.pub gets its public half.")],
) -> None:
    """Make an owner's key, which signs what is made outside of a job."""
    say(f"wrote {path} and {create_owner(path)}: give readers the latter")


@app.command()
def sign(
    content: Annotated[Path, typer.Argument(help="What to sign, as JSON; see docs/provenance.md.")],
    kind: Annotated[Kind, typer.Option(help="What it is.")] = Kind.INTERVAL,
    rank: Annotated[int | None, typer.Option(help="This worker's rank.")] = None,
    world: Annotated[int | None, typer.Option(help="How many workers there are.")] = None,
    owner_key: Annotated[
        Path | None, typer.Option(help="Sign a transformation with this key, not as a worker.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="The file to write; stdout if not given.")
    ] = None,
) -> None:
    """Sign a statement with this worker's identity, which is in its environment."""
    parse = parse_interval if kind is Kind.INTERVAL else parse_transformation
    found = parse(_read(content))
    if owner_key is not None:
        envelope = sign_statement(found, read_owner_key(owner_key))
    elif rank is None or world is None:
        raise ConfigurationError("who signs? Pass --rank and --world, or --owner-key")
    else:
        envelope = sign_statement(found, load_credentials(rank, world))
    if output is None:
        sys.stdout.write(envelope.decode())
    else:
        write_public(output, envelope)


@app.command()
def verify(
    envelope: Annotated[Path, typer.Argument(help="What `sealring statement sign` wrote.")],
    authority: Annotated[
        Path | None, typer.Option(help="The authority of the workers' certificates.")
    ] = None,
    secret_file: SecretFile = None,
    owner: Annotated[Path | None, typer.Option(help="An owner's public key.")] = None,
    json: Annotated[bool, typer.Option("--json", help="For programs to read.")] = False,
) -> None:
    """Check a statement's signature and certificate, as of the end of its interval."""
    trusted = believed([] if authority is None else [authority], secret_file)
    if trusted is None and owner is None:
        raise ConfigurationError("whom do you believe? Pass --authority, --secret-file or --owner")
    found = verify_statement(
        _read(envelope),
        [] if trusted is None else trusted.authorities,
        owners=[] if owner is None else [read_owner(owner)],
    )
    if json:
        kind = Kind.INTERVAL if isinstance(found.content, Interval) else Kind.TRANSFORMATION
        worker = (
            {} if found.worker is None else {"job": found.worker.job, "rank": found.worker.rank}
        )
        print_json(
            {
                **(worker or {"owner": found.signer}),
                "digest": found.digest,
                "subjects": [asdict(one) for one in found.subjects],
                str(kind): asdict(found.content),
            }
        )
        return
    say(f"{_signer(found)}, {_what(found)}, vouches for:")
    for one in found.subjects:
        say(f"{one.sha256}  {_printable(one.name)}")


def _signer(found: VerifiedStatement) -> str:
    if found.worker is None:
        return f"the owner of key {found.signer}"
    return f"rank {found.worker.rank} of {found.worker.job}"


def _what(found: VerifiedStatement) -> str:
    if isinstance(found.content, Interval):
        return f"steps {found.content.first_step} to {found.content.end_step}"
    return f"{found.content.kind} {_printable(found.content.name)}"


def _printable(name: str) -> str:
    """The signer chose the name: nothing in it may reach the terminal as a command."""
    return name if name.isprintable() else repr(name)


def _read(path: Path) -> bytes:
    content = read_limited(path, MAX_ENTRY_BYTES)
    if content is None:
        raise ConfigurationError(f"there is no file {path}")
    return content
