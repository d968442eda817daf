"""Runs to audit, made in one process with the functions that workers call, honest or not.

A script says what each rank states in each interval. A lie changes that before it is signed, as a
worker that holds its own key could. Or it changes the folder after it was written, as the disk
could.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from sealring.core.identity.credentials import Credentials
from sealring.formats.log.folder import LogWriter, create_log
from sealring.formats.log.notes import SignatureKind, Signer
from sealring.formats.log.policy import Log, LogPolicy
from sealring.lab.bench.records import (
    CORPUS,
    JOB,
    NOW,
    RUN,
    SAMPLES,
    SCRIPT,
    START,
    STEPS,
    Authority,
    checkpoint,
    commitment,
    interval,
    sha,
    write_statements,
)
from sealring.record.audit.records import AuditTrust
from sealring.record.statements.forms import Interval, Named, Transformation, parameters_of
from sealring.record.statements.run_folder import RunFolder
from sealring.record.statements.signing import sign_statement, statement_digest

__all__ = [
    "CORPUS", "JOB", "NOW", "RUN", "SCRIPT", "Authority", "MadeRun", "checkpoint", "commitment",
    "sha", "stage",
]  # fmt: skip

RAW = Named("raw.jsonl", sha("raw"))
CLEAN = Named("clean", sha("clean"))
CLEANER = Named("clean.py", sha("clean.py"))
MODEL = b"the weights of the model"
BATCH = 4 * SAMPLES
"""Samples that all four ranks read in one step."""


def stage(
    name: str, kind: Any, inputs: Sequence[Named], outputs: Sequence[Named], code: Named
) -> Transformation:
    return Transformation(
        kind, name, list(inputs), list(outputs), [code], parameters_of({}), START, START + 1
    )


@dataclass
class MadeRun:
    """A run that is not written yet: change what it states, then call `write`."""

    world: int = 4
    count: int = 3
    """How many intervals each rank has."""
    authority: Authority = field(default_factory=Authority)
    owner: Ed25519PrivateKey = field(default_factory=Ed25519PrivateKey.generate)
    signer: Signer = field(
        default_factory=lambda: Signer.generate("example.com/run", SignatureKind.NOTE)
    )
    workers: dict[int, Credentials] = field(default_factory=dict)
    turns: dict[tuple[int, int], Interval] = field(default_factory=dict)
    made: list[Transformation] = field(default_factory=list)
    evidence: list[bytes] = field(default_factory=list)
    previous: dict[tuple[int, int], str] = field(default_factory=dict)
    """For each statement that names a wrong one as the one before it, the digest it names."""
    digests: dict[tuple[int, int], str] = field(default_factory=dict)
    """Digests of the workers' statements, filled in by `write`."""
    made_digests: dict[str, str] = field(default_factory=dict)
    """Digests of the transformations' statements, by the transformation's name."""

    def __post_init__(self) -> None:
        last = self.count - 1
        for rank in range(self.world):
            self.workers[rank] = self.authority.worker(rank, self.world)
            for sequence in range(self.count):
                self.turns[rank, sequence] = interval(rank, self.world, sequence, last)
        model = Named("model.bin", hashlib.sha256(MODEL).hexdigest())
        end = checkpoint(self.count * STEPS)
        self.made = [
            stage("clean", "ingest", [RAW], [CLEAN], CLEANER),
            stage("tokenize", "stage", [CLEAN], [CORPUS], Named("tok.py", sha("tok.py"))),
            stage("export", "export", [Named(end.name, end.sha256)], [model], Named("x", sha("x"))),
        ]

    def change(self, rank: int, sequence: int, **fields: Any) -> None:
        self.turns[rank, sequence] = replace(self.turns[rank, sequence], **fields)

    def each(self, rank: int, change: Callable[[Interval], Interval], first: int = 0) -> None:
        """Change all of a rank's statements from the interval `first` on."""
        for sequence in range(first, self.count):
            if (rank, sequence) in self.turns:
                self.turns[rank, sequence] = change(self.turns[rank, sequence])

    def envelopes(self) -> Iterator[tuple[str, bytes]]:
        for number, made in enumerate(self.made):
            envelope = sign_statement(made, self.owner)
            self.made_digests[made.name] = statement_digest(envelope)
            yield f"made-{number}", envelope
        previous: dict[int, str] = {}
        for (rank, sequence), one in sorted(self.turns.items(), key=lambda item: item[0][::-1]):
            before = self.previous.get((rank, sequence), previous.get(rank, one.previous))
            stated = replace(one, previous=before) if sequence else one
            envelope = sign_statement(stated, self.workers[rank])
            previous[rank] = self.digests[rank, sequence] = statement_digest(envelope)
            yield f"rank-{rank}-{sequence}", envelope

    def write(self, path: Path) -> RunFolder:
        run, entries = write_statements(path, self.envelopes())
        for content in self.evidence:
            run.write_evidence(content)
        create_log(run.log, self.signer)
        self.append(run, entries)
        return run

    def append(self, run: RunFolder, entries: Sequence[bytes]) -> None:
        with LogWriter(run.log, self.signer) as writer:
            writer.append(entries)

    def add(self, run: RunFolder, name: str, envelope: bytes) -> str:
        """Add one more statement to the folder and to the log."""
        run.statement_path(name).write_bytes(envelope)
        self.append(run, [envelope])
        return statement_digest(envelope)

    @property
    def trust(self) -> AuditTrust:
        return AuditTrust(
            [self.authority.certificate], LogPolicy((Log(self.signer.verifier),)),
            [self.owner.public_key()],
        )  # fmt: skip
