"""An old policy made strict: what it lacks is taken from evidence, or left open by its name.

The text is edited, not written anew, so that comments and the order stay. Nothing but the rules
that were missing may differ afterwards.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from sealring.attest.evidence.policy_file import missing_rules, parse_policy
from sealring.attest.evidence.policy_openings import PASSES_WITHOUT
from sealring.attest.evidence.policy_writing import Table, toml
from sealring.attest.evidence.snp import TCB_BYTES
from sealring.errors import BadPolicy

_HEADER: Final = re.compile(r"\s*\[{1,2}\s*([\w.\s\"'-]+?)\s*\]{1,2}")


@dataclass(frozen=True, slots=True)
class Change:
    table: str
    rule: str
    text: str
    open: bool
    """The rule is left open, as it was before the policy said so."""


def upgrade(text: str, shown: Mapping[str, Table]) -> tuple[str, list[Change]]:
    """`shown` has the tables that admit some evidence (policy_writing.tables_from), by kind."""
    document = tomllib.loads(text) if (missing := missing_rules(text)) else {}
    changes: list[Change] = []
    for table in dict.fromkeys(one.table for one in missing):
        old: Table = document[table]
        new: Table = {}
        names = [one.name for one in missing if one.table == table]
        for name in names:
            changes.append(_add(table, name, old, shown.get(table, {}), new))
        for key, value in new.items():
            text = _set(text, table, key, value)
    if changes:
        parse_policy(text)
        _check_rest(document, tomllib.loads(text), changes)
    return text, changes


def _add(table: str, name: str, old: Table, shown: Table, new: Table) -> Change:
    """Adds the rule to `new`, from what is known, or its name to what is left open."""
    key, part = _place(name)
    value = shown.get(key, {}).get(part) if part else shown.get(key)
    if name == "minimum_tcb" and old.get(key):
        new[key] = _by_product(old, value or {})
        return Change(table, name, f"now by product: {key} = {toml(new[key])}", open=False)
    if not value:
        new["unchecked"] = [*old.get("unchecked", []), *new.get("unchecked", [])]
        new["unchecked"] = [*dict.fromkeys([*new["unchecked"], name])]
        return Change(table, name, f"left open: {PASSES_WITHOUT[name]}", open=True)
    if part:
        new[key] = {**old.get(key, {}), **new.get(key, {}), part: value}
    else:
        new[key] = value
    return Change(table, name, f"from the evidence: {toml(value)}", open=False)


def _place(name: str) -> tuple[str, str]:
    """The key of the table that holds a rule, and its part of that key."""
    if name.startswith("pcr"):
        return "pcrs", name.removeprefix("pcr")
    if name.startswith("rtmr") or name == "isvprodid":
        return "registers", name
    return ("minimum_tcb", name) if name == "isvsvn" else (name, "")


def _by_product(old: Table, shown: Table) -> Table:
    """The old numbers for each product that the table admits; what it did not name, from 0 on."""
    flat = old["minimum_tcb"]
    return {
        product: {part: flat.get(part, shown.get(product, {}).get(part, 0)) for part in parts}
        for product, parts in TCB_BYTES.items()
        if product in old.get("products", TCB_BYTES)
    }


def _set(text: str, table: str, key: str, value: Any) -> str:
    """The text with this key of this table, in the place of the old one if there was one."""
    lines = text.splitlines()
    start = next((n for n, line in enumerate(lines) if _header(line) == table), None)
    if start is None:
        raise BadPolicy(
            f"[{table}] is not written as a table with that heading: write it so, then upgrade"
        )
    kept, inside, at = lines[: start + 1], table, start + 1
    kept.append(f"{key} = {toml(value)}")
    while at < len(lines):
        inside = _header(lines[at]) or inside
        size = _statement(lines[at:])
        if inside != f"{table}.{key}" and not (inside == table and _names(lines[at], key)):
            kept += lines[at : at + size]
        at += size
    return "\n".join(kept) + "\n"


def _header(line: str) -> str:
    match = _HEADER.match(line)
    return re.sub(r"[\s\"']", "", match[1]) if match else ""


def _names(line: str, key: str) -> bool:
    return re.match(rf"\s*[\"']?{re.escape(key)}[\"']?\s*[=.]", line) is not None


def _statement(lines: list[str]) -> int:
    """How many lines the statement takes that begins here: lists may go over several."""
    for size in range(1, len(lines) + 1):
        try:
            tomllib.loads("\n".join(lines[:size]))
        except tomllib.TOMLDecodeError:
            continue
        return size
    return 1


def _check_rest(before: Table, after: Table, changes: list[Change]) -> None:
    changed = {(one.table, key) for one in changes for key in (_place(one.rule)[0], "unchecked")}
    for document in (before, after):
        for table, key in changed:
            document[table].pop(key, None)
    if before != after:
        raise BadPolicy("the policy cannot be edited safely: add the rules by hand")
