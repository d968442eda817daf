"""Statements on the disk: each rank's chain of them, and the run's transparency log.

A rank's statements are numbered, and each names the one before it. Each is on the disk before the
next one is made. So a worker that is killed leaves its earlier statements valid, and when it is
started again it continues the chain. Rank 0 keeps the log, which has an entry for every statement
in the folder.
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Final

from cryptography import x509

from sealring.core.identity.credentials import Credentials
from sealring.errors import ConfigurationError, MalformedRun, SealringError
from sealring.formats.files import write_public
from sealring.formats.log.folder import CHECKPOINT, LogWriter, create_log
from sealring.formats.log.notes import SignatureKind, Signer
from sealring.formats.signed import parse_envelope
from sealring.record.statements.forms import Interval
from sealring.record.statements.run_folder import RunFolder, log_of_run
from sealring.record.statements.signing import (
    VerifiedStatement,
    of_another_run,
    read_signer,
    sign_statement,
    statement_digest,
    verify_statement,
    write_signer,
)

# ---- a rank's chain


_NAME: Final = re.compile(r"rank-([0-9]{5,})-([0-9]{8,})")


def statement_name(rank: int, sequence: int) -> str:
    return f"rank-{rank:05}-{sequence:08}"


def place_of(name: str) -> tuple[int, int] | None:
    """The (rank, sequence) in the name of a statement's file. None if no chain uses such a name."""
    found = _NAME.fullmatch(name)
    return None if found is None else (int(found[1]), int(found[2]))


def interval_of(run: RunFolder, found: VerifiedStatement) -> Interval | None:
    """The interval that a statement of this run is about. None if it is about something else."""
    if of_another_run(found, run.head.run, run.head.job):
        return None
    return found.content if isinstance(found.content, Interval) else None


def rank_of(found: VerifiedStatement) -> int | None:
    return None if found.worker is None else found.worker.rank


class StatementChain:
    def __init__(self, run: RunFolder, credentials: Callable[[], Credentials]) -> None:
        """`credentials` is called for each statement, because a broker renews certificates."""
        self._run = run
        self._credentials = credentials
        self.sequence = 0
        self.previous: str | None = None
        self.next_step = 0
        self._load(credentials())

    def _load(self, own: Credentials) -> None:
        places = [place for name in self._run.statement_names() if (place := place_of(name))]
        mine = [sequence for rank, sequence in places if rank == own.rank]
        if not mine:
            return
        name = statement_name(own.rank, max(mine))
        try:
            envelope = self._run.read_statement(name)
            found = verify_statement(envelope, own.authorities)
        except SealringError as problem:
            # The statement may be this rank's own, under an earlier authority or of a later
            # sealring. If it were ignored, the rank would sign the same number again.
            raise MalformedRun(
                f"{self._run.statement_path(name)} has the name of the last statement of rank "
                f"{own.rank}, and the run cannot go on after it: {problem}. If this run did not "
                "write it, remove it"
            ) from None
        last = interval_of(self._run, found)
        # A name proves nothing, because the disk's owner can put any statement there.
        if last is None or (rank_of(found), last.sequence) != (own.rank, max(mine)):
            raise MalformedRun(
                f"{self._run.statement_path(name)} is not statement {max(mine)} of rank {own.rank} "
                f"in run {self._run.head.run}: another one was put in its place"
            )
        if last.final:
            raise ConfigurationError(
                f"{self._run.path} holds a run that has ended: choose another folder"
            )
        self.sequence = last.sequence + 1
        self.previous = statement_digest(envelope)
        self.next_step = last.end_step

    def append(self, interval: Callable[[int, str | None], Interval]) -> bytes:
        """Signs interval(sequence, previous), writes it, and returns the envelope."""
        credentials = self._credentials()
        if credentials.admission is not None and credentials.admission.evidence:
            # The certificate holds only the evidence's digest, and an auditor needs the evidence.
            self._run.write_evidence(credentials.admission.evidence)
        envelope = sign_statement(interval(self.sequence, self.previous), credentials)
        name = statement_name(credentials.rank, self.sequence)
        if self._is_strangers(name, credentials):
            self._run.put_statement_aside(name)
        self._run.write_statement(name, envelope)
        self.sequence += 1
        self.previous = statement_digest(envelope)
        return envelope

    def _is_strangers(self, name: str, own: Credentials) -> bool:
        """Whether a file with the next statement's name does not hold this rank's next statement.

        If it holds it, a second worker of this rank wrote it, and it stays.
        """
        if not os.path.lexists(self._run.statement_path(name)):
            return False
        try:
            found = verify_statement(self._run.read_statement(name), own.authorities)
        except SealringError:
            return True
        stated = interval_of(self._run, found)
        return stated is None or (rank_of(found), stated.sequence) != (own.rank, self.sequence)


# ---- the run's log


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
        """Files that were not logged, by name. A rank may later replace such a file by its own."""
        self._logged: set[str] = set()
        self._owners: set[str] = set()
        """Logged statements without a worker's certificate."""
        self.final: set[int] = set()
        """The ranks whose final statement is in the log."""
        self._newest: dict[int, tuple[int, set[str]]] = {}
        """For each rank, its last number in the log, and the statements with that number."""
        self._open()

    def _open(self) -> None:
        run = self._run
        if not run.key.exists():
            signer = Signer.generate(log_of_run(run.head.run), SignatureKind.NOTE)
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
        """MalformedRun unless the folder holds each rank's last logged statement.

        A rank goes on after the last statement that it finds. If one were missing, it would sign
        that number again.
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
        """Logs the folder's new statements that are valid now.

        Anybody who can write to the folder can put anything there. A file that cannot be read or is
        not valid is ignored. One warning names the first such file and the number of the others.

        An owner's statements are logged unchecked: their readers get the owner's key, and this rank
        does not have it.
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
        """Logs until every rank's final statement is there. Returns the ranks without one."""
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
            return  # of another authority, so of no rank of this job
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
        """Counts an owner's statement. A stranger's looks the same here, so there is a limit."""
        digest = statement_digest(envelope)
        if len(self._owners) >= _MAX_OWNERS_STATEMENTS and digest not in self._owners:
            raise MalformedRun(
                f"the log has {_MAX_OWNERS_STATEMENTS} statements without a worker's certificate, "
                "and takes no more: if strangers wrote them, keep them away from the folder"
            )
        self._owners.add(digest)

    def _require_ours(self, name: str, found: VerifiedStatement) -> None:
        """Requires a statement of this run under its own name: ranks look for theirs by name."""
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
    """The file's identity, to notice a replacement. None if there is no file."""
    try:
        status = os.lstat(run.statement_path(name))
    except OSError:
        return None
    return status.st_ino, status.st_ctime_ns
