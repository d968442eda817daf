"""SLSA's provenance v1 about a model: datasets are its dependencies, the job's authority built it.

https://slsa.dev/spec/v1.0/provenance
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from sealring.formats.signed import seal_envelope
from sealring.record.papers.facts import RunFacts, rfc3339
from sealring.record.provenance.digests import Named
from sealring.record.provenance.statements import STATEMENT_TYPE
from sealring.record.provenance.transformations import Transformation

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
