"""Objects that are removed from a vault.

A ledger only goes forward, so an object that it knows cannot just be gone: that would be a
rollback. A last version says that the object was removed, and is recorded like any other. Who puts
the object back later is then seen as well.
"""

from __future__ import annotations

from sealring.errors import ConfigurationError, NoSuchObject
from sealring.vault import objects
from sealring.vault.layout import VERSION
from sealring.vault.vault import Vault
from sealring.vault.versions import REMOVED


def remove(vault: Vault, name: str) -> int:
    """Removes all versions of an object, also those that do not open; how many there were."""
    vault.require_writer()
    with vault.held(alone=True):
        vault.refresh()
        folder = vault.folder_of(name)
        found = folder.entries(VERSION)
        if not found and vault.ledger.newest(folder.name) is None:
            raise NoSuchObject(
                f"{name!r} is not in {vault.path}: `sealring vault ls` shows what is"
            )
        copy = vault.new_version(name)
        try:
            vault.commit(copy, REMOVED, name, [], "{}")
        except BaseException:
            if not copy.complete:
                objects.remove(copy.folder)
            raise
        for version in found:
            vault.remove_version(version)
    return len(found)


def remove_version(vault: Vault, name: str, version: int) -> None:
    """Removes one version that is not the newest."""
    vault.require_writer()
    with vault.held(alone=True):
        vault.refresh()
        newest = vault.find(name).manifest.object_version
        wanted = vault.folder_of(name) / f"{version:010}"
        if version == newest:
            raise ConfigurationError(
                f"version {version} is the newest of {name!r}: without it the vault would look "
                "older than it is. Remove the object, or seal a new version first"
            )
        if wanted not in wanted.parent.entries(VERSION):
            raise NoSuchObject(f"{name!r} has no version {version} in {vault.path}")
        vault.remove_version(wanted)
