"""Claims answered: yes, no and where, or not shown. One is a file in hand, and its run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from pathlib import Path

from sealring.record.audit.claims import Claims
from sealring.record.audit.findings import Fault, Finding, listed
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
from sealring.record.audit.records import NOT_COUNTED, Made, Records, Turn
from sealring.record.audit.result import Answer, Said
from sealring.record.audit.traffic import LinksChecked, uncompared
from sealring.record.statements.forms import digest_of_file

_GAPS = {
    Fault.GAP, Fault.BROKEN_CHAIN, Fault.TWO_STATEMENTS, Fault.NOT_LOGGED, Fault.LOG_REFUSED,
    Fault.UNREADABLE, Fault.FORGED, Fault.OUTSIDE_DATES, Fault.OTHER_JOB, Fault.CYCLE,
}  # fmt: skip
_TRAFFIC = {Fault.LINK, Fault.COUNTS, Fault.GROUP}
_MISSING = {
    Fault.GAP, Fault.BROKEN_CHAIN, Fault.TWO_STATEMENTS, Fault.NOT_LOGGED, Fault.LOG_REFUSED,
}  # fmt: skip
"""After these the records may not be all that there were, or not those that there were."""
_OF_ALL_RECORDS = {
    "trained_only_on", "stages", "code", "machines", "aggregation", "privacy",
}  # fmt: skip
"""Claims about everything that took place: what is missing could refute them."""
MESSAGE = "message"
"""Among a claim's kinds of collectives: messages from one rank to another are allowed too."""


@dataclass(frozen=True, slots=True)
class Shown:
    """All that the checks found."""

    records: Records
    graph: Graph
    findings: list[Finding]
    links: LinksChecked
    machines: Machines

    def of(self, faults: set[Fault]) -> list[Finding]:
        return [finding for finding in self.findings if finding.fault in faults]

    def open_ends(self) -> list[Turn]:
        chains = self.records.chains.values()
        return [chain[-1] for chain in chains if not chain[-1].interval.final]

    def missing(self) -> str:
        """Why these may not be all records of the run; nothing if they are."""
        found = self.of(_MISSING)
        if found:
            return f"{' or '.join(found[0].parties)}: {found[0].text}"
        ends = self.open_ends()
        return f"{ends[0].where} is the last one of its chain, and is not final" if ends else ""


def answer_claims(claims: Claims, shown: Shown) -> Iterator[Answer]:
    parts: list[tuple[object, Callable[[Claims, Shown], Answer]]] = [
        (claims.trained_only_on, _trained_only_on),
        (claims.stages, _stages),
        (claims.code, _code),
        (claims.machines, _machines),
        (claims.ranks, _ranks),
        (claims.aggregation, _aggregation),
        (claims.privacy, _privacy),
        (claims.no_gaps or None, _no_gaps),
    ]
    for claimed, answer in parts:
        if claimed is None:
            continue
        name = answer.__name__.removeprefix("_")
        if shown.records.turns:
            found = answer(claims, shown)
            missing = shown.missing() if name in _OF_ALL_RECORDS else ""
            if found.said is Said.YES and missing:
                text = f"it holds for the records that there are; some may be missing. {missing}"
                found = Answer(name, Said.NOT_SHOWN, text)
            yield found
        else:
            yield Answer(name, Said.NOT_SHOWN, "the run has no believed statement of an interval")


def _trained_only_on(claims: Claims, shown: Shown) -> Answer:
    name = "trained_only_on"
    assert claims.trained_only_on is not None
    strange = unlisted_sources(shown.graph, claims.trained_only_on)
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
        return Answer(name, Said.NO, text, tuple(sorted(users)))
    contradicted = shown.of({Fault.DATA, Fault.TRANSFORMATION, Fault.CHECKPOINT})
    if contradicted:
        return _contradicted(name, contradicted)
    silent = [
        turn
        for turn in shown.records.turns
        if turn.interval.end_step > turn.interval.first_step
        and not any(data.first < data.end for data in turn.interval.data)
    ]
    if silent:
        return Answer(
            name, Said.NOT_SHOWN, f"{len(silent)} statements name no samples that were read, the "
            f"first is {silent[0].where}", tuple(turn.digest for turn in silent),
        )  # fmt: skip
    read = {data.sha256 for turn in shown.records.turns for data in turn.interval.data}
    text = f"all that ranks state to have read is from what is listed; datasets read: {len(read)}"
    stages = [made for made in shown.records.made if made.content.kind in ("ingest", "stage")]
    return Answer(name, Said.YES, f"{text}{signed_by(stages)}")


def _stages(claims: Claims, shown: Shown) -> Answer:
    assert claims.stages is not None
    contradicted = shown.of({Fault.TRANSFORMATION})
    if contradicted:
        return _contradicted("stages", contradicted)
    wanted = " -> ".join(stage.name for stage in claims.stages) or "none"
    ways = Ways(shown.records)
    datasets = {
        data.sha256: data.name for turn in shown.records.turns for data in turn.interval.data
    }
    if not datasets:
        return Answer("stages", Said.NOT_SHOWN, "no statement names the data that was read")
    used: dict[str, Made] = {}
    for sha256, name in sorted(datasets.items()):
        found = ways.of(sha256)
        if found is None:
            text = f"the stages of {name} form a cycle, or too many ways"
            return Answer("stages", Said.NOT_SHOWN, text)
        for way in sorted(found):
            taken = [ways.made[digest].content for digest in way]
            used |= {digest: ways.made[digest] for digest in way}
            if not taken and claims.stages:
                return Answer("stages", Said.NOT_SHOWN, unknown_origin(shown.records, name))
            names = [one.name for one in taken]
            if names != [stage.name for stage in claims.stages]:
                text = f"{name} was made by {' -> '.join(names) or 'no stage'}, not by {wanted}"
                return Answer("stages", Said.NO, text, way)
            for one, stage, digest in zip(taken, claims.stages, way, strict=True):
                if stage.code is not None and stage.code not in {code.sha256 for code in one.code}:
                    text = f"{one.name} ran other code than is claimed"
                    return Answer("stages", Said.NO, text, (digest,))
    text = f"all data was made by {wanted}; datasets read: {len(datasets)}"
    return Answer("stages", Said.YES, f"{text}{signed_by(used.values())}")


def _code(claims: Claims, shown: Shown) -> Answer:
    assert claims.code is not None
    unnamed: list[Turn] = []
    for turn in shown.records.turns:
        code = turn.interval.code
        told = (("packages", code.packages), ("container", code.container))
        said = [one for one in told if one[0] in claims.code]
        for name, digest in [(code.script.name, code.script.sha256), *said]:
            if digest is None:
                unnamed.append(turn)
            elif digest not in claims.code.get(name, frozenset()):
                text = f"{turn.where} ran {name} {digest[:12]}, which is not claimed"
                wrong = [one.digest for one in shown.records.turns if one.rank == turn.rank]
                return Answer("code", Said.NO, text, tuple(wrong))
    if unnamed:
        text = f"{len(unnamed)} statements do not name their container"
        return Answer("code", Said.NOT_SHOWN, text, tuple(turn.digest for turn in unnamed))
    text = "all ranks name this code; it is as good as what their machines attest"
    return Answer("code", Said.YES, text)


def _machines(claims: Claims, shown: Shown) -> Answer:
    found = shown.machines
    assert claims.machines is not None
    refused = shown.of({Fault.EVIDENCE, Fault.NOT_ADMITTED, Fault.NOT_GIVEN, Fault.REVOKED})
    if refused:
        return _contradicted("machines", refused)
    if found.unattested:
        text = f"the certificates of {listed(found.unattested)} say nothing of an attestation"
        return Answer("machines", Said.NOT_SHOWN, text)
    if found.without_evidence and claims.machines.peer_evidence:
        text = f"the evidence of {listed(found.without_evidence)} is not in the folder"
        return Answer("machines", Said.NOT_SHOWN, text)
    told = f"{found.judged} certificates with their evidence pass the policy"
    if found.without_evidence:
        told += f"; of {len(found.without_evidence)} more there is the authority's word alone"
    return Answer("machines", Said.YES, told)


def _ranks(claims: Claims, shown: Shown) -> Answer:
    shared = shown.of({Fault.SHARED_KEY})
    if shared:
        return _contradicted("ranks", shared)
    wrong = [turn for turn in shown.records.turns if turn.interval.world != claims.ranks]
    if wrong:
        text = f"{wrong[0].where} names a world of {wrong[0].interval.world}"
        return Answer("ranks", Said.NO, text, tuple(turn.digest for turn in wrong))
    present = {turn.rank for turn in shown.records.turns}
    absent = sorted(set(range(claims.ranks or 0)) - present)
    if absent:
        text = f"there is no statement of {listed([f'rank {rank}' for rank in absent])}"
        return Answer("ranks", Said.NO, text)
    return Answer("ranks", Said.YES, f"{len(present)} ranks, each with its own certificate")


def _aggregation(claims: Claims, shown: Shown) -> Answer:
    name = "aggregation"
    assert claims.aggregation is not None
    contradicted = shown.of(_TRAFFIC)
    if contradicted:
        return _contradicted(name, contradicted)
    for turn in shown.records.turns:
        for one in turn.interval.collectives:
            if one.count and one.kind not in claims.aggregation.kinds:
                text = f"{turn.where} took part in {one.count} {one.kind}"
                return Answer(name, Said.NO, text, (turn.digest,))
        if MESSAGE not in claims.aggregation.kinds and _has_messages(turn):
            text = f"{turn.where} exchanged messages with single ranks"
            return Answer(name, Said.NO, text, (turn.digest,))
    uneven: list[tuple[Turn, int, int]] = []
    for chain in shown.records.chains.values():
        last = chain[-1]
        counted = _of_all(chain)
        steps = [turn.interval.end_step - turn.interval.first_step for turn in chain]
        if not sum(counted):
            text = f"{last.where} names no collective of all ranks"
            return Answer(name, Said.NOT_SHOWN, text, (last.digest,))
        if claims.aggregation.every_step and sum(counted) < sum(steps):
            text = (
                f"{last.where} counts {sum(counted)} collectives of all ranks over {sum(steps)} "
                "steps"
            )
            return Answer(name, Said.NO, text, (last.digest,))
        uneven += [one for one in zip(chain, counted, steps, strict=True) if one[1] < one[2]]
    if claims.aggregation.every_step and uneven:
        turn, count, needed = uneven[0]
        text = f"{turn.where} counts {count} new collectives of all ranks for {needed} steps"
        return Answer(name, Said.NOT_SHOWN, text, (turn.digest,))
    apart = uncompared(shown.records)
    if apart:
        text = f"of group {apart[0]}, not all members give the same last count of its collectives"
        return Answer(name, Said.NOT_SHOWN, text)
    links = shown.links
    if links.compared < links.wires:
        text = (
            f"of {links.wires} directions of links, {links.compared} could be compared to their end"
        )
        return Answer(name, Said.NOT_SHOWN, text)
    told = f"both ends of {links.wires} directions of links agree on every record"
    return Answer(name, Said.YES, told if links.wires else "there is one rank, and no link")


def _of_all(chain: Sequence[Turn]) -> list[int]:
    """In each interval, new collectives of groups that all ranks are members of.

    Counts are cumulative, and a group that has ended is named once more at most.
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


def _has_messages(turn: Turn) -> bool:
    return any(
        link.kind == MESSAGE
        and any(way is None or way.records for way in (link.sent, link.received))
        for link in turn.interval.links
    )


def _privacy(claims: Claims, shown: Shown) -> Answer:
    assert claims.privacy is not None
    spent = Decimal(0)
    for chain in shown.records.chains.values():
        if chain[-1].interval.privacy is None:
            text = f"{chain[-1].where} has no privacy accounting"
            return Answer("privacy", Said.NOT_SHOWN, text, (chain[-1].digest,))
    # All of them: a later statement that names less does not take back what was spent.
    for last in (turn for chain in shown.records.chains.values() for turn in chain):
        said = last.interval.privacy
        if said is None:
            continue
        try:
            epsilon, delta = Decimal(said.epsilon), Decimal(said.delta)
        except InvalidOperation:
            epsilon = delta = Decimal("NaN")
        if not (epsilon.is_finite() and delta.is_finite() and epsilon >= 0 and delta >= 0):
            text = f"the privacy accounting of {last.where} has no numbers"
            return Answer("privacy", Said.NOT_SHOWN, text, (last.digest,))
        if epsilon > claims.privacy.epsilon or delta > claims.privacy.delta:
            text = f"{last.where} states epsilon {epsilon} at delta {delta}"
            return Answer("privacy", Said.NO, text, (last.digest,))
        spent = max(spent, epsilon)
    return Answer("privacy", Said.YES, f"epsilon {spent} at most, as the scripts account for it")


def _no_gaps(claims: Claims, shown: Shown) -> Answer:
    assert claims.no_gaps
    gaps = shown.of(_GAPS)
    if gaps:
        return _contradicted("no_gaps", gaps)
    chains = shown.records.chains
    open_ends = shown.open_ends()
    if open_ends:
        text = f"{open_ends[0].where} is the last one, and is not final: the run was cut off"
        return Answer("no_gaps", Said.NO, text, tuple(turn.digest for turn in open_ends))
    last = max(chain[-1].interval.end_step for chain in chains.values())
    text = f"{len(chains)} chains from their first statement to a final one, up to step {last}"
    return Answer("no_gaps", Said.YES, text)


def _contradicted(name: str, findings: list[Finding]) -> Answer:
    first = findings[0]
    more = f" ({len(findings) - 1} more findings)" if len(findings) > 1 else ""
    records = tuple(dict.fromkeys(record for one in findings for record in one.records))
    return Answer(name, Said.NO, f"{' or '.join(first.parties)}: {first.text}{more}", records)


# ---- a file in hand


def _wrote(made: Made, digest: str) -> bool:
    exports = made.content.kind == "export"
    return exports and any(out.sha256 == digest for out in made.content.outputs)


def _not_exported(
    name: str, digest: str, records: Records, exports: Sequence[Made]
) -> tuple[Answer, list[Finding]]:
    text = f"{name} ({digest[:12]}) is not what an export of this run wrote"
    alone = [one for one in records.uncounted if _wrote(one, digest)]
    if alone:
        text += f"; {alone[0].signer} alone says that it is: {NOT_COUNTED}"
    named = [one for one in exports if any(out.name == name for out in one.content.outputs)]
    against = tuple(one.digest for one in named)
    if named:
        finding = Finding(Fault.MODEL, ("the holder of the file",), text, (), against)
        return Answer("model", Said.NO, text, tuple(one.digest for one in exports)), [finding]
    said = Said.NOT_SHOWN if alone else Said.NO
    return Answer("model", said, text, tuple(one.digest for one in alone or exports)), []


def check_model(
    path: Path, records: Records, graph: Graph, findings: Sequence[Finding]
) -> tuple[Answer, list[Finding]]:
    """It is the output of an export, whose input is a checkpoint that this run's ranks wrote."""
    digest = digest_of_file(path)
    exports = [one for one in records.made if one.content.kind == "export"]
    found = [one for one in exports if _wrote(one, digest)]
    if not found:
        return _not_exported(path.name, digest, records, exports)
    written = {one.sha256: one for turn in records.turns for one in turn.interval.checkpoints_out}
    contradicted = {record for finding in findings for record in finding.records}
    for export in found:
        if export.digest in contradicted:
            text = f"{path.name} is what {export.content.name} wrote, as {export.signer} signed; "
            text += "other records contradict it"
            return Answer("model", Said.NO, text, (export.digest,)), []
        sources = [written[one.sha256] for one in export.content.inputs if one.sha256 in written]
        others = [one.name for one in export.content.inputs if one.sha256 not in written]
        if sources and others:
            text = f"{path.name} was exported from {others[0]} too, which no rank of this run wrote"
            return Answer("model", Said.NO, text, (export.digest,)), []
        if sources:
            node = graph.nodes[artefact(digest)]
            node.kind = NodeKind.MODEL
            node.facts.append(("file in hand", path.name))
            steps = {one.step for one in written.values()}
            last = max(steps)
            step = max(one.step for one in sources)
            older = f"; the run went on to a checkpoint of step {last}" if step < last else ""
            text = f"{path.name} was exported from {sources[0].name}, of step {step}, as "
            text += f"{export.signer} signed{older}"
            return Answer("model", Said.YES, text, (export.digest,)), []
    text = f"{path.name} was exported from something that no rank of this run wrote"
    return Answer("model", Said.NO, text, tuple(one.digest for one in found)), []
