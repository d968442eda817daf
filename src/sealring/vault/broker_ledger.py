"""A ledger that the job's broker keeps: an attacker who owns the vault's disk cannot put it back.

The broker records for admitted workers, each under its attested key, and answers what the job's
workers have recorded. What it answered stays until the vault's header is read again.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import asdict

from sealring.errors import ConfigurationError
from sealring.vault.ledger import AT_THE_BROKER, SETTING, Entry
from sealring.vault.storage import VaultPath

_LOG = logging.getLogger("sealring")


class BrokerLedger:
    beside_the_vault = False

    def __init__(self, vault: str) -> None:
        if not os.environ.get("SEALRING_BROKER"):
            raise ConfigurationError(
                f"{SETTING}={AT_THE_BROKER} needs a worker that joins through a broker: set "
                "SEALRING_BROKER, or a folder for the ledger"
            )
        self._vault = vault
        self._entries: Mapping[str, Entry] = {}
        self._header = 0, 0
        self.where = f"the broker {os.environ['SEALRING_BROKER']}"

    def bind(self, directory: VaultPath, *, made_now: bool, record: bool) -> None:
        self.state()
        if not made_now and self._header == (0, 0):
            _LOG.warning(
                "sealring: %s has recorded nothing of the vault %s for this job yet, so an older "
                "copy of it would not be recognised now. If the job has used it before, stop: it "
                "is another vault, or the broker has lost its records", self.where, self._vault,
            )  # fmt: skip

    def objects(self) -> set[str]:
        return set(self._entries)

    def newest(self, object_id: str) -> Entry | None:
        return self._entries.get(object_id)

    def state(self) -> tuple[int, int]:
        from sealring.broker import this_worker
        from sealring.broker.vault_client import AskVault

        answer = this_worker().ask(lambda name, key: AskVault(name, key, self._vault))
        self._entries = {one.object: Entry(**asdict(one)) for one in answer.entries}
        self._header = answer.key, answer.generation
        return self._header

    def record(self, key: int, generation: int, entry: Entry | None = None) -> None:
        from sealring.broker import this_worker
        from sealring.broker.vault_client import TellVault
        from sealring.broker.vault_messages import Entry as Told

        told = None if entry is None else Told(**asdict(entry))
        answer = this_worker().ask(
            lambda name, own: TellVault(name, own, self._vault, key, generation, told)
        )
        self._header = answer.key, answer.generation
        if answer.entry is not None:
            known = Entry(**asdict(answer.entry))
            self._entries = {**self._entries, known.object: known}
