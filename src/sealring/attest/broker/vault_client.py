"""A worker's side of the broker's records of vaults."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from sealring.attest.broker.client import answer_of
from sealring.attest.broker.enrolment import this_worker
from sealring.attest.broker.messages import (
    PAGE,
    READ,
    READ_PROOF,
    RECORD,
    RECORD_PROOF,
    write_signed,
)
from sealring.attest.broker.tls import Client
from sealring.core.hooks import VaultEntry
from sealring.core.identity.names import WorkerName
from sealring.errors import BrokerError, ConfigurationError
from sealring.formats.strict import strictly


@dataclass(frozen=True, slots=True)
class Answered:
    """A page of what the broker knows."""

    key: int
    generation: int
    entries: list[VaultEntry]


@dataclass(frozen=True, slots=True)
class Recorded:
    key: int
    generation: int
    entry: VaultEntry | None


class RecordsOfVault:
    """What the broker keeps of one vault, asked and told in this worker's name."""

    def __init__(self, vault: str) -> None:
        self._vault = vault

    def read(self) -> Answered:
        return this_worker().ask(lambda name, key: AskVault(name, key, self._vault))

    def record(self, key: int, generation: int, entry: VaultEntry | None) -> Answered:
        recorded = this_worker().ask(
            lambda name, own: TellVault(name, own, self._vault, key, generation, entry)
        )
        entries = [] if recorded.entry is None else [recorded.entry]
        return Answered(recorded.key, recorded.generation, entries)


@dataclass(frozen=True, slots=True)
class AskVault:
    """Reads all records of a vault, page by page."""

    name: WorkerName
    key: Ed25519PrivateKey
    vault: str

    async def run(self, client: Client, where: str) -> Answered:
        entries: list[VaultEntry] = []
        while True:
            ask = {"vault": self.vault, "after": entries[-1].object if entries else ""}
            body = write_signed(self.name, self.key, READ_PROOF, {"ask": ask})
            answer = answer_of(await client.ask("POST", READ, body), where)
            page: Answered = _strictly(Answered, answer, where)
            if entries and page.entries and page.entries[0].object <= entries[-1].object:
                raise BrokerError(
                    f"the broker at {where} repeats records of a vault",
                    code="broker.malformed_answer",
                )
            entries += page.entries
            if len(page.entries) < PAGE:
                return Answered(page.key, page.generation, entries)


@dataclass(frozen=True, slots=True)
class TellVault:
    """Records the newest header and, where there is one, the newest version of an object."""

    name: WorkerName
    key: Ed25519PrivateKey
    vault: str
    number: int
    generation: int
    entry: VaultEntry | None

    async def run(self, client: Client, where: str) -> Recorded:
        ask = {
            "vault": self.vault,
            "key": self.number,
            "generation": self.generation,
            "entry": None if self.entry is None else asdict(self.entry),
        }
        body = write_signed(self.name, self.key, RECORD_PROOF, {"ask": ask})
        answer = answer_of(await client.ask("POST", RECORD, body), where)
        if isinstance(answer.get("entry"), dict) and self.entry is not None:
            answer["entry"] = {"object": self.entry.object, **answer["entry"]}
        recorded: Recorded = _strictly(Recorded, answer, where)
        return recorded


def _strictly(kind: Any, answer: dict[str, Any], where: str) -> Any:
    try:
        return strictly(kind, answer, where, "record of a vault")
    except ConfigurationError as problem:
        raise BrokerError(
            f"the broker at {where} gave no record of a vault: {problem}",
            code="broker.malformed_answer",
        ) from None
