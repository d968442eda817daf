"""The documents of a model: SLSA's provenance v1 (https://slsa.dev/spec/v1.0/provenance), a bill of
materials (CycloneDX 1.6), and a model card in Markdown.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterable, Sequence
from typing import Any, Final

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from sealring.formats.signed import seal_envelope
from sealring.record.papers.facts import RunFacts, rfc3339
from sealring.record.statements.forms import Named, Transformation
from sealring.record.statements.signing import STATEMENT_TYPE
from sealring.version import __version__

# ---- SLSA: datasets are dependencies, the job's authority built the model


PREDICATE_TYPE: Final = "https://slsa.dev/provenance/v1"
BUILD_TYPE: Final = "https://sealring.github.io/sealring/training/v1"


def slsa_statement(
    facts: RunFacts, export: Transformation, subjects: Sequence[Named]
) -> dict[str, Any]:
    dependencies = [
        *(_resource(one, "dataset") for one in facts.datasets),
        _resource(facts.code.script, "script"),
        *(_resource(one, "checkpoint") for one in export.inputs),
    ]
    return {
        "_type": STATEMENT_TYPE,
        "subject": [{"name": one.name, "digest": {"sha256": one.sha256}} for one in subjects],
        "predicateType": PREDICATE_TYPE,
        "predicate": {
            "buildDefinition": {
                "buildType": BUILD_TYPE,
                "externalParameters": {
                    "job": facts.job,
                    "world": facts.world,
                    "steps": facts.steps,
                    "configuration": facts.configuration,
                },
                "internalParameters": {
                    "packages": facts.code.packages,
                    "sealring": facts.code.sealring,
                    "python": facts.code.python,
                    "torch": facts.code.torch,
                },
                "resolvedDependencies": dependencies,
            },
            "runDetails": {
                "builder": {"id": f"urn:sealring:authority:sha256:{facts.authority}"},
                "metadata": {
                    "invocationId": f"urn:sealring:run:{facts.run}",
                    "startedOn": rfc3339(facts.started),
                    "finishedOn": rfc3339(facts.finished),
                },
                "byproducts": [
                    {"name": f"evidence ({one.label})", "digest": {"sha256": one.evidence}}
                    for one in facts.attestations
                ],
            },
        },
    }  # fmt: skip


def sign_slsa(statement: dict[str, Any], key: Ed25519PrivateKey) -> bytes:
    return seal_envelope(json.dumps(statement, separators=(",", ":")).encode(), key)


def _resource(one: Named, kind: str) -> dict[str, Any]:
    return {"name": one.name, "digest": {"sha256": one.sha256}, "annotations": {"kind": kind}}


# ---- the bill of materials


def bill_of_materials(facts: RunFacts, export: Transformation, files: Sequence[Named]) -> bytes:
    datasets = [
        _component("data", one, f"dataset-{number}") for number, one in enumerate(facts.datasets)
    ]
    packages = [_package(line) for line in facts.packages.decode("utf-8", "replace").splitlines()]
    model = {
        **_component("machine-learning-model", files[0], "model"),
        "modelCard": {
            "modelParameters": {"datasets": [{"ref": one["bom-ref"]} for one in datasets]},
            "properties": [
                {"name": "sealring:job", "value": facts.job},
                {"name": "sealring:run", "value": facts.run},
                {"name": "sealring:steps", "value": str(facts.steps)},
                {"name": "sealring:world", "value": str(facts.world)},
                *({"name": "sealring:checkpoint", "value": one.sha256} for one in export.inputs),
            ],
        },
    }
    tool = {"type": "application", "name": "sealring", "version": __version__}
    document = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, facts.run + files[0].sha256)}",
        "version": 1,
        "metadata": {
            "timestamp": rfc3339(export.finished),
            "tools": {"components": [tool]},
            "component": model,
        },
        "components": [
            *datasets,
            _component("file", facts.code.script, "script"),
            *(_component("file", one, f"file-{number}") for number, one in enumerate(files[1:])),
            *packages,
        ],
        "dependencies": [
            {
                "ref": "model",
                "dependsOn": [one["bom-ref"] for one in (*datasets, *packages)] + ["script"],
            }
        ],
    }  # fmt: skip
    return json.dumps(document, indent=1).encode() + b"\n"


def _component(kind: str, one: Named, reference: str) -> dict[str, Any]:
    hashes = [{"alg": "SHA-256", "content": one.sha256}]
    return {"type": kind, "bom-ref": reference, "name": one.name, "hashes": hashes}


def _package(line: str) -> dict[str, Any]:
    name, _, version = line.partition("==")
    purl = f"pkg:pypi/{name}@{version}"
    return {"type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl}


# ---- the model card: names come from strangers and are written as plain text


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
