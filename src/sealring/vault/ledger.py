"""A ledger records a vault's newest state, so that an older copy of the vault is recognised.

A ledger on the vault's own disk detects accidents: a backup that was put back, a synchronised
folder that lost a race. It does not detect an attacker, who puts an older ledger back too. For that
keep it on another disk, or with the job's broker (SEALRING_VAULT_LEDGER).

The broker takes records from admitted workers, each under its attested key, and answers with what
the job's workers have recorded. A process keeps the answer until it reads the vault's header again.
It accepts no answer that is older than an earlier one: records only go forward.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final, Protocol

from sealring.core.hooks import VaultEntry, vault_records
from sealring.core.settings import BROKER, JOB, VAULT_LEDGER
from sealring.errors import ConfigurationError, NotAVault, RolledBack, VaultError
from sealring.vault.files import locked, write_file
from sealring.vault.sealed import LARGEST_LEDGER, check_small, read_as, read_small
from sealring.vault.storage import VaultPath

_LOG = logging.getLogger("sealring")
AT_THE_BROKER: Final = "broker"
"""The setting's value for the broker's records; a folder of this name is ./broker."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """The content of a ledger's file."""

    vault: str
    generation: int
    """The header's generation."""
    key: int
    """The number of the vault's key. A holder of an older key can forge a generation, but no newer
    key number."""
    entries: list[VaultEntry]


@dataclass(frozen=True, slots=True)
class Directory:
    """The content of a file that records which vault lies in a directory."""

    directory: str
    vault: str


class Ledger(Protocol):
    """Records the newest known state of one vault."""

    where: str
    """The ledger's name in messages."""
    beside_the_vault: bool
    """Whether the ledger lies on the vault's own disk."""

    def bind(self, directory: VaultPath, *, made_now: bool, record: bool) -> None:
        """Raises VaultError if another vault was recorded for this directory.

        Warns if nothing is recorded of this vault yet.
        """

    def entries(self) -> Mapping[str, VaultEntry]:
        """The newest version of each object, by its id."""

    def state(self) -> tuple[int, int]:
        """The newest recorded key number and header generation.

        Every read of a vault's header asks for this first.
        """

    def record(self, key: int, generation: int, entry: VaultEntry | None = None) -> None:
        """Records a state. An older header or version does not replace what is recorded."""


class LocalLedger:
    def __init__(self, vault: str, path: Path, *, beside_the_vault: bool = True) -> None:
        self._vault = vault
        self.path = path
        self.where = str(path)
        self.beside_the_vault = beside_the_vault

    def bind(self, directory: VaultPath, *, made_now: bool, record: bool) -> None:
        """If the ledger lies elsewhere, it also records which vault lies in the directory.

        Another vault there is refused, unless this process has just made it. A vault that the
        ledger does not know yet is accepted with a warning.
        """
        if directory.locks and self.path.parent == directory.local:
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
            content = read_small(path, "the ledger")
            known: Directory = read_as(
                Directory, content, f"the ledger {path} (restore or remove it)"
            )
            if known.vault != self._vault:
                raise VaultError(
                    f"{where} holds the vault {self._vault}, and held {known.vault}, says {path}: "
                    "another vault was put in its place. Restore the right one, or remove that "
                    "file if you put it there yourself",
                    code="vault.foreign",
                )
            return
        if record:
            write_file(path, json.dumps(asdict(Directory(where, self._vault))).encode() + b"\n")

    def entries(self) -> Mapping[str, VaultEntry]:
        return {one.object: one for one in self._read().entries}

    def state(self) -> tuple[int, int]:
        known = self._read()
        return known.key, known.generation

    def record(self, key: int, generation: int, entry: VaultEntry | None = None) -> None:
        with locked(self.path.with_name(self.path.name + ".lock"), shared=False):
            ledger = self._read()
            entries = {one.object: one for one in ledger.entries}
            if entry is not None and (
                entry.object not in entries or entry.version >= entries[entry.object].version
            ):
                entries[entry.object] = entry
            key, generation = max((key, generation), (ledger.key, ledger.generation))
            made = Recorded(self._vault, generation, key, list(entries.values()))
            content = json.dumps(asdict(made)).encode() + b"\n"
            check_small(content, f"the ledger {self.path}", "make a second vault", LARGEST_LEDGER)
            # Not `lasting`: the next reader brings a ledger that is behind up to date.
            write_file(self.path, content, lasting=False)

    def _read(self) -> Recorded:
        if not self.path.exists():
            return Recorded(self._vault, 0, 0, [])
        content = read_small(self.path, "the ledger", LARGEST_LEDGER)
        where = f"the ledger {self.path} (restore it, or remove it to start anew)"
        ledger: Recorded = read_as(Recorded, content, where)
        if ledger.vault != self._vault:
            raise NotAVault(f"{self.path} is the ledger of another vault: set another folder")
        return ledger


class _Answered:
    """What the broker has told this process about one vault."""

    def __init__(self) -> None:
        self.header = 0, 0
        self.entries: Mapping[str, VaultEntry] = {}
        self.asking = threading.Lock()
        """Held from each question to its answer, so that answers arrive in the order of questions.
        """

    def take(
        self,
        where: str,
        header: tuple[int, int],
        entries: Mapping[str, VaultEntry],
        told: tuple[tuple[int, int], Sequence[VaultEntry]] = ((0, 0), ()),
    ) -> None:
        """Accepts an answer of the broker unless it is older than an earlier one or than `told`.

        `told`: what this process has just recorded there. Raises RolledBack for an older answer;
        what was known then stays.
        """
        known = [*self.entries.values(), *told[1]]
        newer = header >= max(self.header, told[0]) and all(
            one.object in entries and not _older(entries[one.object], one) for one in known
        )
        if not newer:
            raise RolledBack(
                f"{where} answers with older records of the vault than before: an earlier answer "
                "was sent again, or the broker's store was put back. Restore the broker's store"
            )
        self.header, self.entries = header, entries


def _older(one: VaultEntry, known: VaultEntry) -> bool:
    """Whether an entry is older than the known one.

    True also for the same version with other content: the broker never replaces an entry so.
    """
    return one.version < known.version or (one.version == known.version and one != known)


_ANSWERED: Final[dict[tuple[str, str | None, str], _Answered]] = {}
"""The answers so far, by broker, job and vault."""


class BrokerLedger:
    beside_the_vault = False

    def __init__(self, vault: str) -> None:
        broker = BROKER.read(os.environ)
        if not broker:
            raise ConfigurationError(
                f"{VAULT_LEDGER.name}={AT_THE_BROKER} needs a worker that joins through a broker: "
                "set SEALRING_BROKER, or a folder for the ledger"
            )
        self._vault = vault
        which = broker, JOB.read(os.environ), vault
        self._answered = _ANSWERED.setdefault(which, _Answered())
        self.where = f"the broker {broker}"

    def bind(self, directory: VaultPath, *, made_now: bool, record: bool) -> None:
        self.state()
        if not made_now and self._answered.header == (0, 0):
            _LOG.warning(
                "sealring: %s has recorded nothing of the vault %s for this job yet, so an older "
                "copy of it would not be recognised now. If the job has used it before, stop: it "
                "is another vault, or the broker has lost its records", self.where, self._vault,
            )  # fmt: skip

    def entries(self) -> Mapping[str, VaultEntry]:
        return self._answered.entries

    def state(self) -> tuple[int, int]:
        records = vault_records.one()(self._vault)
        with self._answered.asking:
            answer = records.read()
            entries = {one.object: one for one in answer.entries}
            self._answered.take(self.where, (answer.key, answer.generation), entries)
        return answer.key, answer.generation

    def record(self, key: int, generation: int, entry: VaultEntry | None = None) -> None:
        records = vault_records.one()(self._vault)
        with self._answered.asking:
            answer = records.record(key, generation, entry)
            entries = {**self._answered.entries, **{one.object: one for one in answer.entries}}
            self._answered.take(
                self.where,
                (answer.key, answer.generation),
                entries,
                told=((key, generation), [] if entry is None else [entry]),
            )


def ledger_of(vault: str, directory: VaultPath) -> Ledger:
    """The ledger that SEALRING_VAULT_LEDGER names; by default in the vault's directory."""
    folder = VAULT_LEDGER.read(os.environ)
    if folder == AT_THE_BROKER:
        return BrokerLedger(vault)
    if not folder:
        if not directory.locks:
            raise ConfigurationError(
                f"{directory} lies in a store, where no ledger is kept by which a rollback is "
                f"seen: set {VAULT_LEDGER.name} to a folder, or to {AT_THE_BROKER}"
            )
        return LocalLedger(vault, directory.local / "ledger.json")
    if not Path(folder).is_dir():
        # The folder is not made here: it may lie on a disk that is not attached at the moment.
        raise ConfigurationError(
            f"{VAULT_LEDGER.name}={folder} is no directory: attach the disk that it lies on, "
            f"or, if there was none before, run `mkdir -m 700 {folder}`"
        )
    elsewhere = not directory.locks or not Path(folder).is_relative_to(directory.local)
    return LocalLedger(vault, Path(folder) / f"{vault}.json", beside_the_vault=not elsewhere)
