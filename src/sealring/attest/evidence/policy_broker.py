"""The policy's part for a broker and its workers: job, certificates, peers, data keys."""

from __future__ import annotations

from typing import Final

from sealring.attest.evidence.policy import ResourceRules
from sealring.attest.evidence.policy_reader import Reader
from sealring.core.identity.names import is_job, is_resource

BROKER_FIELDS: Final = {"job", "certificate", "peers", "resources"}


def read_job(reader: Reader) -> str | None:
    job = reader.document.get("job")
    if job is not None and not (isinstance(job, str) and is_job(job)):
        raise reader.bad("", "job", "has 1 to 63 of A-Z a-z 0-9 . _ -")
    return job


def read_peer_evidence(reader: Reader, kinds: set[str]) -> bool:
    wanted = reader.flag(reader.table("peers", {"evidence"}), "peers", "evidence", False)
    if wanted and "tpm" in kinds:
        # That its key lives in a TPM is shown to the broker, by a secret between those two.
        raise reader.bad("peers", "evidence", "cannot be true with [tpm]: peers cannot judge it")
    return wanted


def read_resources(reader: Reader, kinds: set[str]) -> tuple[ResourceRules, ...]:
    """A resource goes to all admitted workers unless its entry says to whom.

    To guests that are no rank of a job it goes only if its entry says so.
    """
    rules = []
    for entry in reader.tables("resources"):
        reader.known(entry, {"path", "ranks", "kinds", "guests"}, "resources")
        path = entry.get("path")
        if not isinstance(path, str) or not is_resource(path) or path.startswith("sealring/"):
            raise reader.bad(
                "resources", "path", "is repository/type/tag, and the repository not sealring"
            )
        ranks = reader.ranks(entry, "resources") if "ranks" in entry else None
        named = reader.kinds(entry, "resources", kinds) if "kinds" in entry else frozenset(kinds)
        guests = reader.flag(entry, "resources", "guests", False)
        rules.append(ResourceRules(path, ranks, named, guests))
    return tuple(rules)
