"""Makes the records of an honest run without a run, for audits of any size.

The statements are signed by the functions that workers call. Instead of the engine's hashes they
have made-up ones, which are equal at both ends of a link and change after each record.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from sealring.core.identity.certificates import issue, make_authority
from sealring.core.identity.credentials import Credentials
from sealring.core.identity.kept_key import KeptKey
from sealring.core.identity.names import WorkerName
from sealring.record.statements.forms import (
    CheckpointRef,
    Code,
    CollectiveCount,
    Commitment,
    DataRange,
    GroupEpoch,
    Interval,
    LinkAccount,
    Named,
    Share,
)
from sealring.record.statements.run_folder import RunFolder, create_run
from sealring.record.statements.signing import sign_statement, statement_digest

JOB: Final = "job"
RUN: Final = "run-1"
NOW: Final = datetime(2026, 11, 1, 12, tzinfo=UTC)
START: Final = int(NOW.timestamp())
STEPS: Final = 10
"""Steps in each interval."""
SAMPLES: Final = 2
"""Samples of each rank in each step."""


def sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


SCRIPT: Final = Named("train.py", sha("train.py"))
CORPUS: Final = Named("corpus", sha("corpus"))


class Authority:
    """Issues certificates that were valid at `NOW`."""

    def __init__(self) -> None:
        self.key = Ed25519PrivateKey.generate()
        long = timedelta(days=9)
        self.certificate = make_authority(self.key, "made run", 1, NOW - long, NOW + long)

    def worker(
        self, rank: int, world: int | None, job: str = JOB, now: datetime = NOW, hours: float = 24,
        attestation: bytes | None = None, key: Ed25519PrivateKey | None = None,
    ) -> Credentials:  # fmt: skip
        key = key or Ed25519PrivateKey.generate()
        certificate = issue(
            self.certificate, self.key, key.public_key(), WorkerName(job, rank), world,
            timedelta(hours=hours), now, attestation=attestation,
        )  # fmt: skip
        return Credentials(job, rank, certificate, (self.certificate,), KeptKey.of(key))


def commitment(sender: int, receiver: int, records: int) -> Commitment:
    return Commitment(records, sha(f"{sender}>{receiver}:{records}"))


def checkpoint(step: int) -> CheckpointRef:
    return CheckpointRef(f"model@{step}", step, sha(f"manifest {step}"), sha(f"content {step}"))


def interval(rank: int, world: int, sequence: int, last: int) -> Interval:
    """A rank's statement of one interval, at whose end a checkpoint is written."""
    done = (sequence + 1) * STEPS
    batch = world * SAMPLES
    share = Share(batch, rank * SAMPLES, SAMPLES)
    first, end = sequence * STEPS * batch, done * batch
    return Interval(
        run=RUN, sequence=sequence, previous=None if sequence == 0 else "00" * 32,
        final=sequence == last, world=world, first_step=sequence * STEPS, end_step=done,
        started=START + 10 * sequence, finished=START + 10 * sequence + 9,
        code=Code(SCRIPT, sha("packages"), "0.1.0", "3.11", "2.13.0", None),
        configuration=sha("configuration"),
        data=[DataRange("corpus", CORPUS.sha256, 0, first, end, 7, share)],
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


@dataclass(frozen=True, slots=True)
class HonestRun:
    authority: Authority
    world: int
    intervals: int

    def envelopes(self) -> Iterator[tuple[str, bytes]]:
        """Yields (name, envelope), interval by interval."""
        workers = [self.authority.worker(rank, self.world) for rank in range(self.world)]
        previous: dict[int, str] = {}
        for sequence in range(self.intervals):
            for rank, worker in enumerate(workers):
                one = interval(rank, self.world, sequence, self.intervals - 1)
                stated = replace(one, previous=previous[rank]) if sequence else one
                envelope = sign_statement(stated, worker)
                previous[rank] = statement_digest(envelope)
                yield f"rank-{rank}-{sequence}", envelope


def write_statements(
    path: Path, envelopes: Iterator[tuple[str, bytes]]
) -> tuple[RunFolder, list[bytes]]:
    """Writes a run's folder without its log; returns it and the log's entries. Does not fsync."""
    run = create_run(path, run=RUN, job=JOB)
    (path / "statements").mkdir()
    entries = []
    for name, envelope in envelopes:
        run.statement_path(name).write_bytes(envelope)
        entries.append(envelope)
    return run, entries
