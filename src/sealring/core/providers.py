"""Who does what the core asks for: for each slot of hooks.py, `module:attribute` or a module.

A table and not an import: what is named here is loaded when it is first asked for.
`ONLY_WITH` names variables without one of which a provider is not asked.
"""

from __future__ import annotations

from typing import Final

PROVIDERS: Final = {
    "enrolments": ("sealring.attest.broker:enrolled",),
    "group_observers": (
        "sealring.observe.process:observe_groups",
        "sealring.observe.server:observe_groups",
        "sealring.record.recording.run:observe_groups",
    ),
    "flight_records": ("sealring.observe.process:recorders",),
    "data_keys": ("sealring.attest.broker:data_key",),
    "vault_records": ("sealring.attest.broker.enrolment:RecordsOfVault",),
    "evidence_judge": ("sealring.attest.evidence.admission",),
    "run_notes": ("sealring.record.recording.hooks",),
}
ONLY_WITH: Final = {
    "sealring.record.recording.run:observe_groups": ("_SEALRING_RECORD", "_SEALRING_REPLAY"),
}
