"""`sealring broker health`: asks a running broker a question, as a worker would."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated, Final

import typer

from sealring.cli.terminal import console
from sealring.errors import ConfigurationError
from sealring.identity.credentials import read_authorities

_SECONDS: Final = 10.0
_JOB: Final = "health"
"""No job needs to have this name: a broker answers for jobs that it does not know."""


def health(
    authority: Annotated[
        Path, typer.Option(help="The broker's authority: CA/authority.pem.")
    ] = Path("sealring-ca/authority.pem"),
    at: Annotated[str, typer.Option(help="Where it listens: HOST:PORT.")] = "127.0.0.1:8443",
    name: Annotated[
        str | None,
        typer.Option(help="The name in its certificate, of its --name; HOST if not given."),
    ] = None,
) -> None:
    """Check that a broker answers: TLS by its authority, and a question that reads its store."""
    # Its packages are an extra.
    from sealring.broker.client import BrokerClient

    host, _, port = at.rpartition(":")
    host = host.strip("[]")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ConfigurationError(f"{at!r} is not HOST:PORT")
    client = BrokerClient([(name or host, int(port))], read_authorities(authority))
    asyncio.run(client.keys_out(_JOB, _SECONDS, address=host))
    console.print("The broker answers.", highlight=False)
