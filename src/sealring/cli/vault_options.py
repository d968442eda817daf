"""Options that the verbs of `sealring vault` share, and the keys that they name."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from sealring.core.identity.process import read_secret_file
from sealring.errors import BadKeyFile, ConfigurationError
from sealring.formats.files import read_public
from sealring.vault import keys
from sealring.vault.keys import Opener, Presented, PublicKey, SymmetricKey

Directory = Annotated[
    str, typer.Argument(help="The vault's directory, or the URL of its folder in a store.")
]
Key = Annotated[
    Path | None, typer.Option(envvar="SEALRING_VAULT_KEY", help="The key file to open it with.")
]
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
AsJson = Annotated[bool, typer.Option("--json", help="For programs to read.")]
Version = Annotated[int | None, typer.Option(help="Of the object; else the newest.")]


def opener_of(key: Path | None, broker: str | None, identity: Path | None) -> Opener:
    if sum(one is not None for one in (broker, identity)) > 1:
        raise ConfigurationError("name one of --key, --broker and --identity")
    if broker is not None:
        return keys.released_key(broker)
    if identity is not None:
        return keys.identity(identity)
    if key is None:
        raise ConfigurationError(
            "name what opens the vault: --key FILE (or SEALRING_VAULT_KEY), --broker RESOURCE or "
            "--identity FILE"
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
    return keys.broker_key(resource, read_secret_file(data_key, "the data key", BadKeyFile))


def public_key(text: str) -> PublicKey:
    """Of a person: the key itself, or a file of it."""
    path = Path(text)
    if os.path.exists(path):
        text = read_public(path, "the public key", ConfigurationError).decode("ascii", "replace")
    return PublicKey(text.strip())


def presented(
    files: list[Path] | None, data_keys: list[str] | None, persons: list[str] | None
) -> list[Presented]:
    """Other holders that are to have the vault's next key."""
    found: list[Presented] = [keys.key_file(file) for file in files or []]
    found += [public_key(text) for text in persons or []]
    for text in data_keys or []:
        resource, given, file = text.partition("=")
        if not given:
            raise ConfigurationError(f"--also-data-key {text}: it is REPOSITORY/TYPE/TAG=FILE")
        found.append(holder_of(None, resource, Path(file)))
    return found
