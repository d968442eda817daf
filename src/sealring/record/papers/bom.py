"""A bill of materials (CycloneDX 1.6): the model, its data, its code, the packages of its run."""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from typing import Any

from sealring.record.papers.facts import RunFacts, rfc3339
from sealring.record.provenance.digests import Named
from sealring.record.provenance.transformations import Transformation
from sealring.version import __version__


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
