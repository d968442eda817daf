"""What a job's vaults last held, as its workers have recorded it: by this a rollback is seen.

vault/<job>/<vault>             the newest header: the number of the vault's key, its generation
vault/<job>/<vault>/<object>    the newest version of an object, and its manifest's digest

Records only grow: an older header or version leaves what is recorded, another content under a
recorded version is refused. Each job has records of its own, so a worker of another job can change
none of them. Each change is in the audit log.
"""

from __future__ import annotations

from typing import Final

from sealring.attest.broker.ledger import Ledger, require_holder
from sealring.attest.broker.messages import PAGE, ReadVault, RecordVault
from sealring.attest.broker.store import Row, View
from sealring.errors import BrokerRefusal

MOST_OBJECTS: Final = 100_000
"""Of one vault: an admitted worker must not fill the store."""


def read(view: View, now: float, asked: ReadVault) -> Row:
    """The header, and a page of objects in the order of their ids."""
    require_holder(view, asked.name, asked.key, now)
    place = _place(asked.name.job, asked.vault)
    header = view.get(place) or {"key": 0, "generation": 0}
    found = []
    for key, row in view.scan(f"{place}/", asked.after):
        name = key.rpartition("/")[2]
        if name > asked.after:
            found.append({"object": name, "version": row["version"], "manifest": row["manifest"]})
        if len(found) == PAGE:
            break
    return {"key": header["key"], "generation": header["generation"], "entries": found}


def record(view: View, now: float, ledger: Ledger, asked: RecordVault) -> Row:
    """Records what is newer than what is known; returns what is known then."""
    require_holder(view, asked.name, asked.key, now)
    place = _place(asked.name.job, asked.vault)
    known = view.get(place) or {"key": 0, "generation": 0, "objects": 0}
    header = max((asked.number, asked.generation), (known["key"], known["generation"]))
    facts: Row = {}
    entries: list[Row] = []
    objects = known["objects"]
    if asked.entry is not None:
        entry = view.get(f"{place}/{asked.entry.object}")
        if entry is None and objects >= MOST_OBJECTS:
            raise BrokerRefusal(
                f"the broker keeps records of {MOST_OBJECTS} objects of a vault",
                code="broker.too_many_records",
            )
        if entry is None or asked.entry.version > entry["version"]:
            objects += entry is None
            entry = {"version": asked.entry.version, "manifest": asked.entry.manifest}
            view.put(f"{place}/{asked.entry.object}", entry)
            facts = {"object": asked.entry.object, **entry}
        elif asked.entry.version == entry["version"] and asked.entry.manifest != entry["manifest"]:
            raise BrokerRefusal(
                f"version {entry['version']} of object {asked.entry.object} was recorded with "
                "another content: two copies of the vault have gone different ways",
                code="broker.recorded_otherwise",
            )
        entries = [{"object": asked.entry.object, **entry}]
    if facts or header != (known["key"], known["generation"]):
        view.put(place, {"key": header[0], "generation": header[1], "objects": objects})
        ledger.note(
            view, now, "recorded", job=asked.name.job, rank=asked.name.rank, key=asked.key,
            what=f"vault/{asked.vault}", vault_key=header[0], generation=header[1], **facts,
        )  # fmt: skip
    return {"key": header[0], "generation": header[1], "entries": entries}


def _place(job: str, vault: str) -> str:
    return f"vault/{job}/{vault}"
