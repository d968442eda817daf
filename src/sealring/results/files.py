"""Results as a file: whole or not at all, and refused unless every field is as it should be."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Final

from sealring.errors import ConfigurationError
from sealring.formats.files import write_public
from sealring.formats.strict import read_json, strictly
from sealring.results.schema import VERSION, Results

FORMAT: Final = "sealring bench results"
_MAX_BYTES: Final = 256 << 20


def write_results(path: Path, results: Results) -> None:
    """Replaces an older file. What could not be read back is not written."""
    text = to_json(results)
    from_json(text, "these results")
    write_public(path, text.encode())


def read_results(path: Path) -> Results:
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_BYTES + 1)
    except OSError as problem:
        raise ConfigurationError(
            f"the results {path} cannot be read: {problem.strerror}. "
            "Make some with `sealring bench all`."
        ) from problem
    if len(content) > _MAX_BYTES:
        raise ConfigurationError(f"{path} is larger than {_MAX_BYTES} bytes: it holds no results")
    return from_json(content, str(path))


def to_json(results: Results) -> str:
    head = {"format": FORMAT, "version": VERSION}
    # The last line says that all before it is there.
    return json.dumps({**head, **dataclasses.asdict(results), "end": True}, indent=1) + "\n"


def from_json(text: str | bytes, name: str) -> Results:
    """Reads back what to_json wrote; `name` is what an error calls it."""
    try:
        document = read_json(text, numbers="any")  # a NaN is named below
    except ValueError:
        start = text[:200].decode("utf-8", "replace") if isinstance(text, bytes) else text[:200]
        if FORMAT in start:
            raise ConfigurationError(
                f"{name} is cut short: copy it again, or measure again with `sealring bench all`"
            ) from None
        raise ConfigurationError(
            f"{name} is not JSON, so it holds no results; `sealring bench all` writes results.json"
        ) from None
    if not isinstance(document, dict) or document.pop("format", None) != FORMAT:
        raise ConfigurationError(
            f"{name} holds no bench results; `sealring bench all` writes results.json"
        )
    version = document.pop("version", None)
    if version not in (1, 2, 3, VERSION):
        raise ConfigurationError(
            f"{name} holds results of version {version!r}, and this sealring reads 1 to {VERSION}: "
            "measure again with `sealring bench all`"
        )
    if version == 1 and isinstance(document.get("machine"), dict):
        document["machine"].setdefault("gpu_memory_bytes", 0)  # version 1 knew no GPU's memory
    if version in (1, 2):
        document.setdefault("scale", [])  # which did not measure the forming of groups
    if version != VERSION:
        document.setdefault("algorithms", "")  # which did not keep the table
    if document.pop("end", None) is not True:
        raise ConfigurationError(f"{name} is cut short: measure again with `sealring bench all`")
    results: Results = strictly(Results, document, name, "results file")
    return results
