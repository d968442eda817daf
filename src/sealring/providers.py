"""Who does what the core asks for: for each slot of hooks.py, `module:attribute` or a module.

A table and not an import: what is named here is loaded when it is first asked for.
"""

from __future__ import annotations

from typing import Final

PROVIDERS: Final = {
    "enrolments": ("sealring.broker:enrolled",),
    "group_observers": (
        "sealring.recorder.start:observe_groups",
        "sealring.live.worker:observe_groups",
        "sealring.recording.run:observe_groups",
    ),
    "data_keys": ("sealring.broker:data_key",),
    "vault_records": ("sealring.broker.vault_client:RecordsOfVault",),
    "evidence_judge": ("sealring.identity.attestation.recorded",),
    "run_notes": ("sealring.recording.hooks",),
}
