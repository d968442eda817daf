"""Whether a file in hand is the one that came out of the run."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from sealring.errors import ConfigurationError
from sealring.record.audit.build import artefact
from sealring.record.audit.findings import Fault, Finding
from sealring.record.audit.graph import Graph, NodeKind
from sealring.record.audit.records import NOT_COUNTED, Made, Records
from sealring.record.audit.result import Answer, Said


def digest_of(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as problem:
        raise ConfigurationError(f"{path} cannot be read: {problem.strerror}") from None


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
    digest = digest_of(path)
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
