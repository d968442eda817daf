"""What a vault last held: by this an older copy of it is recognised.

A ledger on the disk that it guards detects accidents: a backup that was put back, a synchronised
folder that lost a race. It does not detect an attacker, who puts an older ledger back too. Keep it
on another disk for that (SEALRING_VAULT_LEDGER).
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from sealring.errors import ConfigurationError, ForeignVault, NotAVault
from sealring.strict import strictly
from sealring.vault.files import locked, write_file
from sealring.vault.sealed import parse, read_small

_LOG = logging.getLogger("sealring")


@dataclass(frozen=True, slots=True)
class Entry:
    object: str
    version: int
    manifest: str
    """Its digest."""


@dataclass(frozen=True, slots=True)
class Ledger:
    vault: str
    generation: int
    """Of the header."""
    key: int
    """The number of the vault's key. A holder of an older key can forge generations, not this."""
    entries: list[Entry]


@dataclass(frozen=True, slots=True)
class Directory:
    """Which vault lies there."""

    directory: str
    vault: str


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
        if not Path(folder).is_dir():
            # It is not made here: it may lie on a disk that is not there at the moment.
            raise ConfigurationError(
                f"SEALRING_VAULT_LEDGER={folder} is no directory: attach the disk that it lies on, "
                f"or, if there was none before, run `mkdir -m 700 {folder}`"
            )
        return cls(vault, Path(folder) / f"{vault}.json")

    def bind(self, directory: Path, *, made_now: bool, record: bool) -> None:
        """A ledger elsewhere remembers which vault lies in a directory.

        Another one there is refused, unless this process has made it. A vault that it does not
        know yet is accepted, and reported.
        """
        if self.path.parent == directory:
            return
        if not made_now and not self.path.exists():
            _LOG.warning(
                "sealring: %s has recorded nothing of the vault %s yet, so an older copy of it "
                "would not be recognised now. If it should know the vault, stop and restore it",
                self.path.parent, self._vault,
            )  # fmt: skip
        where = str(directory.resolve())
        name = hashlib.sha256(where.encode()).hexdigest()[:32]
        path = self.path.with_name(f"directory-{name}.json")
        if path.exists() and not made_now:
            try:
                known: Directory = strictly(
                    Directory, parse(read_small(path, "the ledger")), str(path), "ledger"
                )
            except (ValueError, ConfigurationError):
                raise NotAVault(f"the ledger {path} cannot be read: restore or remove it") from None
            if known.vault != self._vault:
                raise ForeignVault(
                    f"{where} holds the vault {self._vault}, and held {known.vault}, says {path}: "
                    "another vault was put in its place. Restore the right one, or remove that "
                    "file if you put it there yourself"
                )
            return
        if record:
            write_file(path, json.dumps(asdict(Directory(where, self._vault))).encode() + b"\n")

    def objects(self) -> set[str]:
        return {one.object for one in self._read().entries}

    def newest(self, object_id: str) -> Entry | None:
        return {one.object: one for one in self._read().entries}.get(object_id)

    def state(self) -> tuple[int, int]:
        """The newest key's number and header's generation that were recorded."""
        known = self._read()
        return known.key, known.generation

    def record(self, key: int, generation: int, entry: Entry | None = None) -> None:
        """Never goes back: an older header or version leaves what is recorded."""
        with locked(self.path.with_name(self.path.name + ".lock"), shared=False):
            ledger = self._read()
            entries = {one.object: one for one in ledger.entries}
            if entry is not None and (
                entry.object not in entries or entry.version >= entries[entry.object].version
            ):
                entries[entry.object] = entry
            key, generation = max((key, generation), (ledger.key, ledger.generation))
            made = Ledger(self._vault, generation, key, list(entries.values()))
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
