"""A whole policy: read from TOML, and told in words. What is not known is refused."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from sealring.attest.evidence.kinds import KINDS
from sealring.attest.evidence.nvidia import GPUS, NVSWITCHES
from sealring.attest.evidence.policy import (
    DeviceRules,
    KindRules,
    Policy,
    RankRules,
    ResourceRules,
    bits,
)
from sealring.attest.evidence.policy_tables import PASSES_WITHOUT, Reader
from sealring.core.identity.names import is_job, is_resource
from sealring.errors import BadPolicy
from sealring.limits import MAX_NONCE_SECONDS

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


@dataclass(frozen=True, slots=True)
class Clause:
    about: str
    """The table: snp, nvidia, freshness."""
    text: str
    open: bool = False
    """Something known gets in here, and the policy says so."""


def explain(policy: Policy) -> list[Clause]:
    clauses = []
    for kind, rules in policy.kinds.items():
        clauses += [
            Clause(kind, f"Admits {KINDS[kind].description}.", open=KINDS[kind].hole),
            *(Clause(kind, text) for text in _runs(rules)),
            *(Clause(kind, text) for text in _launch(rules)),
            *(
                Clause(kind, f"{name} is not checked: {PASSES_WITHOUT[name]}.", open=True)
                for name in sorted(rules.unchecked)
            ),
            *(Clause(kind, text, open=True) for text in _weak(rules)),
        ]
    return [*clauses, *_explain_devices(policy), *_revocation(policy), *_joining(policy)]


def _runs(rules: KindRules) -> Iterable[str]:
    ways = []
    if rules.measurements:
        ways.append(f"its measurement is one of {len(rules.measurements)} listed")
    if rules.signers:
        least = rules.floors.get("guest_svn")
        svn = "" if least is None else f" and its security version is at least {least}"
        ways.append(f"its image is signed by one of {len(rules.signers)} listed keys{svn}")
    if ways:
        yield f"It passes if {', or '.join(ways)}."
    for name, values in rules.registers.items():
        yield f"{name} holds one of {len(values)} listed values."
    for name, values in rules.events.items():
        yield f"{name} was extended with none but {len(values)} listed events, as a log shows."
    if rules.ima is not None:
        yield f"It has measured none but {len(rules.ima.files)} listed files since it booted."


def _launch(rules: KindRules) -> Iterable[str]:
    for product, parts in rules.minimum_tcb.items():
        least = ", ".join(f"{name} {value}" for name, value in parts.items())
        when = ", now and when the guest was launched" if rules.launch_tcb else ""
        yield f"On {product}: at least {least}{when}."
    if rules.minimum_tcb and rules.products:
        yield "No other product passes."
    elif rules.products:
        yield f"Only {' or '.join(sorted(rules.products))} passes."
    if rules.tcb_status:
        yield f"Intel calls its TCB {' or '.join(sorted(rules.tcb_status))}."
    facts = {name.removeprefix("platform_"): value for name, value in rules.facts.items()}
    if facts:
        rest = "" if any(rules.masks.values()) else ", and no bit without a name is set"
        yield f"The platform reports {_switches(facts)}{rest}."


def _weak(rules: KindRules) -> Iterable[str]:
    """What a value admits that is not the strict one."""
    if rules.limits.get("vlek"):
        yield "vlek: reports pass that a cloud provider's key signed; they do not name the chip."
    if rules.limits.get("ak_certificate"):
        yield "ak_certificates: quotes pass whose key an issuer, not this verifier, found in a TPM."
    if rules.limits.get("migration"):
        yield "migration: guests pass that a migration agent may move to another machine."
    if rules.limits.get("insecure_boot"):
        yield "secure_boot: guests pass that booted with Secure Boot off."
    if vmpl := rules.limits.get("vmpl"):
        yield f"vmpl: software of privilege level {vmpl} passes, below the guest's kernel."
    if rules.ima is not None and rules.ima.exclude:
        listed = ", ".join(sorted(rules.ima.exclude))
        yield f"ima.exclude: any file passes that is measured as one of {listed}."
    for product, parts in rules.minimum_tcb.items():
        if parts and not any(parts.values()):
            yield f"minimum_tcb: any firmware and microcode of {product} passes, since 0 is any."
    if rules.signers and rules.floors.get("guest_svn") == 0:
        yield f"guest_svn: {PASSES_WITHOUT['guest_svn']}, since 0 is any."
    if rules.signers and rules.minimum_tcb.get("SGX", {}).get("isvsvn") == 0:
        yield f"isvsvn: {PASSES_WITHOUT['isvsvn']}, since 0 is any."
    if mask := rules.masks.get("platform_unknown"):
        yield f"platform_info: hosts pass that report {bits(mask)}, whose meaning is not known."
    if others := rules.tcb_status - {"UpToDate"}:
        yield f"tcb_status: platforms pass that Intel calls {' or '.join(sorted(others))}."


def _explain_devices(policy: Policy) -> list[Clause]:
    rules = policy.devices
    if rules is None:
        return [Clause("nvidia", "No worker may show GPUs: the policy has no [nvidia].")]
    clauses = [
        f"At least {rules.gpus} GPUs and {rules.switches} switches, each linked to what is shown.",
        f"Models: {_listed(rules.models)}.",
        *(f"{name}: {_listed(versions)}." for name, versions in rules.firmware.items()),
    ]
    found = [Clause("nvidia", text) for text in clauses]
    if not rules.require_reference:
        text = "require_reference: firmware passes for which no reference is at hand."
        found.append(Clause("nvidia", text, open=True))
    return found


def _revocation(policy: Policy) -> list[Clause]:
    about = "freshness"
    if not policy.require_revocation_lists:
        text = "require_revocation_lists: hardware passes whose vendor may have revoked it."
        return [Clause(about, text, open=True)]
    days = policy.revocation_list_days
    found = [Clause(about, f"Every issuer's revocation list is at hand, of at most {days} days.")]
    for issuer in sorted(policy.issuers_without_lists):
        text = f"issuers_without_lists: what {issuer} revoked is not asked."
        found.append(Clause(about, text, open=True))
    return found


def _joining(policy: Policy) -> list[Clause]:
    job = "Any job" if policy.job is None else f"Only the job {policy.job}"
    found = [
        Clause("job", f"{job} may be joined; a rank may be joined again {policy.rejoins} times.")
    ]
    for rank in policy.ranks:
        kinds = " or ".join(sorted(rank.kinds))
        found.append(Clause("ranks", f"Ranks {rank.first} to {rank.last} are {kinds}."))
    for one in policy.resources:
        ranks = "all ranks" if one.ranks is None else f"ranks {one.ranks[0]} to {one.ranks[1]}"
        kinds = ", ".join(sorted(one.kinds))
        found.append(Clause("resources", f"{one.path} goes to {ranks} of {kinds}."))
        if one.guests:
            text = (
                f"guests: {one.path} also goes to every guest of {kinds} that is no rank of a job."
            )
            found.append(Clause("resources", text))
    if not policy.peer_evidence:
        text = "Workers believe the broker's certificates: [peers] evidence = true makes them look."
        found.append(Clause("peers", text))
    return found


def _listed(names: frozenset[str]) -> str:
    return " or ".join(sorted(names)) or "any"


def _switches(facts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {'on' if value else 'off'}" for name, value in facts.items())
