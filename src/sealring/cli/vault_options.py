"""Options that the commands of `sealring vault` share, and the vault and keys that they name."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from rich.markup import escape

from sealring.cli.terminal import progress_bar
from sealring.core.identity.process import read_secret_file
from sealring.errors import ConfigurationError
from sealring.formats.files import read_public
from sealring.record.statements.signing import read_owner_key
from sealring.vault import keys
from sealring.vault.keys import Opener, Presented, PublicKey, SymmetricKey
from sealring.vault.sealed import Progress
from sealring.vault.vault import Vault

Directory = Annotated[
    str, typer.Argument(help="The vault's directory, or the URL of its folder in a store.")
]
Key = Annotated[Path | None, typer.Option(help="The key file to open it with.")]
Broker = Annotated[
    str | None, typer.Option(help="A data key, released by the broker: REPOSITORY/TYPE/TAG.")
]
Identity = Annotated[Path | None, typer.Option(help="A person's identity; it reads only.")]
AlsoKey = Annotated[
    list[Path] | None,
    typer.Option(help="A key file that stays granted; may be given several times."),
]
AlsoDataKey = Annotated[
    list[str] | None,
    typer.Option(help="A broker's data key that stays granted: REPOSITORY/TYPE/TAG=FILE."),
]
AlsoPerson = Annotated[
    list[str] | None,
    typer.Option(help="A person's public key, or a file of it, that stays granted."),
]
VaultId = Annotated[
    str | None, typer.Option(help="The id that the vault must have, as `init` and `ls` show it.")
]
Version = Annotated[int | None, typer.Option(help="Of the object; else the newest.")]


@dataclass(frozen=True, slots=True)
class Target:
    """The vault that a command works on, and the key that opens it."""

    vault: Directory
    key: Key = None
    vault_id: VaultId = None
    broker: Broker = None

    def open(self) -> Vault:
        return Vault.open(self.vault, opener_of(self.key, self.broker, None), self.vault_id)


@dataclass(frozen=True, slots=True)
class ReadTarget(Target):
    """A vault that is only read. A person's identity can open it, too."""

    identity: Identity = None

    def open(self) -> Vault:
        opener = opener_of(self.key, self.broker, self.identity)
        return Vault.open(self.vault, opener, self.vault_id)


@dataclass(frozen=True, slots=True)
class KeyChangeTarget(Target):
    """A vault that gets a new key, and the holders that keep their grants."""

    also_key: AlsoKey = None
    also_data_key: AlsoDataKey = None
    also_person: AlsoPerson = None

    def presented(self) -> list[Presented]:
        """The other holders that get the vault's new key."""
        found: list[Presented] = [keys.key_file(file) for file in self.also_key or []]
        found += [public_key(text) for text in self.also_person or []]
        for text in self.also_data_key or []:
            resource, given, file = text.partition("=")
            if not given:
                raise ConfigurationError(f"--also-data-key {text}: it is REPOSITORY/TYPE/TAG=FILE")
            found.append(holder_of(None, resource, Path(file)))
        return found


def on_vault(command: Callable[..., None]) -> Callable[..., None]:
    """Decorates a command whose first parameter is a Target (or a subclass).

    The fields of that class become options of the command, which gets an instance made from them.
    """
    target, *own = inspect.signature(command, eval_str=True).parameters.values()
    vault, *shared = inspect.signature(target.annotation, eval_str=True).parameters.values()

    def run(**given: Any) -> None:
        of_target = {one.name: given.pop(one.name) for one in (vault, *shared)}
        command(target.annotation(**of_target), **given)

    run.__name__, run.__doc__ = command.__name__, command.__doc__
    run.__module__ = command.__module__
    options = [one.replace(kind=one.KEYWORD_ONLY) for one in (vault, *own, *shared)]
    run.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]
    return run


def opener_of(key: Path | None, broker: str | None, identity: Path | None) -> Opener:
    if sum(one is not None for one in (broker, identity)) > 1:
        raise ConfigurationError("name one of --key, --broker and --identity")
    if broker is not None:
        return keys.released_key(broker)
    if identity is not None:
        return keys.identity(identity)
    if key is None:
        raise ConfigurationError(
            "name what opens the vault: --key FILE, --broker RESOURCE or --identity FILE"
        )
    return keys.key_file(key)


def holder_of(file: Path | None, resource: str | None, data_key: Path | None) -> SymmetricKey:
    if file is not None:
        if not os.path.lexists(file):
            keys.make_key_file(file)
        return keys.key_file(file)
    assert resource is not None
    if data_key is None:
        raise ConfigurationError(
            f"name the file of {resource} that the broker reads with --data-key: it is under the "
            "directory that the broker was given as --keys"
        )
    return keys.broker_key(resource, read_secret_file(data_key, "the data key", keys.bad_key_file))


def public_key(text: str) -> PublicKey:
    """A person's public key. `text` is the key or the name of a file with it."""
    path = Path(text)
    if os.path.exists(path):
        text = read_public(path, "the public key", ConfigurationError).decode("ascii", "replace")
    return PublicKey(text.strip())


def owner_of(record: Path | None, owner_key: Path | None) -> Ed25519PrivateKey | None:
    """The key that signs records; None without --record."""
    if (record is None) != (owner_key is None):
        raise ConfigurationError("--record and --owner-key go together: what is recorded is signed")
    return None if owner_key is None else read_owner_key(owner_key)


@contextmanager
def byte_bar(what: str, total: int | None = None) -> Iterator[tuple[Progress, Progress]]:
    """A progress bar. Yields two functions: one sets the total bytes, one adds finished bytes."""
    with progress_bar("{task.percentage:>3.0f} %") as shown:
        task = shown.add_task(escape(what), total=total)
        yield (
            lambda total: shown.update(task, total=max(1, total)),
            lambda count: shown.advance(task, count),
        )
