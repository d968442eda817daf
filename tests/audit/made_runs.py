"""Runs for audits, made in one process by the functions that workers call, honest or not.

A script says what each rank states in each interval. A lie changes that before it is signed, as a
worker would who holds its own key; or the folder after it was written, as the disk would.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from sealring.audit.trust import AuditTrust
from sealring.identity.certificates import issue, make_authority
from sealring.identity.credentials import Credentials
from sealring.identity.names import WorkerName
from sealring.provenance.digests import Named
from sealring.provenance.intervals import (
    CheckpointRef,
    Code,
    CollectiveCount,
    Commitment,
    DataRange,
    GroupEpoch,
    Interval,
    LinkAccount,
    Share,
)
from sealring.provenance.notes import Kind, Signer
from sealring.provenance.policy import Log, LogPolicy
from sealring.provenance.runs import RunFolder, create_run
from sealring.provenance.statements import sign_statement, statement_digest
from sealring.provenance.transformations import Transformation, parameters_of
from sealring.provenance.writer import LogWriter, create_log

JOB, RUN = "job", "run-1"
NOW = datetime(2026, 11, 1, 12, tzinfo=UTC)
START = int(NOW.timestamp())
STEPS = 10
BATCH = 8
"""Samples of all ranks in one step."""


def sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


SCRIPT = Named("train.py", sha("train.py"))
RAW = Named("raw.jsonl", sha("raw"))
CLEAN = Named("clean", sha("clean"))
CORPUS = Named("corpus", sha("corpus"))
CLEANER = Named("clean.py", sha("clean.py"))
MODEL = b"the weights of the model"


class Authority:
    def __init__(self) -> None:
        self.key = Ed25519PrivateKey.generate()
        long = timedelta(days=9)
        self.certificate = make_authority(self.key, "test", 1, NOW - long, NOW + long)

    def worker(
        self, rank: int, world: int, job: str = JOB, now: datetime = NOW, hours: float = 1,
        attestation: bytes | None = None, key: Ed25519PrivateKey | None = None,
    ) -> Credentials:  # fmt: skip
        key = key or Ed25519PrivateKey.generate()
        certificate = issue(
            self.certificate, self.key, key.public_key(), WorkerName(job, rank), world,
            timedelta(hours=hours), now, attestation=attestation,
        )  # fmt: skip
        return Credentials(job, rank, certificate, (self.certificate,), key)


def commitment(sender: int, receiver: int, records: int) -> Commitment:
    """Stands for the engine's running hash: the same at both ends, another after each record."""
    return Commitment(records, sha(f"{sender}>{receiver}:{records}"))


def interval(rank: int, world: int, sequence: int, last: int) -> Interval:
    """What an honest rank states. It writes a checkpoint at the end of each interval."""
    done = (sequence + 1) * STEPS
    share = BATCH // world
    first, end = sequence * STEPS * BATCH, done * BATCH
    return Interval(
        run=RUN, sequence=sequence, previous=None if sequence == 0 else "00" * 32,
        final=sequence == last, world=world, first_step=sequence * STEPS, end_step=done,
        started=START + 10 * sequence, finished=START + 10 * sequence + 9,
        code=Code(SCRIPT, sha("packages"), "0.1.0", "3.11", "2.13.0", None),
        configuration=sha("configuration"),
        data=[
            DataRange("corpus", CORPUS.sha256, 0, first, end, 7, Share(BATCH, rank * share, share))
        ],
        groups=[GroupEpoch("0", "e1", list(range(world)), "open")],
        collectives=[CollectiveCount("0", "e1", "all_reduce", done)],
        links=[
            LinkAccount(
                "0", "e1", peer, "collective", commitment(rank, peer, 3 * done),
                commitment(peer, rank, 3 * done),
            )
            for peer in range(world)
            if peer != rank
        ],
        checkpoints_in=[],
        checkpoints_out=[checkpoint(done)],
        privacy=None,
    )  # fmt: skip


def checkpoint(step: int) -> CheckpointRef:
    return CheckpointRef(f"model@{step}", step, sha(f"manifest {step}"), sha(f"content {step}"))


def stage(
    name: str, kind: Any, inputs: Sequence[Named], outputs: Sequence[Named], code: Named
) -> Transformation:
    return Transformation(
        kind, name, list(inputs), list(outputs), [code], parameters_of({}), START, START + 1
    )


@dataclass
class MadeRun:
    """A run before it is written: change what is stated, then `write` it."""

    world: int = 4
    count: int = 3
    """Intervals of each rank."""
    authority: Authority = field(default_factory=Authority)
    owner: Ed25519PrivateKey = field(default_factory=Ed25519PrivateKey.generate)
    signer: Signer = field(default_factory=lambda: Signer.generate("example.com/run", Kind.NOTE))
    workers: dict[int, Credentials] = field(default_factory=dict)
    turns: dict[tuple[int, int], Interval] = field(default_factory=dict)
    made: list[Transformation] = field(default_factory=list)
    evidence: list[bytes] = field(default_factory=list)
    previous: dict[tuple[int, int], str] = field(default_factory=dict)
    """What statements name as the one before them, where it is not so."""
    digests: dict[tuple[int, int], str] = field(default_factory=dict)
    """Of the statements, once they are written."""
    made_digests: dict[str, str] = field(default_factory=dict)
    """By the transformation's name."""

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
        """Changes all statements of a rank from the interval `first` on."""
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
        run = create_run(path, run=RUN, job=JOB)
        entries = []
        (path / "statements").mkdir()
        for name, envelope in self.envelopes():
            # Not write_statement: its fsync for each of a thousand files takes the test's time.
            run.statement_path(name).write_bytes(envelope)
            entries.append(envelope)
        for content in self.evidence:
            run.write_evidence(content)
        create_log(run.log, self.signer)
        self.append(run, entries)
        return run

    def append(self, run: RunFolder, entries: Sequence[bytes]) -> None:
        with LogWriter(run.log, self.signer) as writer:
            writer.append(entries)

    def add(self, run: RunFolder, name: str, envelope: bytes) -> str:
        """A further statement, in the folder and in the log."""
        run.statement_path(name).write_bytes(envelope)
        self.append(run, [envelope])
        return statement_digest(envelope)

    @property
    def trust(self) -> AuditTrust:
        return AuditTrust(
            [self.authority.certificate], LogPolicy((Log(self.signer.verifier),)),
            [self.owner.public_key()],
        )  # fmt: skip


def authorities(*made: Authority) -> list[x509.Certificate]:
    return [one.certificate for one in made]
