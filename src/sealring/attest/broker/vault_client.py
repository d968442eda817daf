"""A worker's side of the broker's records of vaults."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from sealring.attest.broker.client import Conversation, answer_of
from sealring.attest.broker.enrolment import this_worker
from sealring.attest.broker.messages import (
    PAGE,
    READ,
    READ_PROOF,
    RECORD,
    RECORD_PROOF,
    write_signed,
)
from sealring.attest.broker.refusals import malformed
from sealring.attest.broker.tls import Client
from sealring.core.hooks import VaultEntry
from sealring.core.identity.names import WorkerName
from sealring.errors import ConfigurationError
from sealring.formats.strict import strictly


@dataclass(frozen=True, slots=True)
class Answered:
    """What the broker knows of a vault: a page of it, or what it recorded just now."""

    key: int
    generation: int
    entries: list[VaultEntry]


class RecordsOfVault:
    """What the broker keeps of one vault, asked and told in this worker's name."""

    def __init__(self, vault: str) -> None:
        self._vault = vault

    def read(self) -> Answered:
        return this_worker().ask(lambda name, own: ask_vault(name, own, self._vault))

    def record(self, key: int, generation: int, entry: VaultEntry | None) -> Answered:
        return this_worker().ask(
            lambda name, own: tell_vault(name, own, self._vault, key, generation, entry)
        )


def ask_vault(name: WorkerName, key: Ed25519PrivateKey, vault: str) -> Conversation[Answered]:
    """Reads all records of a vault, page by page."""

    async def run(client: Client, where: str) -> Answered:
        entries: list[VaultEntry] = []
        while True:
            asked = {"vault": vault, "after": entries[-1].object if entries else ""}
            body = write_signed(name, key, READ_PROOF, asked)
            page = _answered(answer_of(await client.ask("POST", READ, body), where), where)
            if entries and page.entries and page.entries[0].object <= entries[-1].object:
                raise malformed(where, "repeats records of a vault")
            entries += page.entries
            if len(page.entries) < PAGE:
                return Answered(page.key, page.generation, entries)

    return run


def tell_vault(
    name: WorkerName,
    key: Ed25519PrivateKey,
    vault: str,
    number: int,
    generation: int,
    entry: VaultEntry | None,
) -> Conversation[Answered]:
    """Records the newest header and, where there is one, the newest version of an object."""
    told = {
        "vault": vault,
        "key": number,
        "generation": generation,
        "entry": None if entry is None else asdict(entry),
    }

    async def run(client: Client, where: str) -> Answered:
        body = write_signed(name, key, RECORD_PROOF, told)
        return _answered(answer_of(await client.ask("POST", RECORD, body), where), where)

    return run


def _answered(answer: dict[str, Any], where: str) -> Answered:
    try:
        answered: Answered = strictly(Answered, answer, where, "record of a vault")
    except ConfigurationError as problem:
        raise malformed(where, f"gave no record of a vault: {problem}") from None
    return answered
