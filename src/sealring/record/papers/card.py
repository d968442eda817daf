"""A model card in Markdown. Names come from strangers and are written as plain text."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from sealring.record.papers.facts import RunFacts, rfc3339
from sealring.record.provenance.digests import Named
from sealring.record.provenance.transformations import Transformation


def model_card(facts: RunFacts, export: Transformation, files: Sequence[Named]) -> str:
    parts = [
        f"# {_text(files[0].name)}\n",
        "Generated from the signed records of the run that made it. It says what the workers and\n"
        "the owner signed; `sealring audit check` checks it.\n",
        "## Files\n",
        _table(("file", "SHA-256"), ((one.name, one.sha256) for one in files)),
        "## Training\n",
        _table(
            ("", ""),
            (
                ("job", facts.job),
                ("run", facts.run),
                ("workers", str(facts.world)),
                ("steps", str(facts.steps)),
                ("from", rfc3339(facts.started)),
                ("to", rfc3339(facts.finished)),
                ("records", f"{facts.statements}{'' if facts.complete else '; some are missing'}"),
                ("script", f"{facts.code.script.name} ({facts.code.script.sha256})"),
                ("sealring", facts.code.sealring),
                ("torch", facts.code.torch),
                ("Python", facts.code.python),
                ("container", facts.code.container or "not recorded"),
                ("exported from", ", ".join(f"{one.name} ({one.sha256})" for one in export.inputs)),
            ),
        ),
        "## Data\n",
        _table(("dataset", "SHA-256"), ((one.name, one.sha256) for one in facts.datasets))
        if facts.datasets
        else "No data were recorded.\n",
        "## Steps before training\n",
        _table(
            ("kind", "name", "inputs", "outputs"),
            (
                (one.kind, one.name, _names(one.inputs), _names(one.outputs))
                for one in facts.transformations
                if one.kind in ("ingest", "stage")
            ),
        )
        if any(one.kind in ("ingest", "stage") for one in facts.transformations)
        else "None were recorded.\n",
        "## Machines\n",
        _table(
            ("attested as", "evidence", "policy"),
            ((one.label, one.evidence, one.policy) for one in facts.attestations),
        )
        if facts.attestations
        else "The workers' certificates name no evidence.\n",
        "## Privacy\n",
        f"{_text(facts.privacy.mechanism)}: epsilon {_text(facts.privacy.epsilon)}, delta "
        f"{_text(facts.privacy.delta)}, as the script reported.\n"
        if facts.privacy
        else "No accounting was recorded.\n",
    ]  # fmt: skip
    return "\n".join(parts)


def _names(found: Iterable[Named]) -> str:
    return ", ".join(one.name for one in found)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    lines += [f"| {' | '.join(_text(cell) for cell in row)} |" for row in rows]
    return "\n".join(lines) + "\n"


def _text(value: str) -> str:
    """No Markdown and no HTML comes out of a name."""
    plain = "".join(one if one.isprintable() else " " for one in value[:500]).strip()
    escaped = re.sub(r"([\\`*_{}\[\]()<>#+!|&~^])", r"\\\1", plain)
    # Where a line begins: lists and underlines. Anywhere: what readers make links of by themselves.
    escaped = re.sub(r"^([0-9]+)(?=\.)|^(?=[-=])", r"\1\\", escaped)
    return re.sub(r"(?i)(?<=www)(?=\.)|(?=://)", r"\\", escaped)
