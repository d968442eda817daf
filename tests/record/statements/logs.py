"""Logs for tests, which are made in a folder, read back and damaged."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from sealring.formats.log.checkpoints import Checkpoint, SignedCheckpoint, open_checkpoint
from sealring.formats.log.folder import LogWriter, StoredTree, create_log, read_checkpoint
from sealring.formats.log.notes import Note, SignatureKind, Signer
from sealring.formats.log.policy import Log, LogPolicy
from tests.record.statements import slow

ORIGIN = "example.com/log"


def numbered(count: int, first: int = 0) -> list[bytes]:
    return [b"entry %d" % number for number in range(first, first + count)]


def signed_note(signer: Signer, entries: list[bytes]) -> bytes:
    """Return a signed checkpoint over these entries, computed by the slow implementation."""
    text = Checkpoint(signer.name, len(entries), slow.mth(entries)).encode()
    return Note(text, (signer.sign(text),)).encode()


@dataclass(frozen=True)
class LocalLog:
    folder: Path
    signer: Signer
    remembered: Path

    @property
    def policy(self) -> LogPolicy:
        return LogPolicy((Log(self.signer.verifier),))

    def writer(self) -> LogWriter:
        return LogWriter(self.folder, self.signer, self.remembered)

    def append(self, entries: Iterable[bytes]) -> range:
        with self.writer() as writer:
            return writer.append(entries)

    def opened(self) -> SignedCheckpoint:
        return open_checkpoint(read_checkpoint(self.folder), self.policy)

    def tree(self) -> StoredTree:
        return StoredTree(self.folder, self.opened().size)

    def check(self) -> int:
        """Read the whole log and check it. Return its size."""
        signed = self.opened()
        StoredTree(self.folder, signed.size).check_all(signed.root)
        return signed.size

    def entries(self) -> list[bytes]:
        return list(self.tree().entries())


def new_log(folder: Path, entries: Iterable[bytes] = ()) -> LocalLog:
    signer = Signer.generate(ORIGIN, SignatureKind.NOTE)
    log = LocalLog(folder / "log", signer, folder / "remembered")
    create_log(log.folder, signer)
    log.append(entries)
    return log
