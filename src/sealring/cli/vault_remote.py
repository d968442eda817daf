"""`sealring vault push` and `pull`: versions to a store that fsspec reaches, and back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer
from rich.markup import escape

from sealring.cli.terminal import print_json, progress_bar, say
from sealring.cli.vault_options import AsJson, Broker, Directory, Key, VaultId, Version, opener_of
from sealring.vault import remote
from sealring.vault.stores import Progress
from sealring.vault.vault import Vault

Url = Annotated[
    str, typer.Argument(help="s3://BUCKET/FOLDER, https://HOST/FOLDER, file:///FOLDER.")
]
Name = Annotated[str, typer.Argument(help="The object.")]


@contextmanager
def _bar(what: str) -> Iterator[Progress]:
    """How much of it has to be moved is known only while it moves."""
    with progress_bar("{task.completed} bytes") as bar:
        task = bar.add_task(escape(what), total=None)
        yield lambda count: bar.advance(task, count)


def push(
    vault: Directory,
    name: Name,
    url: Url,
    version: Version = None,
    key: Key = None,
    vault_id: VaultId = None,
    broker: Broker = None,
    as_json: AsJson = False,
) -> None:
    """Put a version of an object, else the newest, into a store. It is sealed already."""
    opened = Vault.open(vault, opener_of(key, broker, None), vault_id)
    with _bar(f"putting {name}") as progress:
        number = remote.push(opened, name, url, version, progress)
    if as_json:
        print_json({"name": name, "version": number, "url": url})
    else:
        say(f"Version {number} of {name} is in {url}.")


def pull(
    vault: Directory,
    name: Name,
    url: Url,
    version: Version = None,
    key: Key = None,
    vault_id: VaultId = None,
    broker: Broker = None,
    as_json: AsJson = False,
) -> None:
    """Fetch a version of an object, else the newest, from a store into the vault."""
    opened = Vault.open(vault, opener_of(key, broker, None), vault_id)
    with _bar(f"fetching {name}") as progress:
        number = remote.pull(opened, name, url, version, progress)
    if as_json:
        print_json({"name": name, "version": number, "vault": vault})
    else:
        say(f"Version {number} of {name} is in {vault}, all of it found authentic.")
