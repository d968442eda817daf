"""`sealring vault`: seals data and checkpoints at rest, and manages who can open them."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from sealring.cli.options import AsJson, Authority, believed
from sealring.cli.terminal import (
    console,
    counted,
    human_bytes,
    print_json,
    printable,
    say,
)
from sealring.cli.vault_data import build, ingest, lineage_table
from sealring.cli.vault_options import (
    Directory,
    Key,
    KeyChangeTarget,
    ReadTarget,
    Target,
    Version,
    byte_bar,
    holder_of,
    on_vault,
    owner_of,
    public_key,
)
from sealring.errors import ConfigurationError, NoSuchObject, VaultError, named
from sealring.record.papers import files_of
from sealring.record.recording.run import record_transformation
from sealring.record.statements.forms import Named, Transformation, parameters_of
from sealring.vault import keys, trees
from sealring.vault.datasets.building import lineage
from sealring.vault.opened import Tell
from sealring.vault.sealed import AES, CHACHA
from sealring.vault.vault import Stored, Vault
from sealring.version import __version__

if TYPE_CHECKING:
    pass

app = typer.Typer(
    name="vault", help="Seal data and checkpoints, and decide who opens them.", no_args_is_help=True
)


@app.command()
def init(
    vault: Directory,
    key: Key = None,
    name: Annotated[str, typer.Option(help="What the grant of the key file is called.")] = "owner",
    gpu: Annotated[
        bool, typer.Option(help="Seal with ChaCha20-Poly1305, which GPUs open.")
    ] = False,
) -> None:
    """Make a vault that a key file opens; the key file is made if there is none."""
    if key is None:
        raise ConfigurationError("name the key file with --key FILE; it is made if there is none")
    made = not os.path.lexists(key)
    if made:
        keys.make_key_file(key)
    try:
        opened = Vault.create(vault, keys.key_file(key), name, CHACHA if gpu else AES)
    except (ConfigurationError, VaultError) as problem:
        absent = "://" not in vault and not os.path.lexists(vault)
        if made and (absent or problem.code == "vault.output_exists"):
            key.unlink()  # the new key opens nothing
        raise
    say(f"The vault {opened.header.id} is in {vault}.")
    say(f"Its key is in {key}{', which was made now' if made else ''}: keep a copy elsewhere.")


@app.command()
def identity(
    file: Annotated[Path, typer.Argument(help="Where to keep the private key.")],
) -> None:
    """Make a person's identity and print its public key, for `grant --to-person`."""
    if os.path.lexists(file):
        say(keys.identity(file).public)
        return
    say(keys.make_identity(file).public)


@app.command()
@on_vault
def seal(
    target: Target,
    source: Annotated[Path, typer.Argument(help="A file or a folder.")],
    name: Annotated[str | None, typer.Option(help="The object's name; else SOURCE's.")] = None,
    as_json: AsJson = False,
) -> None:
    """Seal a file or a folder as the next version of an object."""
    opened = target.open()
    called = source.absolute().name if name is None else name
    with byte_bar(f"sealing {called}", trees.size_of(source)) as (_, progress):
        version = trees.seal_path(opened, source, called, None, progress)
    if as_json:
        print_json({"name": called, "version": version})
    else:
        say(f"{called} is sealed as version {version}. {source} itself was left as it is.")


@app.command("open")
@on_vault
def open_(
    target: ReadTarget,
    name: Annotated[str, typer.Argument(help="The object.")],
    out: Annotated[Path, typer.Option(help="Where the plaintext goes; must not exist.")],
    version: Version = None,
    form: Annotated[
        str | None,
        typer.Option("--format", help="Of a checkpoint: torch or safetensors; else torch."),
    ] = None,
    only: Annotated[
        str | None,
        typer.Option(help="Of a checkpoint: the one entry to write, such as model; else all."),
    ] = None,
    authority: Authority = None,
    job: Annotated[
        str | None,
        typer.Option(help="The job that saved it; with a secret, the one named after it."),
    ] = None,
    record: Annotated[
        Path | None,
        typer.Option(help="The folder of the run that made the checkpoint; records this."),
    ] = None,
    owner_key: Annotated[
        Path | None, typer.Option(help="With --record: the key that signs (`audit init`).")
    ] = None,
) -> None:
    """Write an object's plaintext, after all of it was found authentic.

    A checkpoint is written as torch.save or safetensors does.
    """
    if form not in (None, "torch", "safetensors"):
        raise ConfigurationError(f"--format {form}: it is torch or safetensors")
    trusted = believed(authority)
    if trusted is None and job is not None:
        raise ConfigurationError("--job goes with --authority")
    if trusted is not None and (job := job or trusted.default_job) is None:
        raise ConfigurationError("--authority and --job go together")
    owner = owner_of(record, owner_key)
    opened = target.open()
    with opened.reading():
        stored = opened.find(name, version)
        if stored.manifest.kind != "checkpoint":
            if (form, only, trusted, record) != (None, None, None, None):
                raise ConfigurationError(
                    f"{name} is no checkpoint: --format, --only, --authority, --job and "
                    "--record are options for one"
                )
            with byte_bar(f"opening {name}", _length(stored)) as (_, progress):
                trees.open_object(stored, out, progress)
            say(f"{name} version {stored.manifest.object_version} is in {out}.")
            return
    # Imported here, because it needs torch, which the other commands do not.
    from sealring.vault import CheckpointReader, export_safetensors, export_torch

    authorities = None if trusted is None else trusted.authorities
    reader = CheckpointReader(opened, name, version=version, authorities=authorities, job=job)
    started = int(time.time())
    export = export_safetensors if form == "safetensors" else export_torch
    left_out = export(reader, out, only=only)
    part = "" if only is None else f"{only} of "
    say(f"{part}{name} is in {out}, in plaintext.")
    if left_out:
        say(f"Left out: {', '.join(map(printable, left_out))}.")
    if record is not None and owner is not None:
        how = {"format": form or "torch", "sealring": __version__}
        done = Transformation(
            "export", out.name, [Named(*reader.loaded)], files_of(out), [],
            parameters_of(how if only is None else how | {"only": only}), started, int(time.time()),
        )  # fmt: skip
        say(f"recorded in {record_transformation(record, done, owner, authorities or ())}")


@app.command()
@on_vault
def ls(
    target: ReadTarget,
    name: Annotated[str | None, typer.Argument(help="One object; else all of them.")] = None,
    version: Version = None,
    as_json: AsJson = False,
) -> None:
    """List the objects, and who may open the vault; of a dataset NAME also what it was made from.

    It shows the versions, the code and the parameters that a dataset was made from.
    """
    opened = target.open()
    problems: list[VaultError] = []
    if name is not None:
        found = [opened.find(name, version)]
    elif version is not None:
        raise ConfigurationError("--version is that of one object: name the object too")
    else:
        found = list(opened.newest(problems))
    rows = [_row(stored) for stored in found]
    made = name is not None and rows[0]["kind"] == "dataset"
    ancestors = list(lineage(opened, str(name), version)) if made else []
    grants = [{"name": one.name, "kind": one.kind} for one in opened.header.grants]
    if as_json:
        wrong = [{"error": named(one), "message": str(one)} for one in problems]
        document = {"objects": rows, "grants": grants, "problems": wrong}
        shown = {"lineage": [asdict(one) for one in ancestors]} if made else {}
        print_json({"vault": opened.header.id} | document | shown)
        raise typer.Exit(2 if problems else 0)
    table = Table("object", "version", "kind", "parts", "size")
    for row in rows:
        size = human_bytes(row["bytes"])
        # As Text, so that a name chosen by another user is not read as markup.
        called, kind = Text(row["name"]), Text(row["kind"])
        table.add_row(called, str(row["version"]), kind, str(row["parts"]), size)
    console.print(table)
    if made:
        console.print(lineage_table(ancestors))
    else:
        say(
            f"The vault {opened.header.id} is open to "
            + ", ".join(f"{one['name']} ({one['kind']})" for one in grants)
            + "."
        )
    for problem in problems:
        say(f"{named(problem)}: {problem}")
    if problems:
        raise typer.Exit(2)


@app.command()
@on_vault
def rm(
    target: Target,
    name: Annotated[str, typer.Argument(help="The object.")],
    version: Version = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    as_json: AsJson = False,
) -> None:
    """Remove an object with all its versions, or one version that is not the newest."""
    opened = target.open()
    what = name if version is None else f"version {version} of {name}"
    if not yes:
        # On stderr, because programs expect only JSON on stdout.
        question = f"Remove {what} from {target.vault}? It cannot be brought back."
        typer.confirm(question, abort=True, err=True)
    count = opened.remove(name, version)
    if as_json:
        print_json({"name": name, "version": version, "removed": count})
    elif version is None:
        say(f"{name} is removed from {target.vault}: {counted(count, 'version')}.")
    else:
        say(f"Version {version} of {name} is removed from {target.vault}.")


@app.command()
@on_vault
def verify(
    target: ReadTarget,
    name: Annotated[str | None, typer.Argument(help="One object; else all of them.")] = None,
    version: Annotated[int | None, typer.Option(help="Of the object; else all of its.")] = None,
    as_json: AsJson = False,
) -> None:
    """Open every chunk of every version and keep nothing; exit status 2 where one does not open."""
    opened = target.open()
    with opened.reading():
        rows = _verified(opened, name, version)
    bad = [row for row in rows if row["error"]]
    if as_json:
        print_json({"objects": rows})
    else:
        for row in bad:
            say(f"{row['error']}: {row['message']}")
        say(f"{len(rows) - len(bad)} of {len(rows)} versions are intact: {_intact(bool(bad))}.")
        if any(row["kind"] == "checkpoint" for row in rows):
            say("The signatures of checkpoints are checked when they are loaded or exported.")
    if bad:
        raise typer.Exit(2)


@app.command()
@on_vault
def grant(
    target: Target,
    name: Annotated[str, typer.Option(help="What the grant is called.")],
    to_key: Annotated[Path | None, typer.Option(help="A key file; made if there is none.")] = None,
    to_person: Annotated[str | None, typer.Option(help="A public key, or a file of it.")] = None,
    to_broker: Annotated[str | None, typer.Option(help="A resource of a broker's.")] = None,
    data_key: Annotated[Path | None, typer.Option(help="The broker's file of it.")] = None,
) -> None:
    """Open the vault to another key file, a person, or workers that a broker admits."""
    if sum(one is not None for one in (to_key, to_person, to_broker)) != 1:
        raise ConfigurationError("name one of --to-key, --to-person and --to-broker")
    if data_key is not None and to_broker is None:
        raise ConfigurationError("--data-key is that of --to-broker: name the resource too")
    opened = target.open()
    if to_person is not None:
        opened.grant(name, public_key(to_person))
    else:
        opened.grant(name, holder_of(to_key, to_broker, data_key))
    say(f"{name} can open {target.vault}.")


@app.command()
@on_vault
def revoke(
    target: KeyChangeTarget,
    name: Annotated[str, typer.Argument(help="The grant, as `ls` names it.")],
) -> None:
    """Take a grant away, and wrap everything under a key that its holder does not have."""
    also = target.presented()
    target.open().revoke(name, also, _naming_dropped(target.vault))
    say(
        f"{name} gets no key of {target.vault} from now on, and cannot open what is sealed from "
        "now on."
    )
    say(
        "Keys that were handed out stay known: a holder who kept them, or a copy of the vault, can "
        f"open what was sealed before. `sealring vault rotate {target.vault}` seals it anew."
    )


@app.command()
@on_vault
def rotate(
    target: KeyChangeTarget,
    keys_only: Annotated[
        bool, typer.Option("--keys-only", help="Wrap the objects' keys; leave the data.")
    ] = False,
) -> None:
    """Seal everything anew under new keys. It can be stopped and started again."""
    also, tell = target.presented(), _naming_dropped(target.vault)
    opened = target.open()
    if keys_only:
        wrapped = counted(opened.rekey(also, tell).versions, "version")
        say(f"The keys of {wrapped} are wrapped under a new key.")
        return
    with byte_bar("rotating", sum(map(_length, opened.stored([])))) as (_, progress):
        change = trees.rotate(opened, progress, also, tell)
    say(f"Sealed under new keys: {counted(change.versions, 'version')}.")


for command in (ingest, build):
    app.command()(on_vault(command))


def _naming_dropped(vault: str) -> Tell:
    def tell(names: Sequence[str]) -> None:
        for name in names:
            say(
                f"{name} gets no new key of {vault}: its secret or public key, as the vault has "
                "it, was not presented. Open the vault to it again with `sealring vault grant`."
            )

    return tell


def _verified(opened: Vault, name: str | None, version: int | None) -> list[dict[str, Any]]:
    problems: list[VaultError] = []
    if version is not None:
        if name is None:
            raise ConfigurationError("--version is that of one object: name the object too")
        wanted = [opened.find(name, version)]
    else:
        wanted = list(opened.stored(problems, name))
        # Also find what the ledger lists and the vault lacks.
        missing: list[VaultError] = []
        if name is None:
            list(opened.newest(missing))
        else:
            try:
                opened.find(name)
            except NoSuchObject:
                raise
            except VaultError as problem:
                missing.append(problem)
        problems += [one for one in missing if str(one) not in map(str, problems)]
    rows: list[dict[str, Any]] = [
        dict.fromkeys(("name", "version", "kind", "parts", "bytes"))
        | {"error": named(problem), "message": str(problem)}
        for problem in problems
    ]
    with byte_bar("verifying", sum(map(_length, wanted))) as (_, progress):
        for stored in wanted:
            row = _row(stored) | {"error": None, "message": None}
            try:
                trees.verify(stored, progress)
            except VaultError as problem:
                row |= {"error": named(problem), "message": str(problem)}
            rows.append(row)
    return rows


def _intact(damaged: bool) -> str:
    """The result of `verify` in words. (A wrong key does not open the vault at all.)"""
    if damaged:
        return "the key is right, and what is named above was changed, exchanged or lost"
    return "every stored byte is as this vault's key sealed it"


def _length(stored: Stored) -> int:
    return sum(part.length for part in stored.manifest.parts)


def _row(stored: Stored) -> dict[str, Any]:
    manifest = stored.manifest
    return {
        "name": manifest.name,
        "version": manifest.object_version,
        "kind": manifest.kind,
        "parts": len(manifest.parts),
        "bytes": _length(stored),
    }
