"""`sealring papers`: what a model takes along from the run that made it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sealring.cli.authorities import SecretFile, require_believed
from sealring.cli.terminal import print_json, say
from sealring.record.papers.write import write_papers
from sealring.record.provenance.owners import read_owner_key
from sealring.record.provenance.runs import open_run


def papers(
    run: Annotated[Path, typer.Argument(help="The folder of the run.")],
    model: Annotated[
        Path, typer.Argument(help="What `vault export --record RUN` wrote: a file, or a folder.")
    ],
    owner_key: Annotated[Path, typer.Option(help="The key that signed the export.")],
    model_key: Annotated[
        Path, typer.Option(help="An elliptic-curve key (PEM), for OpenSSF model signing.")
    ],
    output: Annotated[Path, typer.Option("-o", "--output", help="A new folder.")],
    authority: Annotated[Path | None, typer.Option(help="Of the run's workers.")] = None,
    secret_file: SecretFile = None,
    job: Annotated[
        str | None,
        typer.Option(help="The job that the run must be of; the folder's word if not given."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="For programs to read.")] = False,
) -> None:
    """Write a model's signature, provenance, card and bill of materials, from a run's records."""
    trusted = require_believed([] if authority is None else [authority], secret_file)
    written = write_papers(
        model, open_run(run), trusted.authorities, read_owner_key(owner_key), model_key, output,
        job,
    )  # fmt: skip
    if json:
        print_json({"files": [str(path) for path in written]})
        return
    for path in written:
        say(str(path))
