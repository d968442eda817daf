"""A policy written from evidence: strict, with a comment at every rule."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from sealring.identity.attestation.worker import AttestedDevice, DescribedWorker

Table = dict[str, Any]
"""A table of a policy, as TOML reads it."""

_IMA: Final = "ima"
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
    "ima": "The files that may have been measured since boot. Compare them with your own build.",
    "gpus": "At least so many GPUs.",
    "unchecked": "Left open, each by its name: `sealring policy check` says what gets in.",
}


def new_policy(job: str | None, tables: Mapping[str, Table]) -> str:
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


def tables_from(workers: Sequence[DescribedWorker], roots: Mapping[str, str]) -> dict[str, Table]:
    """The tables that admit what these workers show. `roots` by kind, where a policy names them."""
    tables: dict[str, Table] = {}
    for kind in sorted({one.kind for one in workers}):
        alike = [one for one in workers if one.kind == kind]
        table: Table = {"roots": [roots[kind]]} if kind in roots else {}
        tables[kind] = table | _table(kind, alike)
    if devices := [one.devices for one in workers if one.devices]:
        tables["nvidia"] = _nvidia(devices)
    return tables


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


def _table(kind: str, workers: Sequence[DescribedWorker]) -> Table:
    table: Table = {}
    if kind != "tpm":
        table["measurements"] = _values([one.measurement for one in workers])
    if kind in _SNP_KINDS:
        table["minimum_tcb"] = _minimum(workers)
        table["platform_info"] = _platform(workers)
        if any(one.guest["vlek"] for one in workers):
            table["vlek"] = True
        host_data = [one.registers["host_data"] for one in workers]
        if any(value.strip("0") for value in host_data):
            table["registers"] = {"host_data": _values(host_data)}
    if kind == "tdx":
        names = ("rtmr0", "rtmr1", "rtmr2")
        table["registers"] = {
            name: _values([one.registers[name] for one in workers]) for name in names
        }
    if kind in _PCRS:
        table["pcrs"] = {
            str(pcr): _values([one.registers.get(f"pcr{pcr}", "") for one in workers])
            for pcr in _PCRS[kind]
        }
        table |= _files(workers)
    return {name: value for name, value in table.items() if value}


def _files(workers: Sequence[DescribedWorker]) -> Table:
    """What all of them have measured since boot; left open where one does not show it.

    Or shows digests of an algorithm that no policy can list.
    """
    every = [digest for one in workers for found in one.ima_files.values() for digest in found]
    if not all(one.ima_entries for one in workers) or any(":" in digest for digest in every):
        return {"unchecked": [_IMA]}
    files: dict[str, list[str]] = {}
    for one in workers:
        for path, digests in one.ima_files.items():
            files.setdefault(path, []).extend(digests)
    return {_IMA: {"files": {path: _values(found) for path, found in sorted(files.items())}}}


def _minimum(workers: Sequence[DescribedWorker]) -> Table:
    """By product, the oldest version of each part that any of them has."""
    least: dict[str, dict[str, int]] = {}
    for one in workers:
        have = least.setdefault(one.product, dict(one.tcb))
        for tcb in (one.tcb, one.launch_tcb):
            for name, value in tcb.items():
                have[name] = min(have[name], value)
    return dict(least)


def _platform(workers: Sequence[DescribedWorker]) -> Table:
    """What all of them report alike."""
    first, *others = workers
    return {
        name.removeprefix("platform_"): bool(value)
        for name, value in first.guest.items()
        if name.startswith("platform_")
        and name != "platform_unknown"
        and all(one.guest.get(name) == value for one in others)
    }


def _nvidia(shown: Sequence[tuple[AttestedDevice, ...]]) -> Table:
    every = [device for devices in shown for device in devices]
    table: Table = {
        "gpus": min(sum(not one.is_switch for one in devices) for devices in shown),
        "switches": min(sum(one.is_switch for one in devices) for devices in shown),
        "models": _values([one.model for one in every]),
    }
    for key, name in (("drivers", "driver"), ("vbios", "vbios")):
        table[key] = _values([one.firmware[name] for one in every if name in one.firmware])
    return table


def _values(found: Sequence[str]) -> list[str]:
    return sorted({one for one in found if one})


def _key(name: str) -> str:
    bare = name.isascii() and name.replace("_", "").replace("-", "").isalnum()
    return name if bare else toml(name)
