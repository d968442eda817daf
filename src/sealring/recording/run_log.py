"""The run's transparency log, which rank 0 keeps: every statement in the folder is an entry."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Final

from cryptography import x509

from sealring.errors import SealringError
from sealring.identity.private_files import write_public
from sealring.provenance.envelopes import is_of_worker
from sealring.provenance.intervals import Interval
from sealring.provenance.notes import Kind, Signer
from sealring.provenance.runs import RunFolder
from sealring.provenance.statements import statement_digest, verify_statement
from sealring.provenance.writer import LogWriter, create_log, read_signer, write_signer

_WAIT_SECONDS: Final = 30.0
_POLL_SECONDS: Final = 0.1


class RunLog:
    def __init__(
        self,
        run: RunFolder,
        authorities: Sequence[x509.Certificate],
        refused: Callable[[str, SealringError], None],
    ) -> None:
        """`refused` is told of statements that are not logged, once each."""
        self._run = run
        self._authorities = authorities
        self._refused = refused
        self._names: set[str] = set()
        self._logged: set[str] = set()
        self.final: set[int] = set()
        """Ranks whose final statement is in the log."""
        self._open()

    def _open(self) -> None:
        run = self._run
        if not run.key.exists():
            signer = Signer.generate(f"sealring.run/{run.head.run}", Kind.NOTE)
            write_signer(run.key, signer)
            write_public(run.vkey, f"{signer.verifier.encode()}\n".encode())
        self._signer = read_signer(run.key)
        if not run.log.exists():
            create_log(run.log, self._signer)
        with self._writer() as log:
            for entry in log.stored.entries():
                self._note(statement_digest(entry), entry)

    def append_new(self) -> None:
        """Logs the statements in the folder that are not in the log, if they are valid today.

        An owner's are logged as they are: their readers are given the owner's key, and this rank
        is not.
        """
        found, now = {}, datetime.now(UTC)
        for name in self._run.statement_names():
            if name in self._names:
                continue
            envelope = self._run.read_statement(name)
            try:
                if is_of_worker(envelope):
                    verify_statement(envelope, self._authorities, now)
            except SealringError as problem:
                self._names.add(name)
                self._refused(name, problem)
            else:
                found[name] = envelope
        new = [one for one in found.values() if statement_digest(one) not in self._logged]
        if new:
            with self._writer() as log:
                log.append(new)
        for envelope in new:
            self._note(statement_digest(envelope), envelope)
        self._names.update(found)

    def wait_for_all(self, world: int, patience: float) -> list[int]:
        """Logs until every rank's final statement is there; the ranks of which none came."""
        until = time.monotonic() + patience
        while True:
            self.append_new()
            missing = [rank for rank in range(world) if rank not in self.final]
            if not missing or time.monotonic() >= until:
                return missing
            time.sleep(_POLL_SECONDS)

    def _note(self, digest: str, envelope: bytes) -> None:
        self._logged.add(digest)
        try:
            found = verify_statement(envelope, self._authorities)
        except SealringError:
            return  # an owner's, or of another authority: not a rank of this job
        if isinstance(found.content, Interval) and found.content.final and found.worker is not None:
            self.final.add(found.worker.rank)

    def _writer(self) -> LogWriter:
        remembered = self._run.key.with_name(f"{self._run.key.name}.signed")
        return LogWriter(self._run.log, self._signer, remembered, wait=_WAIT_SECONDS)
