"""The run's transparency log, which rank 0 keeps: every statement in the folder is an entry."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Final

from cryptography import x509

from sealring.errors import ConfigurationError, MalformedRun, SealringError
from sealring.formats.files import write_public
from sealring.formats.log.folder import CHECKPOINT, LogWriter, create_log
from sealring.formats.log.notes import Kind, Signer
from sealring.formats.signed import parse_envelope
from sealring.record.provenance.owners import read_signer, write_signer
from sealring.record.provenance.runs import RunFolder, log_of_run
from sealring.record.provenance.statements import (
    VerifiedStatement,
    of_another_run,
    statement_digest,
    verify_statement,
)
from sealring.record.recording.chain import interval_of, place_of, rank_of, statement_name

_WAIT_SECONDS: Final = 30.0
_POLL_SECONDS: Final = 0.1
_MAX_OWNERS_STATEMENTS: Final = 1024
_LOG: Final = logging.getLogger("sealring")


class RunLog:
    def __init__(self, run: RunFolder, authorities: Sequence[x509.Certificate]) -> None:
        self._run = run
        self._authorities = authorities
        self._names: set[str] = set()
        self._passed_over: dict[str, tuple[int, int]] = {}
        """Files that were not logged, by name. A rank may replace a stranger's by its own."""
        self._logged: set[str] = set()
        self._owners: set[str] = set()
        """What is logged and comes without a worker's certificate."""
        self.final: set[int] = set()
        """Ranks whose final statement is in the log."""
        self._newest: dict[int, tuple[int, set[str]]] = {}
        """Of each rank, the last number that is in the log, and the statements that have it."""
        self._open()

    def _open(self) -> None:
        run = self._run
        if not run.key.exists():
            signer = Signer.generate(log_of_run(run.head.run), Kind.NOTE)
            write_signer(run.key, signer)
        self._signer = read_signer(run.key)
        if self._signer.name != log_of_run(run.head.run):
            raise ConfigurationError(
                f"{run.key} is the key of the log {self._signer.name}, and not of run "
                f"{run.head.run}: one key must not sign two logs. Move it away"
            )
        if not run.vkey.exists():
            write_public(run.vkey, f"{self._signer.verifier.encode()}\n".encode())
        if not (run.log / CHECKPOINT).exists():
            create_log(run.log, self._signer)
        with self._writer() as log:
            for entry in log.stored.entries():
                self._note(statement_digest(entry), entry)

    def require_newest(self) -> None:
        """MalformedRun unless the folder has each rank's last statement that is in the log.

        A rank goes on after the last one that it finds, and would sign that number again.
        """
        for rank, (sequence, digests) in sorted(self._newest.items()):
            name = statement_name(rank, sequence)
            present = self._run.statement_path(name).exists()
            if not present or statement_digest(self._run.read_statement(name)) not in digests:
                raise MalformedRun(
                    f"statement {sequence} of rank {rank} is in the log of {self._run.path}, and "
                    f"not in statements/{name}.dsse.json: it was removed or exchanged. Restore it"
                )

    def append_new(self) -> None:
        """Logs the statements in the folder that are not in the log, if they are valid today.

        Anybody who can write to the folder can put anything there: what cannot be read or is not
        valid is passed over. One warning names the first of them and says how many more there are.

        An owner's are logged as they are: their readers are given the owner's key, and this rank
        is not.
        """
        found, refused, now = {}, [], datetime.now(UTC)
        for name in self._run.statement_names():
            if name in self._names or (file := _file_of(self._run, name)) is None:
                continue
            if self._passed_over.get(name) == file:
                continue
            try:
                envelope = self._run.read_statement(name)
                if parse_envelope(envelope).certificate is not None:
                    self._require_ours(name, verify_statement(envelope, self._authorities, now))
                else:
                    self._count_owners(envelope)
            except SealringError as problem:
                self._passed_over[name] = file
                refused.append((name, problem))
            else:
                found[name] = envelope
        if refused:
            more = f"; nor are {len(refused) - 1} more" if len(refused) > 1 else ""
            _LOG.warning("sealring: the statement %s is not logged: %s%s", *refused[0], more)
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
            if parse_envelope(envelope).certificate is None:
                self._owners.add(digest)
                return
            found = verify_statement(envelope, self._authorities)
        except SealringError:
            return  # of another authority: not a rank of this job
        stated, rank = interval_of(self._run, found), rank_of(found)
        if stated is None or rank is None:
            return
        if stated.final:
            self.final.add(rank)
        last, digests = self._newest.get(rank, (-1, set()))
        if stated.sequence > last:
            self._newest[rank] = (stated.sequence, {digest})
        elif stated.sequence == last:
            digests.add(digest)

    def _count_owners(self, envelope: bytes) -> None:
        """A stranger's looks like an owner's here, so their number is limited."""
        digest = statement_digest(envelope)
        if len(self._owners) >= _MAX_OWNERS_STATEMENTS and digest not in self._owners:
            raise MalformedRun(
                f"the log has {_MAX_OWNERS_STATEMENTS} statements without a worker's certificate, "
                "and takes no more: if strangers wrote them, keep them away from the folder"
            )
        self._owners.add(digest)

    def _require_ours(self, name: str, found: VerifiedStatement) -> None:
        """Of this run, and under its own name: a rank looks for its last statement by name."""
        head = self._run.head
        if strange := of_another_run(found, head.run, head.job):
            raise MalformedRun(f"it is {strange}, and this is run {head.run} of job {head.job}")
        stated, rank = interval_of(self._run, found), rank_of(found)
        if stated is not None and rank is not None and place_of(name) != (rank, stated.sequence):
            number = stated.sequence
            raise MalformedRun(f"it is statement {number} of rank {rank}, under another name")

    def _writer(self) -> LogWriter:
        remembered = self._run.key.with_name(f"{self._run.key.name}.signed")
        return LogWriter(self._run.log, self._signer, remembered, wait=_WAIT_SECONDS)


def _file_of(run: RunFolder, name: str) -> tuple[int, int] | None:
    """What tells the file apart from another one under its name; None if there is none."""
    try:
        status = os.lstat(run.statement_path(name))
    except OSError:
        return None
    return status.st_ino, status.st_ctime_ns
