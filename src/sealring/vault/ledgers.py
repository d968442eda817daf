"""Which ledger a vault has."""

from __future__ import annotations

import os

from sealring.vault.broker_ledger import BrokerLedger
from sealring.vault.ledger import AT_THE_BROKER, SETTING, Ledger, LocalLedger
from sealring.vault.storage import VaultPath


def ledger_of(vault: str, directory: VaultPath) -> Ledger:
    """Where SEALRING_VAULT_LEDGER says, or in the vault's directory."""
    if os.environ.get(SETTING) == AT_THE_BROKER:
        return BrokerLedger(vault)
    return LocalLedger.of(vault, directory)
