"""The graph of a run, from its verified statements."""

from __future__ import annotations

from datetime import UTC, datetime

from sealring.record.audit.findings import Finding
from sealring.record.audit.graph import Graph, Node, NodeKind
from sealring.record.audit.records import Made, Records, Turn
from sealring.record.provenance.intervals import CheckpointRef

_KINDS = {
    "ingest": NodeKind.STAGE,
    "stage": NodeKind.STAGE,
    "export": NodeKind.EXPORT,
    "evaluation": NodeKind.EVALUATION,
}


def artefact(sha256: str) -> str:
    """The key of data, a checkpoint or a file: those with one digest are one node."""
    return f"a:{sha256}"


def build_graph(records: Records) -> Graph:
    graph = Graph()
    for turn in records.turns:
        for one in turn.interval.checkpoints_out:
            _checkpoint(graph, one).sequence = turn.interval.sequence
    for made in records.made:
        _connect(graph, made, _transformation(graph, made))
    for made in records.uncounted:  # a shape of its own, which nothing comes from
        _transformation(graph, made).facts.append(("counts", f"no: {made.signer} alone signed it"))
    for rank, chain in records.chains.items():
        before: Turn | None = None
        for turn in chain:
            _interval(graph, turn)
            if before is not None and before.interval.sequence < turn.interval.sequence:
                graph.connect(_key(before), _key(turn), "same rank")
            before = turn
        assert all(turn.rank == rank for turn in chain)
    return graph


def mark_faults(graph: Graph, findings: list[Finding]) -> None:
    """Nodes behind whose records something was found.

    A record that contradicts another is at fault only if its rank is one of those that may be.
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


def _key(turn: Turn) -> str:
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


def _interval(graph: Graph, turn: Turn) -> None:
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
