"""The claims about a run, and their answers: yes, no with the place, or not shown.

An auditor writes claims as TOML. Unknown words are refused:

    version = 1
    trained_only_on = ["<SHA-256>", ...]             raw data, datasets or starting checkpoints
    stages = [{ name = "deduplicate", code = "<SHA-256>" }, ...]
    code = { "train.py" = ["<SHA-256>"] }            names of scripts, and their digests
    machines = "policy.toml"                         an attestation policy, beside this file
    ranks = 16
    aggregation = { kinds = ["all_reduce"], every_step = true }
    privacy = { epsilon = "8.0", delta = "1e-5" }
    no_gaps = true

Each claim is optional. `check_model` answers one more claim, about a file in hand: that it came out
of this run.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any, Final

from sealring.core.hooks import MachinePolicy, evidence_judge
from sealring.errors import BadPolicy
from sealring.formats.files import read_public
from sealring.limits import MAX_WORLD
from sealring.record.audit.findings import ClaimAnswer, Fault, Finding, Said, SignedParty, listed
from sealring.record.audit.graph import (
    Graph,
    NodeKind,
    Ways,
    artefact,
    signed_by,
    unknown_origin,
    unlisted_sources,
)
from sealring.record.audit.machines import Machines
from sealring.record.audit.records import NOT_COUNTED, Made, RankInterval, Records
from sealring.record.audit.traffic import LinksChecked, uncompared
from sealring.record.statements.forms import digest_of_file

# ---- the file of claims


VERSION: Final = 1
_SHA256: Final = re.compile(r"[0-9a-f]{64}")
_NAMES: Final = (
    "trained_only_on", "stages", "code", "machines", "ranks", "aggregation", "privacy", "no_gaps",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class StageClaim:
    name: str
    code: str | None
    """The digest of its program. None: any program."""


@dataclass(frozen=True, slots=True)
class Aggregation:
    kinds: frozenset[str]
    every_step: bool


@dataclass(frozen=True, slots=True)
class PrivacyBudget:
    epsilon: Decimal
    delta: Decimal


@dataclass(frozen=True, slots=True)
class RunClaims:
    trained_only_on: frozenset[str] | None = None
    stages: tuple[StageClaim, ...] | None = None
    code: dict[str, frozenset[str]] | None = None
    machines: MachinePolicy | None = None
    ranks: int | None = None
    aggregation: Aggregation | None = None
    privacy: PrivacyBudget | None = None
    no_gaps: bool = False


def _bad(problem: str) -> BadPolicy:
    return BadPolicy(problem, code="configuration.bad_claims")


def read_claims(path: Path) -> RunClaims:
    data = read_public(path, "the claims", _bad)
    try:
        document = tomllib.loads(data.decode())
    except (ValueError, RecursionError) as problem:
        raise _bad(f"{path} is not TOML: {problem}") from None
    return _Reader(str(path), path.parent).read(document)


class _Reader:
    def __init__(self, where: str, folder: Path) -> None:
        self._where = where
        self._folder = folder

    def read(self, document: dict[str, Any]) -> RunClaims:
        self._only("", document, {"version", *_NAMES})
        if document.get("version") != VERSION or type(document["version"]) is not int:
            raise self._bad("version", f"is {VERSION}")
        found = {
            name: getattr(self, f"_{name}")(document[name]) for name in _NAMES if name in document
        }
        if not found:
            raise self._bad("", f"claims nothing: write one of {', '.join(_NAMES)}")
        return RunClaims(**found)

    def _trained_only_on(self, value: Any) -> frozenset[str]:
        return self._digests("trained_only_on", value)

    def _stages(self, value: Any) -> tuple[StageClaim, ...]:
        if not isinstance(value, list):
            raise self._bad("stages", "is a list of tables of name and code")
        return tuple(self._stage(f"stages[{number}]", each) for number, each in enumerate(value))

    def _stage(self, name: str, value: Any) -> StageClaim:
        table = self._table(name, value, {"name", "code"})
        if not isinstance(table.get("name"), str):
            raise self._bad(name, "has a name")
        code = table.get("code")
        return StageClaim(
            table["name"], None if code is None else self._digest(f"{name}.code", code)
        )

    def _code(self, value: Any) -> dict[str, frozenset[str]]:
        if not isinstance(value, dict) or not value:
            raise self._bad("code", "is a table of names, each with a list of digests")
        return {name: self._digests(f"code.{name}", each) for name, each in value.items()}

    def _machines(self, value: Any) -> MachinePolicy:
        if not isinstance(value, str):
            raise self._bad("machines", "is the name of a policy's file")
        content = read_public(self._folder / value, "the policy", _bad)
        try:
            return evidence_judge.one().parse_policy(content.decode())
        except (BadPolicy, ValueError) as problem:
            raise self._bad("machines", f"names a policy that cannot be used: {problem}") from None

    def _ranks(self, value: Any) -> int:
        if type(value) is not int or not 1 <= value <= MAX_WORLD:
            raise self._bad("ranks", f"is a number from 1 to {MAX_WORLD}")
        return value

    def _aggregation(self, value: Any) -> Aggregation:
        table = self._table("aggregation", value, {"kinds", "every_step"})
        kinds, every_step = table.get("kinds"), table.get("every_step", False)
        if not isinstance(kinds, list) or not kinds or not all(type(one) is str for one in kinds):
            raise self._bad("aggregation.kinds", 'is a list of collectives, e.g. ["all_reduce"]')
        if type(every_step) is not bool:
            raise self._bad("aggregation.every_step", "is true or false")
        return Aggregation(frozenset(kinds), every_step)

    def _privacy(self, value: Any) -> PrivacyBudget:
        table = self._table("privacy", value, {"epsilon", "delta"})
        return PrivacyBudget(
            *(self._decimal(f"privacy.{name}", table.get(name)) for name in ("epsilon", "delta"))
        )

    def _no_gaps(self, value: Any) -> bool:
        if value is not True:
            raise self._bad("no_gaps", "is true, or is left out")
        return True

    def _decimal(self, name: str, value: Any) -> Decimal:
        """Reads a number from text, because a binary fraction would not be what was written."""
        try:
            found = Decimal(value) if isinstance(value, str) and len(value) <= 40 else Decimal(-1)
        except InvalidOperation:
            found = Decimal(-1)
        if not found.is_finite() or found < 0:
            raise self._bad(name, 'is a number in quotes, e.g. "8.0"')
        return found

    def _digests(self, name: str, value: Any) -> frozenset[str]:
        if not isinstance(value, list) or not value:
            raise self._bad(name, "is a list of SHA-256 digests")
        return frozenset(self._digest(name, each) for each in value)

    def _digest(self, name: str, value: Any) -> str:
        if not isinstance(value, str) or not _SHA256.fullmatch(value):
            raise self._bad(
                name, "has something that is no SHA-256 digest of 64 hexadecimal digits"
            )
        return value

    def _table(self, name: str, value: Any, known: set[str]) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise self._bad(name, f"is a table of {', '.join(sorted(known))}")
        self._only(f"{name}.", value, known)
        return value

    def _only(self, prefix: str, table: dict[str, Any], known: set[str]) -> None:
        for name in table:
            if name not in known:
                allowed = ", ".join(sorted(known))
                raise self._bad(f"{prefix}{name}", f"is not known here; there is {allowed}")

    def _bad(self, name: str, problem: str) -> BadPolicy:
        return _bad(f"{self._where}: {name or 'the file'} {problem}")


# ---- answers


MESSAGE: Final = "message"
"""A word among a claim's kinds of collectives: messages between two ranks are allowed too."""


@dataclass(frozen=True, slots=True)
class Shown:
    """The results of all checks, from which claims are answered."""

    records: Records
    graph: Graph
    findings: list[Finding]
    links: LinksChecked
    machines: Machines

    def open_ends(self) -> list[RankInterval]:
        chains = self.records.chains.values()
        return [chain[-1] for chain in chains if not chain[-1].interval.final]

    def missing(self) -> str:
        """Why some records of the run may be missing here. Empty if none can be."""
        for found in self.findings:
            if found.fault.hides_records:
                return f"{found.who}: {found.text}"
        ends = self.open_ends()
        return f"{ends[0].where} is the last one of its chain, and is not final" if ends else ""


_Reply = tuple[Said, str, tuple[str, ...]]


def _yes(text: str) -> _Reply:
    return Said.YES, text, ()


def _no(text: str, *records: SignedParty) -> _Reply:
    return Said.NO, text, tuple(one.digest for one in records)


def _not_shown(text: str, *records: SignedParty) -> _Reply:
    return Said.NOT_SHOWN, text, tuple(one.digest for one in records)


def answer_claims(claims: RunClaims, shown: Shown) -> Iterator[ClaimAnswer]:
    for name, (answer, of_all_records) in _ANSWERS.items():
        claimed = getattr(claims, name)
        if claimed is not None and claimed is not False:
            yield ClaimAnswer(name, *_answered(name, claimed, shown, answer, of_all_records))


def _answered(
    name: str, claimed: Any, shown: Shown, answer: Callable[[Any, Shown], _Reply],
    of_all_records: bool,
) -> _Reply:  # fmt: skip
    if not shown.records.turns:
        return _not_shown("the run has no believed statement of an interval")
    refuting = [one for one in shown.findings if name in one.fault.refutes]
    if refuting:
        first, *others = refuting
        more = f" ({len(others)} more findings)" if others else ""
        records = tuple(dict.fromkeys(record for one in refuting for record in one.records))
        return Said.NO, f"{first.who}: {first.text}{more}", records
    reply = answer(claimed, shown)
    missing = shown.missing() if of_all_records else ""
    if reply[0] is Said.YES and missing:
        text = f"it holds for the records that there are; some may be missing. {missing}"
        return _not_shown(text)
    return reply


def _trained_only_on(claimed: frozenset[str], shown: Shown) -> _Reply:
    strange = unlisted_sources(shown.graph, claimed)
    if strange:
        nodes = [shown.graph.nodes[key] for key in strange]
        keys = set(strange)
        users = {
            record
            for source, target in shown.graph.edges
            if source in keys
            for record in shown.graph.nodes[target].records
        }
        titles = ", ".join(f"{node.title} ({node.key[2:14]})" for node in nodes[:4])
        text = f"training came from {titles}, which is not listed"
        return Said.NO, text, tuple(sorted(users))
    silent = [
        turn
        for turn in shown.records.turns
        if turn.interval.end_step > turn.interval.first_step
        and not any(data.first < data.end for data in turn.interval.data)
    ]
    if silent:
        return _not_shown(
            f"{len(silent)} statements name no samples that were read, the first is "
            f"{silent[0].where}",
            *silent,
        )
    read = {data.sha256 for turn in shown.records.turns for data in turn.interval.data}
    text = f"all that ranks state to have read is from what is listed; datasets read: {len(read)}"
    stages = [made for made in shown.records.made if made.content.kind in ("ingest", "stage")]
    return _yes(f"{text}{signed_by(stages)}")


def _stages(claimed: tuple[StageClaim, ...], shown: Shown) -> _Reply:
    wanted = " -> ".join(stage.name for stage in claimed) or "none"
    ways = Ways(shown.records)
    datasets = {
        data.sha256: data.name for turn in shown.records.turns for data in turn.interval.data
    }
    if not datasets:
        return _not_shown("no statement names the data that was read")
    used: dict[str, Made] = {}
    for sha256, name in sorted(datasets.items()):
        found = ways.of(sha256)
        if found is None:
            return _not_shown(f"the stages of {name} form a cycle, or too many ways")
        for way in sorted(found):
            taken = [ways.made[digest] for digest in way]
            used |= dict(zip(way, taken, strict=True))
            if not taken and claimed:
                return _not_shown(unknown_origin(shown.records, name))
            names = [one.where for one in taken]
            if names != [stage.name for stage in claimed]:
                text = f"{name} was made by {' -> '.join(names) or 'no stage'}, not by {wanted}"
                return _no(text, *taken)
            for one, stage in zip(taken, claimed, strict=True):
                ran = {code.sha256 for code in one.content.code}
                if stage.code is not None and stage.code not in ran:
                    return _no(f"{one.where} ran other code than is claimed", one)
    text = f"all data was made by {wanted}; datasets read: {len(datasets)}"
    return _yes(f"{text}{signed_by(used.values())}")


def _code(claimed: dict[str, frozenset[str]], shown: Shown) -> _Reply:
    turns = shown.records.turns
    unnamed: list[RankInterval] = []
    for turn in turns:
        code = turn.interval.code
        told = (("packages", code.packages), ("container", code.container))
        said = [one for one in told if one[0] in claimed]
        for name, digest in [(code.script.name, code.script.sha256), *said]:
            if digest is None:
                unnamed.append(turn)
            elif digest not in claimed.get(name, frozenset()):
                text = f"{turn.where} ran {name} {digest[:12]}, which is not claimed"
                return _no(text, *(one for one in turns if one.rank == turn.rank))
    if unnamed:
        return _not_shown(f"{len(unnamed)} statements do not name their container", *unnamed)
    return _yes("all ranks name this code; it is as good as what their machines attest")


def _machines(claimed: MachinePolicy, shown: Shown) -> _Reply:
    found = shown.machines
    if found.unattested:
        parties = listed(found.unattested)
        return _not_shown(f"the certificates of {parties} say nothing of an attestation")
    if found.without_evidence and claimed.peer_evidence:
        return _not_shown(f"the evidence of {listed(found.without_evidence)} is not in the folder")
    told = f"{found.judged} certificates with their evidence pass the policy"
    if found.without_evidence:
        told += f"; of {len(found.without_evidence)} more there is the authority's word alone"
    return _yes(told)


def _ranks(claimed: int, shown: Shown) -> _Reply:
    wrong = [turn for turn in shown.records.turns if turn.interval.world != claimed]
    if wrong:
        return _no(f"{wrong[0].where} names a world of {wrong[0].interval.world}", *wrong)
    present = {turn.rank for turn in shown.records.turns}
    absent = sorted(set(range(claimed)) - present)
    if absent:
        return _no(f"there is no statement of {listed([f'rank {rank}' for rank in absent])}")
    return _yes(f"{len(present)} ranks, each with its own certificate")


def _aggregation(claimed: Aggregation, shown: Shown) -> _Reply:
    for turn in shown.records.turns:
        for one in turn.interval.collectives:
            if one.count and one.kind not in claimed.kinds:
                return _no(f"{turn.where} took part in {one.count} {one.kind}", turn)
        if MESSAGE not in claimed.kinds and _has_messages(turn):
            return _no(f"{turn.where} exchanged messages with single ranks", turn)
    uneven: list[tuple[RankInterval, int, int]] = []
    for chain in shown.records.chains.values():
        last = chain[-1]
        counted = _of_all(chain)
        steps = [turn.interval.end_step - turn.interval.first_step for turn in chain]
        if not sum(counted):
            return _not_shown(f"{last.where} names no collective of all ranks", last)
        if claimed.every_step and sum(counted) < sum(steps):
            text = f"counts {sum(counted)} collectives of all ranks over {sum(steps)} steps"
            return _no(f"{last.where} {text}", last)
        uneven += [one for one in zip(chain, counted, steps, strict=True) if one[1] < one[2]]
    if claimed.every_step and uneven:
        turn, count, needed = uneven[0]
        text = f"counts {count} new collectives of all ranks for {needed} steps"
        return _not_shown(f"{turn.where} {text}", turn)
    apart = uncompared(shown.records)
    if apart:
        return _not_shown(
            f"of group {apart[0]}, not all members give the same last count of its collectives"
        )
    links = shown.links
    if links.compared < links.wires:
        return _not_shown(
            f"of {links.wires} directions of links, {links.compared} could be compared to their end"
        )
    told = f"both ends of {links.wires} directions of links agree on every record"
    return _yes(told if links.wires else "there is one rank, and no link")


def _of_all(chain: Sequence[RankInterval]) -> list[int]:
    """New collectives, in each interval, of groups that all ranks are members of.

    Counts are cumulative. A group that has ended is named at most once more.
    """
    before: dict[tuple[str, str, str], int] = {}
    found = []
    for turn in chain:
        world = turn.interval.world
        groups = {
            (group.name, group.epoch)
            for group in turn.interval.groups
            # A set of all ranks would be as large as the statement says that the world is.
            if len(set(group.members)) == world == max(group.members, default=-1) + 1
        }
        new = 0
        for one in turn.interval.collectives:
            if (one.group, one.epoch) in groups:
                key = (one.group, one.epoch, one.kind)
                new += one.count - before.get(key, 0)
                before[key] = one.count
        found.append(new)
    return found


def _has_messages(turn: RankInterval) -> bool:
    return any(
        link.kind == MESSAGE
        and any(way is None or way.records for way in (link.sent, link.received))
        for link in turn.interval.links
    )


def _privacy(claimed: PrivacyBudget, shown: Shown) -> _Reply:
    spent = Decimal(0)
    chains = shown.records.chains.values()
    for last in (chain[-1] for chain in chains):
        if last.interval.privacy is None:
            return _not_shown(f"{last.where} has no privacy accounting", last)
    # All statements count: a later one that names less does not take back what was spent.
    for turn in (turn for chain in chains for turn in chain):
        said = turn.interval.privacy
        if said is None:
            continue
        try:
            epsilon, delta = Decimal(said.epsilon), Decimal(said.delta)
        except InvalidOperation:
            epsilon = delta = Decimal("NaN")
        if not (epsilon.is_finite() and delta.is_finite() and epsilon >= 0 and delta >= 0):
            return _not_shown(f"the privacy accounting of {turn.where} has no numbers", turn)
        if epsilon > claimed.epsilon or delta > claimed.delta:
            return _no(f"{turn.where} states epsilon {epsilon} at delta {delta}", turn)
        spent = max(spent, epsilon)
    return _yes(f"epsilon {spent} at most, as the scripts account for it")


def _no_gaps(claimed: bool, shown: Shown) -> _Reply:
    ends = shown.open_ends()
    if ends:
        text = f"{ends[0].where} is the last one, and is not final: the run was cut off"
        return _no(text, *ends)
    chains = shown.records.chains
    last = max(chain[-1].interval.end_step for chain in chains.values())
    return _yes(
        f"{len(chains)} chains from their first statement to a final one, up to step {last}"
    )


_ANSWERS: Final[dict[str, tuple[Callable[[Any, Shown], _Reply], bool]]] = {
    "trained_only_on": (_trained_only_on, True),
    "stages": (_stages, True),
    "code": (_code, True),
    "machines": (_machines, True),
    "ranks": (_ranks, False),
    "aggregation": (_aggregation, True),
    "privacy": (_privacy, True),
    "no_gaps": (_no_gaps, False),
}
"""The function for each claim. True if the claim is about all that happened: then a missing record
could refute it."""


# ---- a file in hand


def _wrote(made: Made, digest: str) -> bool:
    exports = made.content.kind == "export"
    return exports and any(out.sha256 == digest for out in made.content.outputs)


def check_model(
    path: Path, records: Records, graph: Graph, findings: Sequence[Finding]
) -> tuple[ClaimAnswer, list[Finding]]:
    """Answers whether the file came from an export of a checkpoint that this run's ranks wrote."""
    digest = digest_of_file(path)
    exports = [one for one in records.made if one.content.kind == "export"]
    found = [one for one in exports if _wrote(one, digest)]
    if found:
        return ClaimAnswer(
            "model", *_exported(path.name, digest, found, records, graph, findings)
        ), []
    reply, more = _not_exported(path.name, digest, records, exports)
    return ClaimAnswer("model", *reply), more


def _not_exported(
    name: str, digest: str, records: Records, exports: Sequence[Made]
) -> tuple[_Reply, list[Finding]]:
    text = f"{name} ({digest[:12]}) is not what an export of this run wrote"
    alone = [one for one in records.uncounted if _wrote(one, digest)]
    if alone:
        text += f"; {alone[0].signer} alone says that it is: {NOT_COUNTED}"
    named = [one for one in exports if any(out.name == name for out in one.content.outputs)]
    if named:
        against = tuple(one.digest for one in named)
        finding = Finding(Fault.MODEL, ("the holder of the file",), text, (), against)
        return _no(text, *exports), [finding]
    return (_not_shown(text, *alone) if alone else _no(text, *exports)), []


def _exported(
    name: str, digest: str, exports: Sequence[Made], records: Records, graph: Graph,
    findings: Sequence[Finding],
) -> _Reply:  # fmt: skip
    written = {one.sha256: one for turn in records.turns for one in turn.interval.checkpoints_out}
    contradicted = {record for finding in findings for record in finding.records}
    for export in exports:
        signed = f"as {export.signer} signed"
        if export.digest in contradicted:
            text = f"{name} is what {export.where} wrote, {signed}; other records contradict it"
            return _no(text, export)
        sources = [written[one.sha256] for one in export.content.inputs if one.sha256 in written]
        others = [one.name for one in export.content.inputs if one.sha256 not in written]
        if sources and others:
            text = f"{name} was exported from {others[0]} too, which no rank of this run wrote"
            return _no(text, export)
        if sources:
            node = graph.nodes[artefact(digest)]
            node.kind = NodeKind.MODEL
            node.facts.append(("file in hand", name))
            last = max(one.step for one in written.values())
            step = max(one.step for one in sources)
            older = f"; the run went on to a checkpoint of step {last}" if step < last else ""
            text = f"{name} was exported from {sources[0].name}, of step {step}, {signed}{older}"
            return Said.YES, text, (export.digest,)
    return _no(f"{name} was exported from something that no rank of this run wrote", *exports)
