"""One rank's statements in a run's folder: numbered, each naming the one before it.

A statement is on the disk before the next one is made. A worker that is killed leaves its earlier
statements valid; one that is started again continues the chain.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import Final

from sealring.core.identity.credentials import Credentials
from sealring.errors import ConfigurationError, MalformedRun, SealringError
from sealring.record.provenance.intervals import Interval
from sealring.record.provenance.runs import RunFolder
from sealring.record.provenance.statements import (
    VerifiedStatement,
    of_another_run,
    sign_statement,
    statement_digest,
    verify_statement,
)

_NAME: Final = re.compile(r"rank-([0-9]{5,})-([0-9]{8,})")


def statement_name(rank: int, sequence: int) -> str:
    return f"rank-{rank:05}-{sequence:08}"


def place_of(name: str) -> tuple[int, int] | None:
    """(rank, sequence) of a statement's file that a chain wrote, as its name says."""
    found = _NAME.fullmatch(name)
    return None if found is None else (int(found[1]), int(found[2]))


def interval_of(run: RunFolder, found: VerifiedStatement) -> Interval | None:
    """What a statement says of an interval of this run; None if it is about something else."""
    if of_another_run(found, run.head.run, run.head.job):
        return None
    return found.content if isinstance(found.content, Interval) else None


def rank_of(found: VerifiedStatement) -> int | None:
    return None if found.worker is None else found.worker.rank


class Chain:
    def __init__(self, run: RunFolder, credentials: Callable[[], Credentials]) -> None:
        """`credentials` are asked for at each statement: a broker renews certificates."""
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
            # It may be this rank's own, of an earlier authority or a later sealring: to pass it
            # over would be to sign its number again.
            raise MalformedRun(
                f"{self._run.statement_path(name)} has the name of the last statement of rank "
                f"{own.rank}, and the run cannot go on after it: {problem}. If this run did not "
                "write it, remove it"
            ) from None
        last = interval_of(self._run, found)
        # Names prove nothing: the disk's owner can put any statement there.
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
        """Signs interval(sequence, previous) and writes it. The envelope."""
        credentials = self._credentials()
        if credentials.admission is not None and credentials.admission.evidence:
            # The certificate has its digest alone, and an auditor judges the evidence itself.
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
        """Whether something has the name of the next statement that is not this rank's statement.

        One that is was written by a second worker of this rank, and stays.
        """
        if not os.path.lexists(self._run.statement_path(name)):
            return False
        try:
            found = verify_statement(self._run.read_statement(name), own.authorities)
        except SealringError:
            return True
        stated = interval_of(self._run, found)
        return stated is None or (rank_of(found), stated.sequence) != (own.rank, self.sequence)
