"""`sealring vault rm`: objects and versions that are removed."""

from __future__ import annotations

from typing import Annotated

import typer

from sealring.cli.terminal import counted, print_json, say
from sealring.cli.vault_options import AsJson, Broker, Directory, Key, VaultId, Version, opener_of
from sealring.vault import removal
from sealring.vault.vault import Vault


def rm(
    vault: Directory,
    name: Annotated[str, typer.Argument(help="The object.")],
    version: Version = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    key: Key = None,
    vault_id: VaultId = None,
    broker: Broker = None,
    as_json: AsJson = False,
) -> None:
    """Remove an object with all its versions, or one version that is not the newest."""
    opened = Vault.open(vault, opener_of(key, broker, None), vault_id)
    what = name if version is None else f"version {version} of {name}"
    if not yes:
        # On stderr: what programs read from stdout is JSON alone.
        question = f"Remove {what} from {vault}? It cannot be brought back."
        typer.confirm(question, abort=True, err=True)
    if version is None:
        count = removal.remove(opened, name)
        told = f"{name} is removed from {vault}: {counted(count, 'version')}."
    else:
        count = 1
        removal.remove_version(opened, name, version)
        told = f"Version {version} of {name} is removed from {vault}."
    if as_json:
        print_json({"name": name, "version": version, "removed": count})
    else:
        say(told)
