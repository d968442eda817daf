"""`sealring vault`: data sealed where it lies, and the keys that open it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from sealring.cli import vault_removal
from sealring.cli.terminal import console, counted, human_bytes, print_json, progress_bar, say
from sealring.cli.vault_data import build, ingest, lineage
from sealring.cli.vault_export import export
from sealring.cli.vault_options import (
    AlsoDataKey,
    AlsoKey,
    AlsoPerson,
    AsJson,
    Broker,
    Directory,
    Identity,
    Key,
    VaultId,
    Version,
    holder_of,
    opener_of,
    presented,
    public_key,
)
from sealring.errors import ConfigurationError, NoSuchObject, VaultError
from sealring.vault import keys, trees
from sealring.vault.opened import Tell
from sealring.vault.sealed import AES, CHACHA
from sealring.vault.vault import Vault
from sealring.vault.versions import Stored

app = typer.Typer(
    name="vault", help="Seal data and checkpoints, and decide who opens them.", no_args_is_help=True
)
app.command()(vault_removal.rm)


for verb in (ingest, build, lineage):
    app.command()(verb)


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
            key.unlink()  # it opens nothing
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
def seal(
    vault: Directory,
    source: Annotated[Path, typer.Argument(help="A file or a folder.")],
    name: Annotated[str | None, typer.Option(help="The object's name; else SOURCE's.")] = None,
    key: Key = None,
    vault_id: VaultId = None,
    broker: Broker = None,
    as_json: AsJson = False,
) -> None:
    """Seal a file or a folder as the next version of an object."""
    opened = Vault.open(vault, opener_of(key, broker, None), vault_id)
    called = source.absolute().name if name is None else name
    with _bar(f"sealing {called}", trees.size_of(source)) as progress:
        version = trees.seal_path(opened, source, called, None, progress)
    if as_json:
        print_json({"name": called, "version": version})
    else:
        say(f"{called} is sealed as version {version}. {source} itself was left as it is.")


@app.command("open")
def open_(
    vault: Directory,
    name: Annotated[str, typer.Argument(help="The object.")],
    out: Annotated[Path, typer.Option(help="Where the plaintext goes; must not exist.")],
    version: Version = None,
    key: Key = None,
    vault_id: VaultId = None,
    broker: Broker = None,
    identity: Identity = None,
) -> None:
    """Write an object's plaintext, after all of it was found authentic."""
    opened = Vault.open(vault, opener_of(key, broker, identity), vault_id)
    with opened.reading():
        stored = opened.find(name, version)
        with _bar(f"opening {name}", _length(stored)) as progress:
            trees.open_object(stored, out, progress)
    say(f"{name} version {stored.manifest.object_version} is in {out}.")


@app.command()
def ls(
    vault: Directory,
    key: Key = None,
    vault_id: VaultId = None,
    broker: Broker = None,
    identity: Identity = None,
    as_json: AsJson = False,
) -> None:
    """List the objects, and who may open the vault."""
    opened = Vault.open(vault, opener_of(key, broker, identity), vault_id)
    problems: list[VaultError] = []
    rows = [_row(stored) for stored in opened.newest(problems)]
    grants = [{"name": one.name, "kind": one.kind} for one in opened.header.grants]
    if as_json:
        wrong = [{"error": type(one).__name__, "message": str(one)} for one in problems]
        print_json(
            {"vault": opened.header.id, "objects": rows, "grants": grants, "problems": wrong}
        )
        raise typer.Exit(2 if problems else 0)
    table = Table("object", "version", "kind", "parts", "size")
    for row in rows:
        size = human_bytes(row["bytes"])
        # As text: what somebody else has sealed is no markup.
        name, kind = Text(row["name"]), Text(row["kind"])
        table.add_row(name, str(row["version"]), kind, str(row["parts"]), size)
    console.print(table)
    say(
        f"The vault {opened.header.id} is open to "
        + ", ".join(f"{one['name']} ({one['kind']})" for one in grants)
        + "."
    )
    for problem in problems:
        say(f"{type(problem).__name__}: {problem}")
    if problems:
        raise typer.Exit(2)


@app.command()
def verify(
    vault: Directory,
    name: Annotated[str | None, typer.Argument(help="One object; else all of them.")] = None,
    version: Annotated[int | None, typer.Option(help="Of the object; else all of its.")] = None,
    key: Key = None,
    vault_id: VaultId = None,
    broker: Broker = None,
    identity: Identity = None,
    as_json: AsJson = False,
) -> None:
    """Open every chunk of every version and keep nothing; exit status 2 where one does not open."""
    opened = Vault.open(vault, opener_of(key, broker, identity), vault_id)
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


app.command()(export)


@app.command()
def grant(
    vault: Directory,
    name: Annotated[str, typer.Option(help="What the grant is called.")],
    to_key: Annotated[Path | None, typer.Option(help="A key file; made if there is none.")] = None,
    to_person: Annotated[str | None, typer.Option(help="A public key, or a file of it.")] = None,
    to_broker: Annotated[str | None, typer.Option(help="A resource of a broker's.")] = None,
    data_key: Annotated[Path | None, typer.Option(help="The broker's file of it.")] = None,
    key: Key = None,
    vault_id: VaultId = None,
    broker: Broker = None,
) -> None:
    """Open the vault to another key file, a person, or workers that a broker admits."""
    if sum(one is not None for one in (to_key, to_person, to_broker)) != 1:
        raise ConfigurationError("name one of --to-key, --to-person and --to-broker")
    if data_key is not None and to_broker is None:
        raise ConfigurationError("--data-key is that of --to-broker: name the resource too")
    opened = Vault.open(vault, opener_of(key, broker, None), vault_id)
    if to_person is not None:
        opened.grant(name, public_key(to_person))
    else:
        opened.grant(name, holder_of(to_key, to_broker, data_key))
    say(f"{name} can open {vault}.")


@app.command()
def revoke(
    vault: Directory,
    name: Annotated[str, typer.Argument(help="The grant, as `ls` names it.")],
    key: Key = None,
    vault_id: VaultId = None,
    broker: Broker = None,
    also_key: AlsoKey = None,
    also_data_key: AlsoDataKey = None,
    also_person: AlsoPerson = None,
) -> None:
    """Take a grant away, and wrap everything under a key that its holder does not have."""
    also = presented(also_key, also_data_key, also_person)
    opened = Vault.open(vault, opener_of(key, broker, None), vault_id)
    opened.revoke(name, also, _naming_dropped(vault))
    say(f"{name} gets no key of {vault} from now on, and cannot open what is sealed from now on.")
    say(
        "Keys that were handed out stay known: a holder who kept them, or a copy of the vault, can "
        f"open what was sealed before. `sealring vault rotate {vault}` seals it anew."
    )


@app.command()
def rekey(
    vault: Directory,
    key: Key = None,
    vault_id: VaultId = None,
    broker: Broker = None,
    also_key: AlsoKey = None,
    also_data_key: AlsoDataKey = None,
    also_person: AlsoPerson = None,
) -> None:
    """Wrap all objects' keys under a new key of the vault; the data stay as they are."""
    also = presented(also_key, also_data_key, also_person)
    opened = Vault.open(vault, opener_of(key, broker, None), vault_id)
    change = opened.rekey(also, _naming_dropped(vault))
    wrapped = counted(change.versions, "version")
    say(f"The keys of {wrapped} are wrapped under a new key.")


@app.command()
def rotate(
    vault: Directory,
    key: Key = None,
    vault_id: VaultId = None,
    broker: Broker = None,
    also_key: AlsoKey = None,
    also_data_key: AlsoDataKey = None,
    also_person: AlsoPerson = None,
) -> None:
    """Seal everything anew under new keys. It can be stopped and started again."""
    also = presented(also_key, also_data_key, also_person)
    opened = Vault.open(vault, opener_of(key, broker, None), vault_id)
    with _bar("rotating", sum(map(_length, opened.stored([])))) as progress:
        change = trees.rotate(opened, progress, also, _naming_dropped(vault))
    say(f"Sealed under new keys: {counted(change.versions, 'version')}.")


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
        # Also what the ledger misses; what does not open is known by now.
        missing = _not_found(opened, name)
        problems += [one for one in missing if str(one) not in map(str, problems)]
    rows: list[dict[str, Any]] = [
        dict.fromkeys(("name", "version", "kind", "parts", "bytes"))
        | {"error": type(problem).__name__, "message": str(problem)}
        for problem in problems
    ]
    with _bar("verifying", sum(map(_length, wanted))) as progress:
        for stored in wanted:
            row = _row(stored) | {"error": None, "message": None}
            try:
                trees.verify(stored, progress)
            except VaultError as problem:
                row |= {"error": type(problem).__name__, "message": str(problem)}
            rows.append(row)
    return rows


def _intact(damaged: bool) -> str:
    """What `verify` found, in words. A wrong key does not come this far: it opens no vault."""
    if damaged:
        return "the key is right, and what is named above was changed, exchanged or lost"
    return "every stored byte is as this vault's key sealed it"


def _not_found(opened: Vault, name: str | None) -> list[VaultError]:
    """What is wrong with the newest version of an object, or of all."""
    problems: list[VaultError] = []
    if name is None:
        list(opened.newest(problems))
        return problems
    try:
        opened.find(name)
    except NoSuchObject:
        raise
    except VaultError as problem:
        problems.append(problem)
    return problems


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


@contextmanager
def _bar(what: str, total: int) -> Iterator[trees.Progress]:
    with progress_bar("{task.percentage:>3.0f} %") as bar:
        task = bar.add_task(escape(what), total=total)
        yield lambda count: bar.advance(task, count)
