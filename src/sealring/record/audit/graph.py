"""A run as a graph, made from verified statements, and the ways through it from raw data.

The nodes are raw data, stages, datasets, ranks by intervals, checkpoints and exported files.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from graphlib import CycleError, TopologicalSorter

from sealring.record.audit.findings import Finding, listed
from sealring.record.audit.records import NOT_COUNTED, Made, RankInterval, Records
from sealring.record.statements.forms import CheckpointRef

# ---- the graph


class NodeKind(StrEnum):
    RAW = "raw"
    """Data whose origin no record states."""
    STAGE = "stage"
    DATA = "data"
    INTERVAL = "interval"
    CHECKPOINT = "checkpoint"
    EXPORT = "export"
    EVALUATION = "evaluation"
    MODEL = "model"


@dataclass(slots=True)
class Node:
    key: str
    kind: NodeKind
    title: str
    facts: list[tuple[str, str]] = field(default_factory=list)
    records: list[str] = field(default_factory=list)
    """Digests of the statements that the node was made from."""
    rank: int = -1
    sequence: int = -1
    """An interval's sequence number. A checkpoint has the one of the interval that wrote it."""
    faulty: bool = False


@dataclass(slots=True)
class Graph:
    nodes: dict[str, Node] = field(default_factory=dict)
    edges: dict[tuple[str, str], str] = field(default_factory=dict)
    """(source, target) -> what the target did with the source."""
    _before: dict[str, list[str]] = field(default_factory=dict)

    def add(self, key: str, kind: NodeKind, title: str) -> Node:
        """The node of this key. It is made if it is new."""
        found = self.nodes.get(key)
        if found is None:
            found = self.nodes[key] = Node(key, kind, title)
        return found

    def connect(self, source: str, target: str, label: str) -> None:
        if (source, target) not in self.edges:
            self._before.setdefault(target, []).append(source)
        self.edges[source, target] = label

    def sources(self, key: str) -> list[str]:
        return self._before.get(key, [])

    def cycle(self) -> list[str]:
        """The keys along a cycle. Empty if there is none. What leads to itself is not believed."""
        try:
            TopologicalSorter(self._before).prepare()
        except CycleError as found:
            return list(found.args[1])
        return []


# ---- from statements


_KINDS = {
    "ingest": NodeKind.STAGE,
    "stage": NodeKind.STAGE,
    "export": NodeKind.EXPORT,
    "evaluation": NodeKind.EVALUATION,
}


def artefact(sha256: str) -> str:
    """The key of data, a checkpoint or a file. Artefacts with the same digest are one node."""
    return f"a:{sha256}"


def build_graph(records: Records) -> Graph:
    graph = Graph()
    for turn in records.turns:
        for one in turn.interval.checkpoints_out:
            _checkpoint(graph, one).sequence = turn.interval.sequence
    for made in records.made:
        _connect(graph, made, _transformation(graph, made))
    for made in records.uncounted:  # a node of its own that leads nowhere
        _transformation(graph, made).facts.append(("counts", f"no: {made.signer} alone signed it"))
    for rank, chain in records.chains.items():
        before: RankInterval | None = None
        for turn in chain:
            _interval(graph, turn)
            if before is not None and before.interval.sequence < turn.interval.sequence:
                graph.connect(_key(before), _key(turn), "same rank")
            before = turn
        assert all(turn.rank == rank for turn in chain)
    return graph


def mark_faults(graph: Graph, findings: list[Finding]) -> None:
    """Marks the nodes whose records have findings.

    A record that contradicts another is marked only if its rank is one of the parties at fault.
    """
    intervals = [node for node in graph.nodes.values() if node.kind is NodeKind.INTERVAL]
    parties = {record: f"rank {node.rank}" for node in intervals for record in node.records}
    faulty = {record for finding in findings for record in finding.records}
    also = {
        record
        for finding in findings
        for named in [set(finding.parties)]
        for record in finding.against
        if parties.get(record) in named
    }
    for node in graph.nodes.values():
        if node.kind is not NodeKind.CHECKPOINT:
            node.faulty |= not faulty.isdisjoint(node.records)
    for node in intervals:
        node.faulty |= not also.isdisjoint(node.records)


def _key(turn: RankInterval) -> str:
    return f"i:{turn.rank}:{turn.interval.sequence}"


def _checkpoint(graph: Graph, one: CheckpointRef) -> Node:
    node = graph.add(artefact(one.sha256), NodeKind.CHECKPOINT, one.name)
    if not node.facts:
        node.facts = [("checkpoint", one.name), ("step", str(one.step)), ("manifest", one.sha256)]
        if one.content is not None:
            node.facts.append(("content", one.content))
    return node


def _data(graph: Graph, name: str, sha256: str, kind: NodeKind) -> Node:
    node = graph.add(artefact(sha256), kind, name)
    if node.kind is NodeKind.RAW:
        node.kind = kind  # a record says how it was made, or that it was read
    if not node.facts:
        node.facts = [("name", name), ("sha256", sha256)]
    return node


def _transformation(graph: Graph, made: Made) -> Node:
    content = made.content
    node = graph.add(f"t:{made.digest}", _KINDS[content.kind], content.name)
    node.records = [made.digest]
    node.facts = [
        ("kind", content.kind),
        ("name", content.name),
        ("signed by", made.signer),
        ("code", ", ".join(f"{one.name} {one.sha256[:12]}" for one in content.code) or "not named"),
        ("parameters", content.parameters.text[:400]),
        ("when", f"{_when(content.started)} to {_when(content.finished)}"),
    ]
    return node


def _connect(graph: Graph, made: Made, node: Node) -> None:
    content = made.content
    for one in content.inputs:
        _data(graph, one.name, one.sha256, NodeKind.RAW)
        graph.connect(artefact(one.sha256), node.key, "input")
    kind = NodeKind.DATA if node.kind is NodeKind.STAGE else NodeKind.MODEL
    for one in content.outputs:
        found = _data(graph, one.name, one.sha256, kind)
        found.records.append(made.digest)
        graph.connect(node.key, artefact(one.sha256), "output")


def _interval(graph: Graph, turn: RankInterval) -> None:
    interval = turn.interval
    title = f"rank {turn.rank}, interval {interval.sequence}"
    node = graph.add(_key(turn), NodeKind.INTERVAL, title)
    node.rank, node.sequence = turn.rank, interval.sequence
    node.records.append(turn.digest)
    attestation = turn.worker.attestation
    node.facts += [
        ("steps", f"{interval.first_step} to {interval.end_step}"),
        ("when", f"{_when(interval.started)} to {_when(interval.finished)}"),
        ("script", f"{interval.code.script.name} {interval.code.script.sha256[:12]}"),
        ("certificate", turn.worker.certificate[:12]),
        ("attested", "no" if attestation is None else attestation.label),
        ("collectives", ", ".join(f"{one.count} {one.kind}" for one in interval.collectives)),
    ]
    for data in interval.data:
        _data(graph, data.name, data.sha256, NodeKind.DATA)
        graph.connect(artefact(data.sha256), node.key, "read")
        if data.first < data.end:
            where = f"epoch {data.epoch}, {data.first} to {data.end}"
            node.facts.append(("read", f"{data.name}, {where}"))
        else:
            node.facts.append(("opened", data.name))
    for one in interval.checkpoints_in:
        checkpoint = _checkpoint(graph, one)
        node.facts.append(("read", one.name))
        if checkpoint.sequence != interval.sequence:  # else it was written in this interval
            graph.connect(checkpoint.key, node.key, "started from")
    for one in interval.checkpoints_out:
        checkpoint = _checkpoint(graph, one)
        checkpoint.records.append(turn.digest)
        graph.connect(node.key, checkpoint.key, "wrote")


def _when(seconds: int) -> str:
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M:%S} UTC"


# ---- ways from raw data


_MAX_WAYS = 1000
_MAX_STAGES = 1 << 20
"""The most stages on all ways to all datasets together: an attacker can write many with ease."""


def unlisted_sources(graph: Graph, listed: frozenset[str]) -> list[str]:
    """Keys of training's sources that are neither listed nor made from listed ones."""
    allowed = {artefact(sha256) for sha256 in listed}
    waiting = [node.key for node in graph.nodes.values() if node.kind is NodeKind.INTERVAL]
    seen: set[str] = set()
    found = []
    while waiting:
        key = waiting.pop()
        if key in seen or key in allowed:
            continue
        seen.add(key)
        before = graph.sources(key)
        if not before and graph.nodes[key].kind is not NodeKind.INTERVAL:
            found.append(key)
        waiting += before
    return sorted(found)


def unknown_origin(records: Records, name: str) -> str:
    """The text for a dataset whose making no counted record states."""
    alone = [
        one.signer for one in records.uncounted if any(o.name == name for o in one.content.outputs)
    ]
    said = f"; {alone[0]} alone says how: {NOT_COUNTED}" if alone else ""
    return f"no record says how {name} was made{said}"


def signed_by(made: Iterable[Made]) -> str:
    """The end of an answer's text: who signed these records."""
    signers = sorted({one.signer for one in made})
    return f"; how data was made is signed by {listed(signers)}" if signers else ""


class Ways:
    """The sequences of stages that led to a dataset, one for each way from raw data."""

    def __init__(self, records: Records) -> None:
        self.made = {made.digest: made for made in records.made}
        self._makers: dict[str, list[Made]] = {}
        for made in records.made:
            if made.content.kind in ("ingest", "stage"):
                for output in made.content.outputs:
                    self._makers.setdefault(output.sha256, []).append(made)
        self._found: dict[str, frozenset[tuple[str, ...]] | None] = {}
        self._stages = 0

    def of(self, sha256: str) -> frozenset[tuple[str, ...]] | None:
        """Return each way as the digests of its stages' statements.

        None if there are too many ways, they are too long, or there is a cycle. An empty way means
        that no record tells how the dataset was made.
        """
        try:
            return self._of(sha256)
        except RecursionError:
            return None

    def _of(self, sha256: str) -> frozenset[tuple[str, ...]] | None:
        if sha256 in self._found:
            return self._found[sha256]
        self._found[sha256] = None  # while its ways are sought, so that a cycle ends here
        makers = self._makers.get(sha256, [])
        ways: set[tuple[str, ...]] = set() if makers else {()}
        for made in makers:
            sources = [self._of(one.sha256) for one in made.content.inputs] or [frozenset({()})]
            for before in sources:
                if before is None or len(ways) + len(before) > _MAX_WAYS:
                    return None
                longer = {(*way, made.digest) for way in before}
                self._stages += sum(map(len, longer))
                if self._stages > _MAX_STAGES:
                    return None
                ways |= longer
        self._found[sha256] = frozenset(ways)
        return self._found[sha256]
