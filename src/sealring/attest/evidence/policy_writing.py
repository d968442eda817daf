"""A policy written from evidence, or from answers: strict, with a comment at each rule."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any, Final

from sealring.attest.evidence.kinds import DEVICE_KINDS, KINDS
from sealring.attest.evidence.policy import Policy, judge
from sealring.attest.evidence.rules import Form, Judged, Prompter, Rules, Table, distinct
from sealring.attest.evidence.worker import DescribedWorker

PolicyTable = dict[str, Any]
"""A table of a policy, as TOML reads it."""

_IMA: Final = "ima"
# A list that its issuer makes once a year, with the weeks in which it overlaps with the next.
_YEARLY_LIST_DAYS: Final = 400
_FORMS: Final[Mapping[str, Form]] = {
    **{name: kind.form for name, kind in KINDS.items()},
    **{name: kind.form for name, kind in DEVICE_KINDS.items()},
}
_COMMENTS: Final = {
    "revocation_list_days": "Lists may be so old. The issuer of one of them makes it once a year.",
    "unchecked": "Left open, each by its name: `sealring policy check` says what gets in.",
}


def new_policy(job: str | None, tables: Mapping[str, PolicyTable]) -> str:
    text = "# Who may join. `sealring policy check` with this file says in words what it lets in.\n"
    text += "version = 1\n"
    text += f"job = {toml(job)}\n" if job else '# job = "name"    # the only job to be joined\n'
    text += "rejoins = 0    # how often a rank may be joined again, with another key\n"
    for name, table in tables.items():
        rules = _FORMS[name].rules if name in _FORMS else ()
        comments = _COMMENTS | {rule.name: rule.comment for rule in rules}
        text += f"\n[{name}]\n"
        for key, value in table.items():
            if key != _IMA:
                text += _line(key, value, comments.get(key))
        if _IMA in table:
            text += f"\n[{name}.{_IMA}.files]\n# {comments[_IMA]}\n"
            text += "".join(_line(path, digests) for path, digests in table[_IMA]["files"].items())
    return text


def _line(key: str, value: Any, comment: str | None = None) -> str:
    return (f"# {comment}\n" if comment else "") + f"{_key(key)} = {toml(value)}\n"


def tables_from(
    workers: Sequence[DescribedWorker], roots: Mapping[str, Sequence[str]]
) -> dict[str, PolicyTable]:
    """The tables that admit what these workers show. `roots` by kind, where a policy names them."""
    tables: dict[str, PolicyTable] = {}
    for kind in sorted({one.kind for one in workers}):
        alike = [one for one in workers if one.kind == kind]
        form = KINDS[kind].form
        table = {rule.name: rule.write(alike) for rule in form.rules}
        if kind in roots:
            table["roots"] = distinct(roots[kind])
        opened = [name for rule in form.rules for name in rule.opened(alike)]
        tables[kind] = _complete(form, table, opened)
    if any(one.devices for one in workers):
        written = {rule.name: rule.write(workers) for rule in DEVICE_KINDS["nvidia"].form.rules}
        tables["nvidia"] = {name: value for name, value in written.items() if value is not None}
    return tables | _freshness(workers)


def tables_asked(kind: str, prompter: Prompter) -> dict[str, PolicyTable]:
    """The table for this kind of evidence, as a person answers. What is not stated is left open."""
    form = KINDS[kind].form
    return {kind: _complete(form, {rule.name: rule.ask(prompter) for rule in form.rules})}


def _complete(form: Form, written: PolicyTable, opened: Sequence[str] = ()) -> PolicyTable:
    """What is written, and under `unchecked` the rules that it leaves open."""
    table = {name: value for name, value in written.items() if value is False or value}
    values = {rule.name: rule.read(Table(table), rule.name) for rule in form.rules}
    _, unstated = form.unstated(values)
    left = [*(need.name for need in unstated), *opened]
    return table | ({"unchecked": left} if left else {})


def check_admits(policy: Policy, worker: DescribedWorker) -> list[Judged]:
    """Raises the refusal if the policy does not admit the worker that it was written from.

    No policy admits a debug guest, for instance. Returns the rules that fail for what is not at
    hand where this is asked: revocation lists and references are the verifier's, not the worker's.
    """
    devices = policy.devices
    if devices is not None:
        devices = Rules(devices.form, {**devices.values, "require_reference": False})
    itself = replace(
        policy,
        devices=devices,
        require_revocation_lists=False,
        revocation_list_days=timedelta.max.days,
    )
    judge(itself, worker, None).require()
    return [rule for rule in judge(policy, worker, None).rules if rule.refusal is not None]


def toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, str):
        # JSON's escapes are TOML's too; TOML wants one more.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_key(key)} = {toml(one)}" for key, one in value.items()) + "}"
    return "[" + ", ".join(toml(one) for one in value) + "]"


def _freshness(workers: Sequence[DescribedWorker]) -> dict[str, PolicyTable]:
    """Nothing where the default admits these workers' lists. Intel makes its root's once a year."""
    ages = [
        (one.verified_at - seen.made).days
        for one in workers
        for lists in (one.lists, *(device.lists for device in one.devices))
        for seen in lists
    ]
    oldest = max(ages, default=0)
    if oldest <= Policy(kinds={}).revocation_list_days:
        return {}
    return {"freshness": {"revocation_list_days": max(oldest, _YEARLY_LIST_DAYS)}}


def _key(name: str) -> str:
    bare = name.isascii() and name.replace("_", "").replace("-", "").isalnum()
    return name if bare else toml(name)
