"""What a vault last held: by this an older copy of it is recognised.

A ledger on the disk that it guards detects accidents: a backup that was put back, a synchronised
folder that lost a race. It does not detect an attacker, who puts an older ledger back too. Keep it
on another disk for that (SEALRING_VAULT_LEDGER).
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from sealring.errors import ConfigurationError, NotAVault
from sealring.strict import strictly
from sealring.vault.files import locked, write_file
from sealring.vault.sealed import parse, read_small


@dataclass(frozen=True, slots=True)
class Entry:
    object: str
    version: int
    manifest: str
    """Its id."""


@dataclass(frozen=True, slots=True)
class Ledger:
    vault: str
    generation: int
    """Of the header."""
    key: int
    """The number of the vault's key. A holder of an older key can forge generations, not this."""
    entries: list[Entry]


class LocalLedger:
    def __init__(self, vault: str, path: Path) -> None:
        self._vault = vault
        self.path = path

    @classmethod
    def of(cls, vault: str, directory: Path) -> LocalLedger:
        """Where SEALRING_VAULT_LEDGER says, or in the vault's directory."""
        folder = os.environ.get("SEALRING_VAULT_LEDGER")
        if not folder:
            return cls(vault, directory / "ledger.json")
        Path(folder).mkdir(mode=0o700, parents=True, exist_ok=True)
        return cls(vault, Path(folder) / f"{vault}.json")

    def objects(self) -> set[str]:
        return {one.object for one in self._read().entries}

    def newest(self, object_id: str) -> Entry | None:
        return {one.object: one for one in self._read().entries}.get(object_id)

    def state(self) -> tuple[int, int]:
        """The newest key's number and header's generation that were recorded."""
        known = self._read()
        return known.key, known.generation

    def record(self, key: int, generation: int, entry: Entry | None = None) -> None:
        """Never goes back: an older version of an object leaves what is recorded."""
        with locked(self.path.with_name(self.path.name + ".lock"), shared=False):
            ledger = self._read()
            entries = {one.object: one for one in ledger.entries}
            if entry is not None and (
                entry.object not in entries or entry.version >= entries[entry.object].version
            ):
                entries[entry.object] = entry
            made = Ledger(
                self._vault,
                max(generation, ledger.generation),
                max(key, ledger.key),
                list(entries.values()),
            )
            # One that is behind the vault is caught up by the next reader.
            write_file(self.path, json.dumps(asdict(made)).encode() + b"\n", lasting=False)

    def _read(self) -> Ledger:
        if not self.path.exists():
            return Ledger(self._vault, 0, 0, [])
        try:
            document = parse(read_small(self.path, "the ledger"))
            ledger: Ledger = strictly(Ledger, document, str(self.path), "ledger")
        except (ValueError, ConfigurationError):
            raise NotAVault(
                f"the ledger {self.path} cannot be read: restore it, or remove it to start anew"
            ) from None
        if ledger.vault != self._vault:
            raise NotAVault(f"{self.path} is the ledger of another vault: set another folder")
        return ledger
