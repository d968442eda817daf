"""A whole policy: read from TOML, judged rule by rule, and described in words.

The evidence is verified by now. Here it is compared with what the job's owner allows. Every rule is
judged, so that an operator sees all failures at once. No rule can admit a debug guest.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any, Final

from sealring.attest.evidence.rules import (
    Document,
    Finding,
    Judged,
    Prompter,
    Rules,
    Table,
    TableForm,
    Type,
    any_of,
    distinct,
    flag,
    list_of,
    number,
    some,
    words,
)
from sealring.attest.evidence.verify import DEVICE_KINDS, KINDS
from sealring.attest.evidence.worker import AttestedDevice, DescribedWorker
from sealring.core.identity.names import is_job, is_resource
from sealring.errors import BadPolicy, classes_by_code
from sealring.limits import MAX_NONCE_SECONDS, MAX_WORLD


@dataclass(frozen=True, slots=True)
class RankRules:
    ranks: tuple[int, int]
    """The first and the last rank."""
    kinds: frozenset[str]


@dataclass(frozen=True, slots=True)
class ResourceRules:
    """Who gets one of the broker's data keys: all admitted workers, unless the rule limits it."""

    path: str
    ranks: tuple[int, int] | None
    """The first and the last rank. None: all ranks."""
    kinds: frozenset[str]
    guests: bool = False
    """Whether attested guests that are no rank of a job (stock KBS clients) get it too."""


@dataclass(frozen=True, slots=True)
class Policy:
    kinds: Mapping[str, Rules]
    ranks: tuple[RankRules, ...] = ()
    """If empty, any rank may be any admitted kind. Otherwise a rank must be in one of them."""
    devices: Rules | None = None
    """None: workers may show no devices."""
    nonce_seconds: int = 120
    require_revocation_lists: bool = True
    issuers_without_lists: frozenset[str] = frozenset()
    """Names of issuers that are trusted although their revocation lists are missing."""
    revocation_list_days: int = 30
    rejoins: int = 0
    job: str | None = None
    """The only job that may be joined. None: any job."""
    certificate_minutes: float = 10
    """How long a worker's certificate lives, and so how long a revoked worker can stay."""
    peer_evidence: bool = False
    """Whether workers show each other the evidence itself, not only the broker's certificate."""
    resources: tuple[ResourceRules, ...] = ()

    @property
    def simulated_roots(self) -> frozenset[str]:
        return self._roots("simulated")

    @property
    def tpm_roots(self) -> frozenset[str]:
        return self._roots("tpm")

    def _roots(self, kind: str) -> frozenset[str]:
        return self.kinds[kind]["roots"] if kind in self.kinds else frozenset()

    @property
    def shows_files(self) -> bool:
        """Whether some kind must show the files that its kernel measured."""
        return any(rules.get("ima") is not None for rules in self.kinds.values())


_DEVICES: Final = "nvidia"
_FRESHNESS: Final[Mapping[str, Type]] = {
    "nonce_seconds": number(1, MAX_NONCE_SECONDS, 120),
    "require_revocation_lists": flag(True),
    "issuers_without_lists": words(longest=100),
    "revocation_list_days": number(1, 3650, 30),
}
_FIELDS: Final = {
    "version", "job", "rejoins", "freshness", "certificate", "peers", "ranks", "resources",
    *DEVICE_KINDS, *KINDS,
}  # fmt: skip


def parse_policy(text: str) -> Policy:
    """Reads a policy. It must state each rule that closes a known hole, or list it as open."""
    try:
        values = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as problem:
        raise BadPolicy(f"the policy is not TOML: {problem}") from None
    document = Document(text.splitlines())
    policy = _read(Table(values, "", document))
    if document.missing:
        raise BadPolicy(f"the policy, {'; '.join(document.missing)}")
    return policy


def _read(top: Table) -> Policy:
    top.only(_FIELDS)
    if top.values.get("version") != 1 or type(top.values["version"]) is not int:
        raise top.bad("version", "is 1")
    kinds = {name: KINDS[name].form.read(top.inner(name)) for name in KINDS if name in top.values}
    if not kinds:
        raise top.bad("snp", "or another kind of evidence is missing: the policy admits nothing")
    devices = None
    if _DEVICES in top.values:
        devices = DEVICE_KINDS[_DEVICES].form.read(top.inner(_DEVICES))
    peer_evidence = top.inner("peers").read({"evidence": flag(False)})["evidence"]
    if peer_evidence and "tpm" in kinds:
        # The broker shares a secret with the TPM, and so only it learns that the key is in a TPM.
        raise top.inner("peers").bad("evidence", "cannot be true with [tpm]: peers cannot judge it")
    every = frozenset(kinds)
    rank = {"ranks": _ranks, "kinds": _kinds_of(every)}
    resource = {
        "path": _path,
        "ranks": _or(_ranks, None),
        "kinds": _or(_kinds_of(every), every),
        "guests": flag(False),
    }
    return Policy(
        kinds=kinds,
        ranks=tuple(RankRules(**one.read(rank)) for one in top.entries("ranks")),
        devices=devices,
        rejoins=number(0, 1000)(top, "rejoins"),
        job=_or(_job, None)(top, "job"),
        certificate_minutes=top.inner("certificate").read({"minutes": number(1, 1440, 10)})[
            "minutes"
        ],
        peer_evidence=peer_evidence,
        resources=tuple(ResourceRules(**one.read(resource)) for one in top.entries("resources")),
        **top.inner("freshness").read(_FRESHNESS),
    )


def _or(read: Type, default: object) -> Type:
    return lambda table, name: read(table, name) if name in table.values else default


def _job(table: Table, name: str) -> str:
    job = table.values[name]
    if not isinstance(job, str) or not is_job(job):
        raise table.bad(name, "has 1 to 63 of A-Z a-z 0-9 . _ -")
    return job


def _path(table: Table, name: str) -> str:
    path = table.values.get(name)
    if not isinstance(path, str) or not is_resource(path) or path.startswith("sealring/"):
        raise table.bad(name, "is repository/type/tag, and the repository not sealring")
    return path


def _ranks(table: Table, name: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d{1,5})(?:-(\d{1,5}))?", str(table.values.get(name)), re.ASCII)
    first = int(match[1]) if match else 1
    last = int(match[2] or match[1]) if match else 0
    if not first <= last < MAX_WORLD:
        raise table.bad(name, 'is "3" or "0-7"')
    return first, last


def _kinds_of(known: Collection[str]) -> Type:
    return some(list_of(known.__contains__, "is a list of kinds that this policy describes"))


@dataclass(frozen=True, slots=True)
class Verdict:
    label: str
    rules: tuple[Judged, ...]

    @property
    def admitted(self) -> bool:
        return all(rule.refusal is None for rule in self.rules)

    def require(self) -> None:
        """Raises the first refusal. Its message names all of them."""
        failed = [rule for rule in self.rules if rule.refusal is not None]
        if failed and failed[0].refusal is not None:
            said = "; ".join(f"{one.name}: {one.found}, not {one.wanted}" for one in failed)
            told = f"the policy does not admit this {self.label} worker: {said}"
            code = failed[0].refusal
            raise classes_by_code()[code](told, code=code)


def judge(
    policy: Policy, worker: DescribedWorker, rank: int | None, job: str | None = None
) -> Verdict:
    """Judges a worker. `rank` and `job` are None if not known, as in `sealring policy check`."""
    rules = policy.kinds.get(worker.kind)
    kind = "kind", rules is not None, any_of(policy.kinds), worker.label
    debug = "debug", not worker.debug, "off", "on" if worker.debug else "off"
    results = [_judged("policy.kind_not_allowed", *kind), _judged("policy.debug_guest", *debug)]
    if rules is not None:
        results += rules.judge(worker)
    if policy.devices is not None:
        results += policy.devices.judge(worker)
    elif models := " ".join(device.model for device in worker.devices):
        wanted = "none: the policy has no [nvidia]"
        results.append(_judged("policy.device_not_allowed", "devices", False, wanted, models))
    if rank is not None:
        results.append(_judged("policy.rank_not_allowed", *_rank(policy, worker.kind, rank)))
    if job is not None and policy.job is not None:
        results.append(_judged("policy.job_not_allowed", "job", job == policy.job, policy.job, job))
    results.append(_judged("evidence.stale_revocation_list", *_lists(policy, worker)))
    return Verdict(worker.label, tuple(results))


def _judged(refusal: str, name: str, passed: bool, wanted: str, found: str) -> Judged:
    return Judged(name, wanted, found, None if passed else refusal)


def _rank(policy: Policy, kind: str, rank: int) -> Finding:
    fitting = [one for one in policy.ranks if one.ranks[0] <= rank <= one.ranks[1]]
    kinds = set().union(*(one.kinds for one in fitting)) if policy.ranks else set(policy.kinds)
    return f"rank {rank}", kind in kinds, any_of(kinds), kind


def _lists(policy: Policy, worker: DescribedWorker) -> Finding:
    """Requires fresh revocation lists. Simulated evidence has no vendor, and so needs none."""
    own = [] if worker.simulated else [(worker.lists, worker.unlisted)]
    chains = [*own, *((device.lists, device.unlisted) for device in worker.devices)]
    ages = [(worker.verified_at - one.made).days for lists, _ in chains for one in lists]
    missing = {issuer for _, unlisted in chains for issuer in unlisted}
    missing -= policy.issuers_without_lists
    found = f"{len(ages)} lists, the oldest of {max(ages)} days" if ages else "no list"
    if missing:
        found += f"; none of {', '.join(sorted(missing))}"
    fresh = all(age <= policy.revocation_list_days for age in ages)
    needed = policy.require_revocation_lists
    whose = "one of every issuer" if needed else "any"
    wanted = f"{whose}, of at most {policy.revocation_list_days} days"
    return "revocation", fresh and not (needed and missing), wanted, found


def granted(policy: Policy, kind: str, rank: int | None) -> list[str]:
    """The resources for a worker of this kind as this rank. With rank None, for a guest."""

    def has(one: ResourceRules) -> bool:
        if rank is None:
            return one.guests
        return one.ranks is None or one.ranks[0] <= rank <= one.ranks[1]

    return [one.path for one in policy.resources if kind in one.kinds and has(one)]


@dataclass(frozen=True, slots=True)
class Clause:
    about: str
    """The table that it describes: snp, nvidia, freshness."""
    text: str
    open: bool = False
    """Whether the text describes a known hole that the policy leaves open."""


_EACH: Final = AttestedDevice(
    kind="nvidia", model="", is_switch=False, identity="each device",
    firmware={"driver": "", "vbios": ""}, reference=(), unreferenced=(), mismatches=(),
    protected_pcie=False, switches=(), gpus=(), lists=(), unlisted=(), not_after=datetime.max,
)  # fmt: skip
_BLANK: Final = DescribedWorker(
    kind="", product="", devices=(_EACH,), verified_at=datetime.max, not_after=datetime.max
)
"""A worker that shows nothing. Judging it yields what each rule wants."""


def explain(policy: Policy) -> list[Clause]:
    clauses = []
    for kind, rules in policy.kinds.items():
        admits = f"Admits {KINDS[kind].description}, if:"
        clauses += [Clause(kind, admits, open=KINDS[kind].hole), *_clauses(kind, rules)]
    if policy.devices is None:
        text = "No worker may show GPUs: the policy has no [nvidia]."
        clauses.append(Clause(_DEVICES, text))
    else:
        clauses += _clauses(_DEVICES, policy.devices)
    return [*clauses, *_revocation(policy), *_joining(policy)]


def _clauses(about: str, rules: Rules) -> list[Clause]:
    return [
        *(Clause(about, f"{one.name}: {one.wanted}.") for one in rules.judge(_BLANK)),
        *(Clause(about, text, open=True) for text in rules.weaknesses()),
    ]


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
    again = f"a rank may be joined again {policy.rejoins} times"
    found = [Clause("job", f"{job} may be joined; {again}.")]
    for rank in policy.ranks:
        first, last = rank.ranks
        found.append(Clause("ranks", f"Ranks {first} to {last} are {any_of(rank.kinds)}."))
    for one in policy.resources:
        ranks = "all ranks" if one.ranks is None else f"ranks {one.ranks[0]} to {one.ranks[1]}"
        kinds = ", ".join(sorted(one.kinds))
        found.append(Clause("resources", f"{one.path} goes to {ranks} of {kinds}."))
        if one.guests:
            whom = f"every guest of {kinds} that is no rank of a job"
            found.append(Clause("resources", f"guests: {one.path} also goes to {whom}."))
    if not policy.peer_evidence:
        text = "Workers believe the broker's certificates: [peers] evidence = true makes them look."
        found.append(Clause("peers", text))
    return found


PolicyTable = dict[str, Any]
"""A table of a policy, as TOML reads it."""

_IMA: Final = "ima"
# A list that its issuer makes once a year, plus the weeks in which two lists overlap.
_YEARLY_LIST_DAYS: Final = 400
_FORMS: Final[Mapping[str, TableForm]] = {
    **{name: kind.form for name, kind in KINDS.items()},
    **{name: kind.form for name, kind in DEVICE_KINDS.items()},
}
_COMMENTS: Final = {
    "revocation_list_days": "Lists may be so old. The issuer of one of them makes it once a year.",
    "unchecked": "Left open, each by its name: `sealring policy check` says what gets in.",
}


def new_policy(job: str | None, tables: Mapping[str, PolicyTable]) -> str:
    text = "# Who may join. `sealring policy check` with this file says in words what it lets in.\n"
    text += "version = 1\n"
    text += f"job = {toml(job)}\n" if job else '# job = "name"    # the only job to be joined\n'
    text += "rejoins = 0    # how often a rank may be joined again, with another key\n"
    for name, table in tables.items():
        rules = _FORMS[name].rules if name in _FORMS else ()
        comments = _COMMENTS | {rule.name: rule.comment for rule in rules}
        text += f"\n[{name}]\n"
        for key, value in table.items():
            if key != _IMA:
                text += _line(key, value, comments.get(key))
        if _IMA in table:
            text += f"\n[{name}.{_IMA}.files]\n# {comments[_IMA]}\n"
            text += "".join(_line(path, digests) for path, digests in table[_IMA]["files"].items())
    return text


def _line(key: str, value: Any, comment: str | None = None) -> str:
    return (f"# {comment}\n" if comment else "") + f"{_key(key)} = {toml(value)}\n"


def tables_from(
    workers: Sequence[DescribedWorker], roots: Mapping[str, Sequence[str]]
) -> dict[str, PolicyTable]:
    """The tables that admit these workers. `roots`, by kind, for kinds whose policy names roots."""
    tables: dict[str, PolicyTable] = {}
    for kind in sorted({one.kind for one in workers}):
        alike = [one for one in workers if one.kind == kind]
        form = KINDS[kind].form
        table = {rule.name: rule.write(alike) for rule in form.rules}
        if kind in roots:
            table["roots"] = distinct(roots[kind])
        opened = [name for rule in form.rules for name in rule.opened(alike)]
        tables[kind] = _complete(form, table, opened)
    if any(one.devices for one in workers):
        written = {rule.name: rule.write(workers) for rule in DEVICE_KINDS["nvidia"].form.rules}
        tables["nvidia"] = {name: value for name, value in written.items() if value is not None}
    return tables | _freshness(workers)


def tables_asked(kind: str, prompter: Prompter) -> dict[str, PolicyTable]:
    """The table for this kind of evidence, from a person's answers. The rest is left open."""
    form = KINDS[kind].form
    return {kind: _complete(form, {rule.name: rule.ask(prompter) for rule in form.rules})}


def _complete(form: TableForm, written: PolicyTable, opened: Sequence[str] = ()) -> PolicyTable:
    """The written table, with the rules that it leaves open under `unchecked`."""
    table = {name: value for name, value in written.items() if value is False or value}
    values = {rule.name: rule.read(Table(table), rule.name) for rule in form.rules}
    _, unstated = form.unstated(values)
    left = [*(need.name for need in unstated), *opened]
    return table | ({"unchecked": left} if left else {})


def check_admits(policy: Policy, worker: DescribedWorker) -> list[Judged]:
    """Raises the refusal if the policy does not admit the worker that it was written from.

    No policy admits a debug guest, for instance. Returns the rules that fail only because the
    verifier's revocation lists and references are missing here. The worker does not bring those.
    """
    devices = policy.devices
    if devices is not None:
        devices = Rules(devices.form, {**devices.values, "require_reference": False})
    itself = replace(
        policy,
        devices=devices,
        require_revocation_lists=False,
        revocation_list_days=timedelta.max.days,
    )
    judge(itself, worker, None).require()
    return [rule for rule in judge(policy, worker, None).rules if rule.refusal is not None]


def toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, str):
        # JSON's escapes are also TOML's. TOML escapes one more character.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_key(key)} = {toml(one)}" for key, one in value.items()) + "}"
    return "[" + ", ".join(toml(one) for one in value) + "]"


def _freshness(workers: Sequence[DescribedWorker]) -> dict[str, PolicyTable]:
    """The limit for the workers' lists, if the default is too low. Intel's root list is yearly."""
    ages = [
        (one.verified_at - seen.made).days
        for one in workers
        for lists in (one.lists, *(device.lists for device in one.devices))
        for seen in lists
    ]
    oldest = max(ages, default=0)
    if oldest <= Policy(kinds={}).revocation_list_days:
        return {}
    return {"freshness": {"revocation_list_days": max(oldest, _YEARLY_LIST_DAYS)}}


def _key(name: str) -> str:
    bare = name.isascii() and name.replace("_", "").replace("-", "").isalnum()
    return name if bare else toml(name)
