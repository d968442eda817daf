"""The JSON schema of a predicate, from its dataclasses: what docs/interval-v1.schema.json must be.

`python -m tests.provenance.schema` writes the file.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from sealring.provenance.statements import _DIGESTS, PREDICATE_TYPE, Predicate

FILE = Path(__file__).parents[2] / "docs" / "interval-v1.schema.json"


def schema() -> dict[str, Any]:
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": PREDICATE_TYPE,
        "title": "What one worker of a sealring job vouches for over one interval",
        **schema_of(Predicate),
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
    if kind is int:
        return {"type": "integer", "minimum": 0, "maximum": (1 << 63) - 1}
    assert kind is str
    return (
        {"type": "string", "pattern": "^[0-9a-f]{64}$"} if name in _DIGESTS else {"type": "string"}
    )


if __name__ == "__main__":
    FILE.write_text(json.dumps(schema(), indent=2) + "\n")
