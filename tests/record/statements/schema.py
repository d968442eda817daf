"""The JSON schemas of predicates, made from their dataclasses, to compare with
docs/*-v1.schema.json.

`python -m tests.record.statements.schema` writes the files.
"""

from __future__ import annotations

import dataclasses
import json
import types
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from sealring.record.statements.forms import (
    DIGESTS,
    INTERVAL_TYPE,
    TRANSFORMATION_TYPE,
    IntervalPredicate,
    TransformationPredicate,
)

DOCS = Path(__file__).parents[3] / "docs"


def schemas() -> dict[Path, dict[str, Any]]:
    return {
        DOCS / "interval-v1.schema.json": _schema(
            IntervalPredicate,
            INTERVAL_TYPE,
            "What one worker of a sealring job vouches for over one interval",
        ),
        DOCS / "transformation-v1.schema.json": _schema(
            TransformationPredicate,
            TRANSFORMATION_TYPE,
            "What turned some files or datasets into others",
        ),
    }


def _schema(kind: Any, identifier: str, title: str) -> dict[str, Any]:
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": identifier,
        "title": title,
        **schema_of(kind),
    }


def schema_of(kind: Any, name: str = "") -> dict[str, Any]:
    if dataclasses.is_dataclass(kind):
        hints = get_type_hints(kind)
        return {
            "type": "object",
            "properties": {field: schema_of(hints[field], field) for field in hints},
            "required": list(hints),
            "additionalProperties": False,
        }
    if get_origin(kind) is list:
        return {"type": "array", "items": schema_of(get_args(kind)[0])}
    if get_origin(kind) is Literal:
        return {"enum": list(get_args(kind))}
    if get_origin(kind) is types.UnionType:
        return {"anyOf": [schema_of(get_args(kind)[0], name), {"type": "null"}]}
    if kind is int:
        return {"type": "integer", "minimum": 0, "maximum": (1 << 63) - 1}
    if kind is bool:
        return {"type": "boolean"}
    assert kind is str
    return (
        {"type": "string", "pattern": "^[0-9a-f]{64}$"} if name in DIGESTS else {"type": "string"}
    )


if __name__ == "__main__":
    for path, schema in schemas().items():
        path.write_text(json.dumps(schema, indent=2) + "\n")
