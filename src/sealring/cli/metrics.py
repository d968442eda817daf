"""`sealring metrics`: the counts of this machine's workers, for Prometheus."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from sealring.cli.terminal import errors
from sealring.errors import ConfigurationError
from sealring.live.directory import SETTING, chosen_directory
from sealring.live.exporter import Exporter, OncePerInterval, parse_address, server_tls
from sealring.live.openmetrics import as_text
from sealring.live.reader import read_all
from sealring.live.status import WorkerStatus

Pem = Annotated[Path | None, typer.Option(help="PEM. All three of them: TLS with client proof.")]


def metrics(
    listen: Annotated[
        str | None,
        typer.Option(help="IP:PORT to serve /metrics on, as 127.0.0.1:9464. Default: print once."),
    ] = None,
    certificate: Pem = None,
    key: Pem = None,
    authority: Pem = None,
    directory: Annotated[
        Path | None,
        typer.Option(help=f"Where the workers' sockets are. Default: as {SETTING} says."),
    ] = None,
) -> None:
    """Give what the workers of this machine count to Prometheus or OpenTelemetry's collector."""
    place = directory or chosen_directory(os.environ)
    if place is None:
        raise ConfigurationError(
            f"{SETTING}=0 switches the live view off: unset it, or pass --directory"
        )

    def text() -> str:
        reading = read_all(WorkerStatus, place)
        return as_text(reading.answers, len(reading.silent))

    given = [each for each in (certificate, key, authority) if each is not None]
    if given and (len(given) < 3 or listen is None):
        raise ConfigurationError(
            "--certificate, --key and --authority go together, with --listen: TLS, with clients "
            "that show a certificate of that authority"
        )
    if listen is None:
        print(text(), end="")
        return
    tls = server_tls(given[0], given[1], given[2]) if given else None
    with Exporter(parse_address(listen), OncePerInterval(text), tls) as exporter:
        host, port = exporter.server_address[:2]
        scheme = "http" if tls is None else "https"
        shown = f"[{host!s}]" if ":" in str(host) else str(host)
        errors.print(f"{scheme}://{shown}:{port}/metrics", markup=False, highlight=False)
        try:
            exporter.serve_forever()
        except KeyboardInterrupt:
            return
