"""The kernel's list of the files that it measured since boot (IMA), replayed against PCR 10.

The form of /sys/kernel/security/ima/binary_runtime_measurements, little-endian:

    PCR (4) | SHA-1 of the data (20) | length, template's name | length, data

The data is the template's fields, each after its length: `d-ng` (algorithm, ":", NUL, digest),
`n-ng` (path, NUL), and for some templates one more. The PCR was extended with the data's hash in
its own bank (Linux 5.8 and later). The list is not signed: what it says counts only as far as it
leads to the PCR that the TPM signed. It grows while it is read, so it may hold more than that:
entries behind the one that leads to the quoted value are not evidence, and not looked at.

A violation is a file that was written while it was measured or in use. Its entry has zeros in the
place of the hash, and the PCR was extended with ones: the path that it names is nobody's word.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from sealring.errors import ForgedEvidence, MalformedEvidence, UnknownEvidence
from sealring.identity.attestation.cursor import Cursor
from sealring.identity.attestation.tpm.structures import BANKS, SHA256, SHA384

IMA_LOG: Final = Path("/sys/kernel/security/ima/binary_runtime_measurements")
PCR: Final = 10
MAX_BYTES: Final = 320 << 10
"""Of a list that a worker sends: what fits into evidence, with all else that it holds."""
_MAX_ENTRIES: Final = 8192
_SHA1_BYTES: Final = 20
_HASHES: Final = {SHA256: "sha256", SHA384: "sha384"}
_FIELDS: Final = {b"ima-ng": 2, b"ima-sig": 3, b"ima-buf": 3}
"""The templates that are known, and how many fields each has: the first two are d-ng and n-ng."""
_ALGORITHM: Final = re.compile(rb"[a-z0-9-]{1,16}")
_BARE: Final = {"sha256": 32, "sha384": 48, "sha512": 64}
"""Digests that a policy can list, told apart by their size."""
_BOOT_AGGREGATE: Final = "boot_aggregate"
_LOG = logging.getLogger("sealring")


@dataclass(frozen=True, slots=True)
class Entry:
    path: str
    digest: str
    """Hexadecimal; with the algorithm's name in front where a policy cannot list it."""
    data: bytes
    violation: bool
    end: int
    """Where the entry ends in the list."""


@dataclass(frozen=True, slots=True)
class Measured:
    """What PCR 10 was extended with, as a list shows that replays to it."""

    entries: int
    violations: int
    files: Mapping[str, tuple[str, ...]]
    """The digests that each path was measured with, in order. Without the boot aggregate, if it is
    the hash of the quoted PCRs."""
    end: int
    """How many bytes of the list lead to the quoted value."""


def read_entries(log: bytes) -> Iterator[Entry]:
    """One after the other: what is behind the entries that a caller wants is not looked at."""
    cursor = Cursor(log, "the IMA list", "little")
    for _ in range(_MAX_ENTRIES):
        if not cursor.left:
            return
        if (pcr := cursor.number(4)) != PCR:
            raise UnknownEvidence(f"the IMA list has an entry for PCR {pcr}, not {PCR}")
        violation = not any(cursor.take(_SHA1_BYTES))
        template = cursor.sized(4)
        if template not in _FIELDS:
            name = template[:16].decode("ascii", "replace")
            raise UnknownEvidence(f"the IMA list has an entry of template {name!r}, not known")
        data = cursor.sized(4)
        path, digest = _read(data, _FIELDS[template])
        yield Entry(path, digest, data, violation, cursor.at)
    raise MalformedEvidence(f"the IMA list has more than {_MAX_ENTRIES} entries")


def replay_ima(log: bytes, pcrs: Mapping[int, bytes], bank: int = SHA256) -> Measured:
    """What the list shows, if it leads to the value of PCR 10 among `pcrs`."""
    hashed = _HASHES[bank]
    value, quoted = bytes(BANKS[bank]), pcrs.get(PCR)
    files: dict[str, list[str]] = {}
    violations = 0
    for count, entry in enumerate(read_entries(log), 1):
        if entry.violation:
            extended = b"\xff" * BANKS[bank]
            violations += 1
        else:
            extended = hashlib.new(hashed, entry.data).digest()
            if entry.path != _BOOT_AGGREGATE or entry.digest not in _aggregates(pcrs, hashed):
                digests = files.setdefault(entry.path, [])
                if entry.digest not in digests:
                    digests.append(entry.digest)
        value = hashlib.new(hashed, value + extended).digest()
        if value == quoted:
            found = {path: tuple(digests) for path, digests in files.items()}
            return Measured(count, violations, found, entry.end)
    raise ForgedEvidence(f"the IMA list does not lead to the value of PCR {PCR}")


def matching_ima(pcrs: Mapping[int, bytes], bank: int, path: Path = IMA_LOG) -> bytes:
    """This machine's list, as far as it leads to the quoted value; empty where there is none."""
    try:
        log = path.read_bytes()
        log = log[: replay_ima(log, pcrs, bank).end]
    except OSError as problem:
        _LOG.warning("sealring: the list of measured files cannot be shown: %s", problem)
        return b""
    except (ForgedEvidence, MalformedEvidence, UnknownEvidence) as problem:
        _LOG.warning("sealring: the list of measured files is not shown: %s", problem)
        return b""
    if len(log) > MAX_BYTES:
        _LOG.warning(
            "sealring: the list of measured files has %d bytes, and more than %d are not shown: "
            "measure fewer files (IMA's own policy)", len(log), MAX_BYTES,
        )  # fmt: skip
        return b""
    return log


def _read(data: bytes, fields: int) -> tuple[str, str]:
    cursor = Cursor(data, "an entry of the IMA list", "little")
    digest, path = cursor.sized(4), cursor.sized(4)
    for _ in range(fields - 2):
        cursor.sized(4)
    cursor.end()
    if not path or path.find(b"\0") != len(path) - 1:
        raise MalformedEvidence("a path in the IMA list does not end as one")
    name, _, raw = digest.partition(b":\0")
    if not _ALGORITHM.fullmatch(name) or not 16 <= len(raw) <= 64:
        raise MalformedEvidence("a digest in the IMA list is not one")
    algorithm = name.decode()
    if _BARE.get(algorithm, len(raw)) != len(raw):
        raise MalformedEvidence(f"a digest in the IMA list is not one of {algorithm}")
    told = raw.hex() if algorithm in _BARE else f"{algorithm}:{raw.hex()}"
    return path[:-1].decode("utf-8", "backslashreplace"), told


def _aggregates(pcrs: Mapping[int, bytes], hashed: str) -> set[str]:
    """The hash of what was booted, as kernels compute it: of PCRs 0 to 7, or 0 to 9."""
    return {
        hashlib.new(hashed, b"".join(pcrs[pcr] for pcr in range(count))).hexdigest()
        for count in (8, 10)
        if all(pcr in pcrs for pcr in range(count))
    }
