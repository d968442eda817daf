"""One rank's statements in a run's folder: numbered, each naming the one before it.

A statement is on the disk before the next one is made. A worker that is killed leaves its earlier
statements valid; one that is started again continues the chain.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

from sealring.errors import ConfigurationError
from sealring.identity.credentials import Credentials
from sealring.provenance.intervals import Interval
from sealring.provenance.runs import RunFolder
from sealring.provenance.statements import sign_statement, statement_digest, verify_statement

_NAME: Final = re.compile(r"rank-([0-9]{5,})-([0-9]{8,})")


def statement_name(rank: int, sequence: int) -> str:
    return f"rank-{rank:05}-{sequence:08}"


def place_of(name: str) -> tuple[int, int] | None:
    """(rank, sequence) of a statement's file that a chain wrote, as its name says."""
    found = _NAME.fullmatch(name)
    return None if found is None else (int(found[1]), int(found[2]))


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
        envelope = self._run.read_statement(statement_name(own.rank, max(mine)))
        last = verify_statement(envelope, own.authorities).content
        assert isinstance(last, Interval)
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
        self._run.write_statement(statement_name(credentials.rank, self.sequence), envelope)
        self.sequence += 1
        self.previous = statement_digest(envelope)
        return envelope
