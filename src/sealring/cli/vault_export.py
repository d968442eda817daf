"""`sealring vault export`: a checkpoint in plaintext, and the record of it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sealring.cli.authorities import SecretFile, believed
from sealring.cli.terminal import printable, say
from sealring.cli.vault_options import (
    Broker,
    Directory,
    Identity,
    Key,
    VaultId,
    Version,
    opener_of,
)
from sealring.errors import ConfigurationError
from sealring.record.papers.write import files_of
from sealring.record.recording.hooks import record_transformation
from sealring.record.statements.forms import Named, Transformation, parameters_of
from sealring.record.statements.signing import read_owner_key
from sealring.vault import Vault
from sealring.version import __version__

if TYPE_CHECKING:
    from sealring.vault import CheckpointReader


def export(
    vault: Directory,
    name: Annotated[str, typer.Argument(help="A checkpoint.")],
    out: Annotated[Path, typer.Option(help="Where the plaintext goes; must not exist.")],
    form: Annotated[str, typer.Option("--format", help="torch or safetensors.")] = "torch",
    only: Annotated[
        str | None, typer.Option(help="The one entry to write, such as model; else all.")
    ] = None,
    version: Version = None,
    authority: Annotated[
        Path | None, typer.Option(help="Of the workers that signed it; else the environment's.")
    ] = None,
    secret_file: SecretFile = None,
    job: Annotated[
        str | None,
        typer.Option(help="The job that saved it; with a secret, the one named after it."),
    ] = None,
    key: Key = None,
    vault_id: VaultId = None,
    broker: Broker = None,
    identity: Identity = None,
    record: Annotated[
        Path | None,
        typer.Option(help="The folder of the run that made it; records this."),
    ] = None,
    owner_key: Annotated[
        Path | None, typer.Option(help="With --record: the key that signs (`statement key`).")
    ] = None,
) -> None:
    """Write a checkpoint in plaintext, as torch.save or safetensors does."""
    if form not in ("torch", "safetensors"):
        raise ConfigurationError(f"--format {form}: it is torch or safetensors")
    trusted = believed([] if authority is None else [authority], secret_file)
    if authority is not None and job is None:
        raise ConfigurationError("--authority and --job go together")
    if job is not None and trusted is None:
        raise ConfigurationError("--job goes with --authority or --secret-file")
    if (record is None) != (owner_key is None):
        raise ConfigurationError("--record and --owner-key go together")
    owner = None if owner_key is None else read_owner_key(owner_key)
    opened = Vault.open(vault, opener_of(key, broker, identity), vault_id)
    # With torch, which the other verbs do not need.
    from sealring.vault import CheckpointReader, export_safetensors, export_torch

    authorities = None if trusted is None else trusted.authorities
    if trusted is not None:
        job = job or trusted.default_job
    reader = CheckpointReader(opened, name, version=version, authorities=authorities, job=job)
    started = int(time.time())
    try:
        left_out = (export_torch if form == "torch" else export_safetensors)(reader, out, only=only)
    except BaseException as problem:
        # torch wraps what a rank raises, in an exception of its own kind.
        for error, _ in getattr(problem, "failures", {}).values():
            raise error from None
        raise
    part = "" if only is None else f"{only} of "
    say(f"{part}{name} is in {out}, in plaintext.")
    if left_out:
        say(f"Left out: {', '.join(map(printable, left_out))}.")
    if record is not None and owner is not None:
        how = {"format": form, "sealring": __version__}
        done = _transformation(reader, out, how if only is None else how | {"only": only}, started)
        say(f"recorded in {record_transformation(record, done, owner, authorities or ())}")


def _transformation(
    reader: CheckpointReader, out: Path, how: dict[str, str], started: int
) -> Transformation:
    return Transformation(
        kind="export",
        name=out.name,
        inputs=[Named(*reader.loaded)],
        outputs=files_of(out),
        code=[],
        parameters=parameters_of(how),
        started=started,
        finished=int(time.time()),
    )
