"""The log of what a broker decided. Every entry commits to the one before, and is signed.

hash(n) = SHA-256(entry n, as canonical JSON, with hash(n - 1) in it as "before")

An attacker who changes, drops or inserts an entry must sign all later ones anew and needs the
broker's key. Cutting off the end leaves a log that looks whole: note `audit/head` elsewhere now and
then (`sealring broker audit` prints it), and hold the log against it with `--head`.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from sealring.broker.store import Row, View
from sealring.errors import BrokenAuditLog

PREFIX: Final = "audit/"
HEAD: Final = "audit/head"
START: Final = "0" * 64


@dataclass(frozen=True, slots=True)
class Head:
    number: int
    digest: str


def append(view: View, key: Ed25519PrivateKey, now: float, event: str, facts: Row) -> None:
    head = view.get(HEAD) or {"number": 0, "digest": START}
    entry = {
        "number": head["number"] + 1,
        "time": round(now, 3),
        "event": event,
        **facts,
        "before": head["digest"],
    }
    digest = _digest(entry)
    signature = base64.b64encode(key.sign(bytes.fromhex(digest))).decode()
    view.put(f"{PREFIX}{entry['number']:012d}", {"entry": entry, "signature": signature})
    view.put(HEAD, {"number": entry["number"], "digest": digest})


def check(view: View, key: Ed25519PublicKey, noted: str | None = None) -> tuple[Head, list[Row]]:
    """The whole log, if it is whole; BrokenAuditLog says where it is not."""
    head = view.get(HEAD) or {"number": 0, "digest": START}
    rows = [row for name, row in view.scan(PREFIX, "0") if name != HEAD]
    entries = list(_checked(rows, key))
    last = _digest(entries[-1]) if entries else START
    if (len(entries), last) != (head["number"], head["digest"]):
        raise BrokenAuditLog(
            f"the log ends at entry {len(entries)} and its head is {head['number']}: entries were "
            "cut off or added"
        )
    if noted is not None and noted not in {START, *(_digest(entry) for entry in entries)}:
        raise BrokenAuditLog("the head that was noted earlier is not in this log: it was rewritten")
    return Head(len(entries), last), entries


def _checked(rows: Iterable[Row], key: Ed25519PublicKey) -> Iterable[Row]:
    before = START
    for number, row in enumerate(rows, 1):
        try:
            entry = row["entry"]
            if entry["number"] != number or entry["before"] != before:
                raise BrokenAuditLog(f"entry {number} of the log does not follow the one before it")
            before = _digest(entry)
            key.verify(base64.b64decode(row["signature"]), bytes.fromhex(before))
        except (InvalidSignature, KeyError, TypeError, ValueError):
            raise BrokenAuditLog(f"entry {number} of the log is not what was written") from None
        yield entry


def _digest(entry: Row) -> str:
    return hashlib.sha256(
        json.dumps(entry, sort_keys=True, separators=(",", ":")).encode()
    ).hexdigest()
