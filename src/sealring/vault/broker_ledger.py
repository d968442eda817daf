"""A ledger that the job's broker keeps: an attacker who owns the vault's disk cannot put it back.

The broker records for admitted workers, each under its attested key, and answers what the job's
workers have recorded. What it answered stays until the vault's header is read again. A process
accepts no answer that is older than an earlier one: records only go forward.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Mapping, Sequence
from typing import Final

from sealring.core.hooks import VaultEntry, vault_records
from sealring.errors import ConfigurationError, RolledBack
from sealring.vault.ledger import AT_THE_BROKER, SETTING
from sealring.vault.storage import VaultPath

_LOG = logging.getLogger("sealring")


class _Answered:
    """What the broker has answered this process about one vault."""

    def __init__(self) -> None:
        self.header = 0, 0
        self.entries: Mapping[str, VaultEntry] = {}
        self.asking = threading.Lock()
        """Held from the question to the answer: answers then come in the order of questions."""

    def take(
        self,
        where: str,
        header: tuple[int, int],
        entries: Mapping[str, VaultEntry],
        told: tuple[tuple[int, int], Sequence[VaultEntry]] = ((0, 0), ()),
    ) -> None:
        """What the broker answers now: not older than an earlier answer, and than what it was told.

        Otherwise RolledBack, and what was known stays.
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
    """Also another content under the same number: the broker never replaces it."""
    return one.version < known.version or (one.version == known.version and one != known)


_ANSWERED: Final[dict[tuple[str, str | None, str], _Answered]] = {}
"""By the broker, the job and the vault."""


class BrokerLedger:
    beside_the_vault = False

    def __init__(self, vault: str) -> None:
        broker = os.environ.get("SEALRING_BROKER")
        if not broker:
            raise ConfigurationError(
                f"{SETTING}={AT_THE_BROKER} needs a worker that joins through a broker: set "
                "SEALRING_BROKER, or a folder for the ledger"
            )
        self._vault = vault
        which = broker, os.environ.get("SEALRING_JOB"), vault
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

    def objects(self) -> set[str]:
        return set(self._answered.entries)

    def newest(self, object_id: str) -> VaultEntry | None:
        return self._answered.entries.get(object_id)

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
