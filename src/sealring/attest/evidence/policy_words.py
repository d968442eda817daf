"""What a policy lets in, in words; and what it leaves open."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from sealring.attest.evidence.kinds import KINDS
from sealring.attest.evidence.policy import KindRules, Policy
from sealring.attest.evidence.policy_openings import PASSES_WITHOUT
from sealring.attest.evidence.policy_rule import bits


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
    return [*clauses, *_devices(policy), *_revocation(policy), *_joining(policy)]


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


def _devices(policy: Policy) -> list[Clause]:
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
