"""The policy as TOML: which tables there are, what each may hold. What is not known is refused."""

from __future__ import annotations

from typing import Final

from sealring.attest.evidence.kinds import KINDS
from sealring.attest.evidence.nvidia.device import GPUS, NVSWITCHES
from sealring.attest.evidence.policy import Policy, RankRules
from sealring.attest.evidence.policy_broker import (
    BROKER_FIELDS,
    read_job,
    read_peer_evidence,
    read_resources,
)
from sealring.attest.evidence.policy_devices import DeviceRules
from sealring.attest.evidence.policy_reader import Reader
from sealring.errors import BadPolicy
from sealring.limits import MAX_NONCE_SECONDS

_FRESHNESS: Final = {
    "nonce_seconds", "require_revocation_lists", "issuers_without_lists", "revocation_list_days",
}  # fmt: skip
_NVIDIA: Final = {"gpus", "switches", "models", "drivers", "vbios", "require_reference"}


def parse_policy(text: str) -> Policy:
    """Every rule that keeps a known hole shut is stated, or the policy names it as left open."""
    reader = Reader(text)
    policy = _read(reader)
    if reader.missing:
        raise BadPolicy(f"the policy, {'; '.join(reader.missing)}")
    return policy


def _read(reader: Reader) -> Policy:
    document = reader.document
    known = {"version", "freshness", "rejoins", "ranks", "nvidia", *BROKER_FIELDS, *KINDS}
    reader.known(document, known, "")
    if document.get("version") != 1 or type(document["version"]) is not int:
        raise reader.bad("", "version", "is 1")
    kinds = {name: kind.rules(reader, name) for name, kind in KINDS.items() if name in document}
    if not kinds:
        raise reader.bad(
            "", "snp", "or another kind of evidence is missing: the policy admits nothing"
        )
    fresh = reader.table("freshness", _FRESHNESS)
    return Policy(
        kinds=kinds,
        ranks=_ranks(reader, set(kinds)),
        simulated_roots=_roots(reader, "simulated"),
        tpm_roots=_roots(reader, "tpm"),
        devices=_devices(reader) if "nvidia" in document else None,
        nonce_seconds=reader.number(fresh, "freshness", "nonce_seconds", 1, MAX_NONCE_SECONDS, 120),
        require_revocation_lists=reader.flag(fresh, "freshness", "require_revocation_lists", True),
        issuers_without_lists=reader.words(
            fresh, "freshness", "issuers_without_lists", None, longest=100
        ),
        revocation_list_days=reader.number(fresh, "freshness", "revocation_list_days", 1, 3650, 30),
        rejoins=reader.number(document, "", "rejoins", 0, 1000, 0),
        job=read_job(reader),
        certificate_minutes=reader.number(
            reader.table("certificate", {"minutes"}), "certificate", "minutes", 1, 1440, 10
        ),
        peer_evidence=read_peer_evidence(reader, set(kinds)),
        resources=read_resources(reader, set(kinds)),
    )


def _roots(reader: Reader, where: str) -> frozenset[str]:
    if where not in reader.document:
        return frozenset()
    roots = reader.digests(reader.document[where], where, "roots", 32)
    reader.some(roots, where, "roots")
    return roots


def _devices(reader: Reader) -> DeviceRules:
    table = reader.table("nvidia", _NVIDIA)
    versions = {
        "driver": reader.words(table, "nvidia", "drivers", None),
        "vbios": reader.words(table, "nvidia", "vbios", None),
    }
    return DeviceRules(
        gpus=reader.number(table, "nvidia", "gpus", 0, 16, 1),
        switches=reader.number(table, "nvidia", "switches", 0, 16, 0),
        models=reader.words(table, "nvidia", "models", GPUS | NVSWITCHES),
        firmware={name: listed for name, listed in versions.items() if listed},
        require_reference=reader.flag(table, "nvidia", "require_reference", True),
    )


def _ranks(reader: Reader, kinds: set[str]) -> tuple[RankRules, ...]:
    rules = []
    for entry in reader.tables("ranks"):
        reader.known(entry, {"ranks", "kinds"}, "ranks")
        first, last = reader.ranks(entry, "ranks")
        rules.append(RankRules(first, last, reader.kinds(entry, "ranks", kinds)))
    return tuple(rules)
