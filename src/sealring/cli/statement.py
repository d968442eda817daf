"""`sealring statement`: what a worker vouches for, signed with the key of its certificate."""

from __future__ import annotations

import hashlib
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from sealring.cli.terminal import print_json, say
from sealring.errors import ConfigurationError
from sealring.identity.credentials import load_credentials, read_authorities
from sealring.identity.private_files import write_public
from sealring.provenance.files import read_limited
from sealring.provenance.statements import Named, parse_interval, sign_statement, verify_statement
from sealring.provenance.tiles import MAX_ENTRY_BYTES

app = typer.Typer(help="Sign and check what a worker vouches for.", no_args_is_help=True)


@app.command()
def sign(
    interval: Annotated[Path, typer.Argument(help="The interval as JSON, see docs/provenance.md.")],
    subject: Annotated[list[Path], typer.Option(help="A file that it is about.")],
    rank: Annotated[int, typer.Option(help="This worker's rank.")],
    world: Annotated[int, typer.Option(help="How many workers there are.")],
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="The file to write; stdout if not given.")
    ] = None,
) -> None:
    """Sign a statement with this worker's identity, which is in its environment."""
    found = parse_interval(_read(interval))
    subjects = [Named(path.name, _digest(path)) for path in subject]
    envelope = sign_statement(found, subjects, load_credentials(rank, world))
    if output is None:
        sys.stdout.write(envelope.decode())
    else:
        write_public(output, envelope)


@app.command()
def verify(
    envelope: Annotated[Path, typer.Argument(help="What `sealring statement sign` wrote.")],
    authority: Annotated[Path, typer.Option(help="The authority of the workers' certificates.")],
    json: Annotated[bool, typer.Option("--json", help="For programs to read.")] = False,
) -> None:
    """Check a statement's signature and certificate, as of the end of its interval."""
    found = verify_statement(_read(envelope), read_authorities(authority))
    if json:
        print_json(
            {
                "job": found.worker.job, "rank": found.worker.rank,
                "subjects": [asdict(one) for one in found.subjects],
                "interval": asdict(found.interval),
            }
        )  # fmt: skip
        return
    steps = f"steps {found.interval.first_step} to {found.interval.end_step}"
    say(f"rank {found.worker.rank} of {found.worker.job}, {steps}, vouches for:")
    for one in found.subjects:
        # The worker chose the name: nothing in it may reach the terminal as a command.
        say(f"{one.sha256}  {one.name if one.name.isprintable() else repr(one.name)}")


def _read(path: Path) -> bytes:
    content = read_limited(path, MAX_ENTRY_BYTES)
    if content is None:
        raise ConfigurationError(f"there is no file {path}")
    return content


def _digest(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as problem:
        raise ConfigurationError(f"{path} cannot be read: {problem.strerror}") from None
