"""The kernel's list of the files that it measured since boot (IMA), replayed against PCR 10.

The form of /sys/kernel/security/ima/binary_runtime_measurements, little-endian:

    PCR (4) | SHA-1 of the data (20) | length, template's name | length, data

The data is the template's fields, each after its length: `d-ng` (algorithm, ":", NUL, digest),
`n-ng` (path, NUL), and for some templates one more. The PCR was extended with the data's hash in
its own bank (Linux 5.8 and later). The list is not signed: it counts only as far as it leads to the
PCR that the TPM signed. It grows while it is read, so it may hold more: entries after the one that
leads to the quoted value are not evidence, and are ignored.

A violation is a file that was written while it was measured or in use. Its entry has zeros in the
place of the hash, and the PCR was extended with ones, so no signature covers the path in it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

from sealring.attest.evidence.encoding import unknown_evidence
from sealring.attest.evidence.rules import (
    Finding,
    Need,
    Rule,
    Rules,
    Table,
    Workers,
    digest_lists,
    distinct,
    some,
    words,
)
from sealring.attest.evidence.tpm.structures import BANKS, SHA256, SHA384
from sealring.attest.evidence.worker import DescribedWorker
from sealring.errors import ForgedEvidence, MalformedEvidence

IMA_LOG: Final = Path("/sys/kernel/security/ima/binary_runtime_measurements")
PCR: Final = 10
MAX_BYTES: Final = 320 << 10
"""The most bytes of a list that a worker sends, so that it fits into evidence with the rest."""
_MAX_ENTRIES: Final = 8192
_HEAD: Final = struct.Struct("<I20s")
_NO_HASH: Final = bytes(20)
_HASHES: Final = {SHA256: hashlib.sha256, SHA384: hashlib.sha384}
_FIELDS: Final = {b"ima-ng": 2, b"ima-sig": 3, b"ima-buf": 3}
"""The known templates, and how many fields each has. The first two fields are d-ng and n-ng."""
_ALGORITHM: Final = re.compile(rb"[a-z0-9-]{1,16}")
_BARE: Final = {b"sha256": 32, b"sha384": 48, b"sha512": 64}
"""The sizes of digests that a policy can list. The size tells the algorithms apart."""
_BOOT_AGGREGATE: Final = "boot_aggregate"
_LOG = logging.getLogger("sealring")


class ImaEntry(NamedTuple):
    path: str
    digest: str
    """Hexadecimal. If a policy cannot list it, the algorithm's name stands before it."""
    data: bytes
    violation: bool
    end: int
    """Where the entry ends in the list."""


@dataclass(frozen=True, slots=True)
class ImaMeasured:
    """What PCR 10 was extended with, read from a list that leads to the PCR's value."""

    entries: int
    violations: int
    files: Mapping[str, tuple[str, ...]]
    """The digests that each path was measured with, in order. The boot aggregate is left out if it
    is the hash of the quoted PCRs."""
    end: int
    """How many bytes of the list lead to the quoted value."""


def read_entries(log: bytes) -> Iterator[ImaEntry]:
    """Yields the entries one by one, so that a caller can stop before entries it does not want."""
    at = 0
    for _ in range(_MAX_ENTRIES):
        if at == len(log):
            return
        if len(log) - at < _HEAD.size:
            raise MalformedEvidence(f"the IMA list is cut at {at}")
        pcr, own = _HEAD.unpack_from(log, at)
        if pcr != PCR:
            raise unknown_evidence(f"the IMA list has an entry for PCR {pcr}, not {PCR}")
        template, at = _sized(log, at + _HEAD.size)
        if template not in _FIELDS:
            name = template[:16].decode("ascii", "replace")
            raise unknown_evidence(f"the IMA list has an entry of template {name!r}, not known")
        data, at = _sized(log, at)
        path, digest = _read(data, _FIELDS[template])
        yield ImaEntry(path, digest, data, own == _NO_HASH, at)
    raise MalformedEvidence(f"the IMA list has more than {_MAX_ENTRIES} entries")


def replay_ima(log: bytes, pcrs: Mapping[int, bytes], bank: int = SHA256) -> ImaMeasured:
    """Return what the list shows. The list must lead to the value of PCR 10 among `pcrs`."""
    hashed = _HASHES[bank]
    value, quoted = bytes(BANKS[bank]), pcrs.get(PCR)
    files: dict[str, list[str]] = {}
    violations = 0
    for count, entry in enumerate(read_entries(log), 1):
        if entry.violation:
            extended = b"\xff" * BANKS[bank]
            violations += 1
        else:
            extended = hashed(entry.data).digest()
            if entry.path != _BOOT_AGGREGATE or entry.digest not in _aggregates(pcrs, bank):
                digests = files.setdefault(entry.path, [])
                if entry.digest not in digests:
                    digests.append(entry.digest)
        value = hashed(value + extended).digest()
        if value == quoted:
            found = {path: tuple(digests) for path, digests in files.items()}
            return ImaMeasured(count, violations, found, entry.end)
    raise ForgedEvidence(f"the IMA list does not lead to the value of PCR {PCR}")


def matching_ima(pcrs: Mapping[int, bytes], bank: int, path: Path = IMA_LOG) -> bytes:
    """This machine's list, up to the entry that leads to the quoted value. Empty if none."""
    try:
        log = path.read_bytes()
        log = log[: replay_ima(log, pcrs, bank).end]
    except OSError as problem:
        _LOG.warning("sealring: the list of measured files cannot be shown: %s", problem)
        return b""
    except (ForgedEvidence, MalformedEvidence) as problem:
        _LOG.warning("sealring: the list of measured files is not shown: %s", problem)
        return b""
    if len(log) > MAX_BYTES:
        _LOG.warning(
            "sealring: the list of measured files has %d bytes, and more than %d are not shown: "
            "measure fewer files (IMA's own policy)", len(log), MAX_BYTES,
        )  # fmt: skip
        return b""
    return log


def _sized(data: bytes, at: int) -> tuple[bytes, int]:
    """Bytes after their own length, and where they end. Faster than a Cursor: lists are long."""
    start = at + 4
    end = start + int.from_bytes(data[at:start], "little")
    if start > len(data) or end > len(data):
        raise MalformedEvidence(f"the IMA list is cut: a field at {at} is not whole")
    return data[start:end], end


def _read(data: bytes, fields: int) -> tuple[str, str]:
    digest, at = _sized(data, 0)
    path, at = _sized(data, at)
    if fields > 2:
        _, at = _sized(data, at)
    if at != len(data):
        raise MalformedEvidence("an entry of the IMA list has more than its template's fields")
    if not path or path.find(b"\0") != len(path) - 1:
        raise MalformedEvidence("a path in the IMA list does not end as one")
    return path[:-1].decode("utf-8", "backslashreplace"), _digest(digest)


def _digest(field: bytes) -> str:
    name, _, raw = field.partition(b":\0")
    if _BARE.get(name) == len(raw):
        return raw.hex()
    if name in _BARE or not _ALGORITHM.fullmatch(name) or not 16 <= len(raw) <= 64:
        raise MalformedEvidence("a digest in the IMA list is not one")
    return f"{name.decode()}:{raw.hex()}"


def _aggregates(pcrs: Mapping[int, bytes], bank: int) -> set[str]:
    """The boot aggregate's possible values: kernels hash PCRs 0 to 7, or 0 to 9."""
    return {
        _HASHES[bank](b"".join(pcrs[pcr] for pcr in range(count))).hexdigest()
        for count in (8, 10)
        if all(pcr in pcrs for pcr in range(count))
    }


_SHOWN: Final = 5


@dataclass(frozen=True, slots=True)
class ImaRules:
    """Which files may have been measured since boot."""

    files: Mapping[str, frozenset[str]]
    """The digests that each path may have."""
    exclude: frozenset[str]
    """Paths that are not checked. A path with a slash at its end is a directory."""
    violations: bool
    """False: a file that changed while it was measured or in use is refused."""

    @property
    def digest(self) -> str:
        """A digest that is equal for equal rules. A certificate names with it the rules by which
        the files were judged, because the list of files does not fit into it."""
        files = {path: sorted(digests) for path, digests in self.files.items()}
        text = json.dumps([files, sorted(self.exclude), self.violations], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def admits(self, path: str, digests: tuple[str, ...]) -> bool:
        if any(path == one or (one.endswith("/") and path.startswith(one)) for one in self.exclude):
            return True
        return set(digests) <= self.files.get(path, frozenset())


def _read_rules(table: Table, name: str) -> ImaRules | None:
    """Reads the rules. None if the policy has no such table."""
    found = table.inner(name, known=("files", "exclude"))
    if name not in table.values:
        return None
    files = some(digest_lists(None, *_BARE.values()))(found, "files")
    exclude = words(longest=1024)(found, "exclude")
    for path in exclude:
        if not path.startswith("/") or path == "/":
            raise found.bad("exclude", f"holds {path!r}; it lists /a/file or /a/directory/")
    violations = "ima_violations" in table.values.get("unchecked", ())
    return ImaRules(files, exclude, violations)


class _Ima(Rule):
    refusal = "policy.measurement_not_allowed"

    def judge(self, rules: Rules, worker: DescribedWorker) -> Iterable[Finding]:
        ima: ImaRules | None = rules["ima"]
        if ima is None:
            return
        yield "ima", *_files_pass(ima, worker)
        if not ima.violations and (worker.ima_rules or worker.ima_entries):
            count = worker.ima_violations
            yield "ima violations", not count, "none", str(count)

    def weak(self, rules: Rules) -> Iterable[str]:
        if rules["ima"] is not None and rules["ima"].exclude:
            listed = ", ".join(sorted(rules["ima"].exclude))
            yield f"ima.exclude: any file passes that is measured as one of {listed}."

    def write(self, workers: Workers) -> Any:
        """The files that all workers have measured since boot.

        None if a worker shows no files, or digests of an algorithm that no policy can list.
        """
        every = [digest for one in workers for found in one.ima_files.values() for digest in found]
        if not all(one.ima_entries for one in workers) or any(":" in digest for digest in every):
            return None
        files: dict[str, list[str]] = {}
        for one in workers:
            for path, digests in one.ima_files.items():
                files.setdefault(path, []).extend(digests)
        return {"files": {path: distinct(found) for path, found in sorted(files.items())}}

    def opened(self, workers: Workers) -> list[str]:
        violated = self.write(workers) and any(one.ima_violations for one in workers)
        return ["ima_violations"] if violated else []


def _files_pass(ima: ImaRules, worker: DescribedWorker) -> tuple[bool, str, str]:
    wanted = f"only files of {len(ima.files)} listed"
    if worker.ima_rules:
        # A certificate's claim: its broker saw the list and judged it by rules with this digest.
        same = worker.ima_rules == ima.digest
        return same, wanted, f"judged by {'the same' if same else 'other'} rules"
    if not worker.ima_entries:
        return False, wanted, "no list of measured files"
    others = [path for path, digests in worker.ima_files.items() if not ima.admits(path, digests)]
    listed = ", ".join(f"{path} ({worker.ima_files[path][-1]})" for path in others[:_SHOWN])
    more = f" and {len(others) - _SHOWN} more" if len(others) > _SHOWN else ""
    return not others, wanted, f"{worker.ima_entries} entries, others: {listed or 'none'}{more}"


_COMMENT: Final = "The files that may be measured from boot on. Compare them with your own build."
IMA: Final = _Ima("ima", _read_rules, _COMMENT)
IMA_NEEDS: Final = (
    Need("ima", "whatever files ran after the boot pass"),
    Need(
        "ima_violations",
        "files pass that were written while they were measured or in use",
        only_with="ima",
        holds=True,
    ),
)
