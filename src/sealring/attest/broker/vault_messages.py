"""What workers ask of the broker's records of vaults: JSON, signed by the worker's attested key.

POST /sealring/v0/vault/read    {"worker", "ask", "signature"}, ask: {"vault", "after"}
POST /sealring/v0/vault/record  the same, ask: {"vault", "key", "generation", "entry"}

A request needs no nonce: to repeat one changes nothing, because records only grow, and the answer
goes through TLS to the client that asked.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import Any, Final

from sealring.attest.broker.messages import check_signed, exactly, parse_json
from sealring.core.hooks import VaultEntry
from sealring.core.identity.names import WorkerName
from sealring.errors import MalformedRequest

READ: Final = "/sealring/v0/vault/read"
RECORD: Final = "/sealring/v0/vault/record"
PAGE: Final = 1000
"""Objects in one answer."""
READ_PROOF: Final = b"sealring-1 vault read\0"
RECORD_PROOF: Final = b"sealring-1 vault record\0"
_ID: Final = re.compile(r"[0-9a-f]{32}")
_DIGEST: Final = re.compile(r"[0-9a-f]{64}")
_LARGEST: Final = 1 << 62


@dataclass(frozen=True, slots=True)
class ReadVault:
    name: WorkerName
    key: str
    """The digest of the worker's public key."""
    vault: str
    after: str
    """The id of the last object that is known already; empty at first."""


@dataclass(frozen=True, slots=True)
class RecordVault:
    name: WorkerName
    key: str
    vault: str
    number: int
    """Of the vault's key."""
    generation: int
    entry: VaultEntry | None


def parse_read(data: bytes) -> ReadVault:
    name, key, ask = _opened(data, READ_PROOF)
    fields = exactly(ask, "vault", "after")
    after = fields["after"]
    return ReadVault(name, key, _id(fields["vault"]), after if after == "" else _id(after))


def parse_record(data: bytes) -> RecordVault:
    name, key, ask = _opened(data, RECORD_PROOF)
    fields = exactly(ask, "vault", "key", "generation", "entry")
    given, entry = fields["entry"], None
    if given is not None:
        entry = VaultEntry(**exactly(given, "object", "version", "manifest"))
        _id(entry.object)
        _number(entry.version)
        if not isinstance(entry.manifest, str) or not _DIGEST.fullmatch(entry.manifest):
            raise MalformedRequest("a manifest's digest is a SHA-256 in hex")
    vault, number = _id(fields["vault"]), _number(fields["key"])
    return RecordVault(name, key, vault, number, _number(fields["generation"]), entry)


def _opened(data: bytes, proof: bytes) -> tuple[WorkerName, str, Any]:
    fields = exactly(parse_json(data), "worker", "ask", "signature")
    name, public_key = check_signed(fields, proof)
    return name, hashlib.sha256(public_key).hexdigest(), fields["ask"]


def _id(value: Any) -> str:
    if not isinstance(value, str) or not _ID.fullmatch(value):
        raise MalformedRequest("the id of a vault or of an object is 16 bytes in hex")
    return value


def _number(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= _LARGEST:
        raise MalformedRequest("a key's number, a generation and a version count from 0")
    return value
