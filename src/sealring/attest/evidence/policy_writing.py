"""A policy written from evidence: strict, with a comment at every rule."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import reduce
from operator import or_
from typing import Any, Final

from sealring.attest.evidence.policy import Policy, Rule, judge
from sealring.attest.evidence.policy_tables import STATUSES
from sealring.attest.evidence.snp import OTHER_BITS, PLATFORM_BITS
from sealring.attest.evidence.worker import AttestedDevice, DescribedWorker

PolicyTable = dict[str, Any]
"""A table of a policy, as TOML reads it."""

_IMA: Final = "ima"
# A list that its issuer makes once a year, with the weeks in which it overlaps with the next.
_YEARLY_LIST_DAYS: Final = 400
_SNP_KINDS: Final = ("snp", "az-snp-vtpm")
_PCRS: Final = {"tpm": (0, 4, 7), "az-snp-vtpm": (4, 7), "az-tdx-vtpm": (4, 7)}
_COMMENTS: Final = {
    "roots": "SHA-256 of the maker's root certificate. Compare it with the maker's own copy.",
    "measurements": "What was launched. Compare it with your own build of the image.",
    "minimum_tcb": "The least versions of firmware and microcode, by product. Raise them in time.",
    "platform_info": "What the host's platform must report.",
    "guest_svn": "The least security version of images by these signers.",
    "registers": "What was measured or given at launch, and after it.",
    "pcrs": "What was measured at boot, by PCR.",
    "tcb_status": "What Intel calls the TCB. Update the machines, then leave UpToDate alone.",
    "ima": "The files that may have been measured since boot. Compare them with your own build.",
    "gpus": "At least so many GPUs.",
    "revocation_list_days": "Lists may be so old. The issuer of one of them makes it once a year.",
    "unchecked": "Left open, each by its name: `sealring policy check` says what gets in.",
}


def new_policy(job: str | None, tables: Mapping[str, PolicyTable]) -> str:
    text = "# Who may join. `sealring policy check` with this file says in words what it lets in.\n"
    text += "version = 1\n"
    text += f"job = {toml(job)}\n" if job else '# job = "name"    # the only job to be joined\n'
    text += "rejoins = 0    # how often a rank may be joined again, with another key\n"
    for name, table in tables.items():
        text += f"\n[{name}]\n"
        for key, value in table.items():
            if key != _IMA:
                text += _line(key, value)
        if _IMA in table:
            text += f"\n[{name}.{_IMA}.files]\n# {_COMMENTS[_IMA]}\n"
            text += "".join(_line(path, digests) for path, digests in table[_IMA]["files"].items())
    return text


def _line(key: str, value: Any) -> str:
    comment = _COMMENTS.get(key)
    return (f"# {comment}\n" if comment else "") + f"{_key(key)} = {toml(value)}\n"


def tables_from(
    workers: Sequence[DescribedWorker], roots: Mapping[str, Sequence[str]]
) -> dict[str, PolicyTable]:
    """The tables that admit what these workers show. `roots` by kind, where a policy names them."""
    tables: dict[str, PolicyTable] = {}
    for kind in sorted({one.kind for one in workers}):
        alike = [one for one in workers if one.kind == kind]
        table: PolicyTable = {"roots": _values(roots[kind])} if kind in roots else {}
        tables[kind] = table | _table(kind, alike)
    if any(one.devices for one in workers):
        tables["nvidia"] = _nvidia([one.devices for one in workers])
    return tables | _freshness(workers)


def check_admits(policy: Policy, worker: DescribedWorker) -> list[Rule]:
    """Raises the refusal if the policy does not admit the worker that it was written from.

    No policy admits a debug guest, for instance. Returns the rules that fail for what is not at
    hand where this is asked: revocation lists and references are the verifier's, not the worker's.
    """
    devices = replace(policy.devices, require_reference=False) if policy.devices else None
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


def _table(kind: str, workers: Sequence[DescribedWorker]) -> PolicyTable:
    table: PolicyTable = {}
    left: list[str] = []
    if kind != "tpm":
        table["measurements"] = _values([one.measurement for one in workers])
    if kind in _SNP_KINDS:
        table |= _snp(workers, left)
    if kind == "tdx":
        names = ("rtmr0", "rtmr1", "rtmr2")
        table["registers"] = {
            name: _values([one.registers[name] for one in workers]) for name in names
        }
    statuses = STATUSES.intersection(one.tcb_status for one in workers)
    if statuses - {"UpToDate"}:
        table["tcb_status"] = sorted(statuses)
    if kind in _PCRS:
        table["pcrs"] = _pcrs(_PCRS[kind], workers, left)
        table |= _files(workers, left)
    if any(one.guest.get("insecure_boot") for one in workers):
        table["secure_boot"] = False
    if any(one.guest.get("ak_certificate") for one in workers):
        table["ak_certificates"] = True
    kept = {name: value for name, value in table.items() if value is False or value}
    return kept | ({"unchecked": left} if left else {})


def _snp(workers: Sequence[DescribedWorker], left: list[str]) -> PolicyTable:
    table: PolicyTable = {"minimum_tcb": _minimum(workers), "platform_info": _platform(workers)}
    if not table["platform_info"]:
        left.append("platform_info")
    if any(one.guest["vlek"] for one in workers):
        table["vlek"] = True
    for name in ("vmpl", "migration"):
        table[name] = max(one.guest[name] for one in workers)
    host_data = [one.registers["host_data"] for one in workers]
    if any(value.strip("0") for value in host_data):
        table["registers"] = {"host_data": _values(host_data)}
    return table


def _pcrs(
    numbers: Sequence[int], workers: Sequence[DescribedWorker], left: list[str]
) -> PolicyTable:
    """The values of each PCR; left open where one of the workers does not quote it."""
    found: PolicyTable = {}
    for pcr in numbers:
        values = [one.registers.get(f"pcr{pcr}", "") for one in workers]
        if all(values):
            found[str(pcr)] = _values(values)
        else:
            left.append(f"pcr{pcr}")
    return found


def _files(workers: Sequence[DescribedWorker], left: list[str]) -> PolicyTable:
    """What all of them have measured since boot; left open where one does not show it.

    Or shows digests of an algorithm that no policy can list.
    """
    every = [digest for one in workers for found in one.ima_files.values() for digest in found]
    if not all(one.ima_entries for one in workers) or any(":" in digest for digest in every):
        left.append(_IMA)
        return {}
    if any(one.ima_violations for one in workers):
        left.append("ima_violations")
    files: dict[str, list[str]] = {}
    for one in workers:
        for path, digests in one.ima_files.items():
            files.setdefault(path, []).extend(digests)
    return {_IMA: {"files": {path: _values(found) for path, found in sorted(files.items())}}}


def _minimum(workers: Sequence[DescribedWorker]) -> PolicyTable:
    """By product, the oldest version of each part that any of them has."""
    least: dict[str, dict[str, int]] = {}
    for one in workers:
        have = least.setdefault(one.product, dict(one.tcb))
        for tcb in (one.tcb, one.launch_tcb):
            for name, value in tcb.items():
                have[name] = min(have[name], value)
    return dict(least)


def _platform(workers: Sequence[DescribedWorker]) -> PolicyTable:
    """What all of them report alike, and the bits without a name that any of them reports."""
    first, *others = workers
    named: PolicyTable = {
        name: bool(first.guest[f"platform_{name}"])
        for name in PLATFORM_BITS
        if all(one.guest[f"platform_{name}"] == first.guest[f"platform_{name}"] for one in others)
    }
    unnamed = reduce(or_, (one.guest["platform_unknown"] for one in workers))
    if named and unnamed:
        named[OTHER_BITS] = [at for at in range(unnamed.bit_length()) if unnamed >> at & 1]
    return named


def _nvidia(shown: Sequence[tuple[AttestedDevice, ...]]) -> PolicyTable:
    every = [device for devices in shown for device in devices]
    table: PolicyTable = {
        "gpus": min(sum(not one.is_switch for one in devices) for devices in shown),
        "switches": min(sum(one.is_switch for one in devices) for devices in shown),
        "models": _values([one.model for one in every]),
    }
    for key, name in (("drivers", "driver"), ("vbios", "vbios")):
        versions = [one.firmware[name] for one in every if name in one.firmware]
        if all(versions):
            table[key] = _values(versions)
    return table


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


def _values(found: Sequence[str]) -> list[str]:
    return sorted({one for one in found if one})


def _key(name: str) -> str:
    bare = name.isascii() and name.replace("_", "").replace("-", "").isalnum()
    return name if bare else toml(name)
