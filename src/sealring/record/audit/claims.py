"""What is claimed of a run, as TOML: what an auditor wants answered. Unknown words are refused.

    version = 1
    trained_only_on = ["<SHA-256>", ...]             raw data, datasets or starting checkpoints
    stages = [{ name = "deduplicate", code = "<SHA-256>" }, ...]
    code = { "train.py" = ["<SHA-256>"] }            names of scripts, and their digests
    machines = "policy.toml"                         an attestation policy, beside this file
    ranks = 16
    aggregation = { kinds = ["all_reduce"], every_step = true }
    privacy = { epsilon = "8.0", delta = "1e-5" }
    no_gaps = true

Each is optional; what is not claimed is not answered.
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any, Final

from sealring.core.hooks import MachinePolicy, evidence_judge
from sealring.errors import BadClaims, BadPolicy
from sealring.formats.files import read_public
from sealring.limits import MAX_WORLD

VERSION: Final = 1
_SHA256: Final = re.compile(r"[0-9a-f]{64}")
_NAMES: Final = (
    "trained_only_on", "stages", "code", "machines", "ranks", "aggregation", "privacy", "no_gaps",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Stage:
    name: str
    code: str | None
    """The digest of its program; None: any."""


@dataclass(frozen=True, slots=True)
class Aggregation:
    kinds: frozenset[str]
    every_step: bool


@dataclass(frozen=True, slots=True)
class Privacy:
    epsilon: Decimal
    delta: Decimal


@dataclass(frozen=True, slots=True)
class Claims:
    trained_only_on: frozenset[str] | None = None
    stages: tuple[Stage, ...] | None = None
    code: dict[str, frozenset[str]] | None = None
    machines: MachinePolicy | None = None
    ranks: int | None = None
    aggregation: Aggregation | None = None
    privacy: Privacy | None = None
    no_gaps: bool = False


def read_claims(path: Path) -> Claims:
    data = read_public(path, "the claims", BadClaims)
    try:
        document = tomllib.loads(data.decode())
    except (ValueError, RecursionError) as problem:
        raise BadClaims(f"{path} is not TOML: {problem}") from None
    return _Reader(str(path), path.parent).read(document)


class _Reader:
    def __init__(self, where: str, folder: Path) -> None:
        self._where = where
        self._folder = folder

    def read(self, document: dict[str, Any]) -> Claims:
        self._only("", document, {"version", *_NAMES})
        if document.get("version") != VERSION or type(document["version"]) is not int:
            raise self._bad("version", f"is {VERSION}")
        found = {
            name: getattr(self, f"_{name}")(document[name]) for name in _NAMES if name in document
        }
        if not found:
            raise self._bad("", f"claims nothing: write one of {', '.join(_NAMES)}")
        return Claims(**found)

    def _trained_only_on(self, value: Any) -> frozenset[str]:
        return self._digests("trained_only_on", value)

    def _stages(self, value: Any) -> tuple[Stage, ...]:
        if not isinstance(value, list):
            raise self._bad("stages", "is a list of tables of name and code")
        return tuple(self._stage(f"stages[{number}]", each) for number, each in enumerate(value))

    def _stage(self, name: str, value: Any) -> Stage:
        table = self._table(name, value, {"name", "code"})
        if not isinstance(table.get("name"), str):
            raise self._bad(name, "has a name")
        code = table.get("code")
        return Stage(table["name"], None if code is None else self._digest(f"{name}.code", code))

    def _code(self, value: Any) -> dict[str, frozenset[str]]:
        if not isinstance(value, dict) or not value:
            raise self._bad("code", "is a table of names, each with a list of digests")
        return {name: self._digests(f"code.{name}", each) for name, each in value.items()}

    def _machines(self, value: Any) -> MachinePolicy:
        if not isinstance(value, str):
            raise self._bad("machines", "is the name of a policy's file")
        content = read_public(self._folder / value, "the policy", BadClaims)
        try:
            return evidence_judge.one().parse_policy(content.decode())
        except (BadPolicy, ValueError) as problem:
            raise self._bad("machines", f"names a policy that cannot be used: {problem}") from None

    def _ranks(self, value: Any) -> int:
        if type(value) is not int or not 1 <= value <= MAX_WORLD:
            raise self._bad("ranks", f"is a number from 1 to {MAX_WORLD}")
        return value

    def _aggregation(self, value: Any) -> Aggregation:
        table = self._table("aggregation", value, {"kinds", "every_step"})
        kinds, every_step = table.get("kinds"), table.get("every_step", False)
        if not isinstance(kinds, list) or not kinds or not all(type(one) is str for one in kinds):
            raise self._bad("aggregation.kinds", 'is a list of collectives, e.g. ["all_reduce"]')
        if type(every_step) is not bool:
            raise self._bad("aggregation.every_step", "is true or false")
        return Aggregation(frozenset(kinds), every_step)

    def _privacy(self, value: Any) -> Privacy:
        table = self._table("privacy", value, {"epsilon", "delta"})
        return Privacy(
            *(self._decimal(f"privacy.{name}", table.get(name)) for name in ("epsilon", "delta"))
        )

    def _no_gaps(self, value: Any) -> bool:
        if value is not True:
            raise self._bad("no_gaps", "is true, or is left out")
        return True

    def _decimal(self, name: str, value: Any) -> Decimal:
        """As text: a binary fraction would not be what was written."""
        try:
            found = Decimal(value) if isinstance(value, str) and len(value) <= 40 else Decimal(-1)
        except InvalidOperation:
            found = Decimal(-1)
        if not found.is_finite() or found < 0:
            raise self._bad(name, 'is a number in quotes, e.g. "8.0"')
        return found

    def _digests(self, name: str, value: Any) -> frozenset[str]:
        if not isinstance(value, list) or not value:
            raise self._bad(name, "is a list of SHA-256 digests")
        return frozenset(self._digest(name, each) for each in value)

    def _digest(self, name: str, value: Any) -> str:
        if not isinstance(value, str) or not _SHA256.fullmatch(value):
            raise self._bad(
                name, "has something that is no SHA-256 digest of 64 hexadecimal digits"
            )
        return value

    def _table(self, name: str, value: Any, known: set[str]) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise self._bad(name, f"is a table of {', '.join(sorted(known))}")
        self._only(f"{name}.", value, known)
        return value

    def _only(self, prefix: str, table: dict[str, Any], known: set[str]) -> None:
        for name in table:
            if name not in known:
                allowed = ", ".join(sorted(known))
                raise self._bad(f"{prefix}{name}", f"is not known here; there is {allowed}")

    def _bad(self, name: str, problem: str) -> BadClaims:
        return BadClaims(f"{self._where}: {name or 'the file'} {problem}")
