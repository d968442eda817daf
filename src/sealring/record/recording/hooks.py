"""What reports to the recording of this process: datasets, checkpoints, frameworks' steps, and
tools that record an ingest, a stage, an export or an evaluation.

Where nothing is recorded, a note is dropped.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from sealring.core.hooks import Share
from sealring.core.identity.credentials import Credentials, read_authorities
from sealring.record.recording.chain import RunLog
from sealring.record.recording.noted import opened
from sealring.record.recording.run import current
from sealring.record.replay import requested
from sealring.record.statements.forms import CheckpointRef, DataRange, Transformation
from sealring.record.statements.run_folder import open_run, write_statement
from sealring.record.statements.signing import sign_statement, statement_digest


def count_step(done: int | None = None) -> None:
    """A framework's step has ended. `done`: as many as it has counted so far, batches apart."""
    if (recording := current()) is not None:
        recording.step(1 if done is None else max(0, done - recording.next_step))


def trusted_in_replay() -> tuple[tuple[x509.Certificate, ...], str] | None:
    """Whose checkpoints a repetition loads: authorities and job of the recorded run."""
    request = requested(os.environ)
    return None if request is None else (read_authorities(Path(request.authorities)), request.job)


def note_data(
    name: str,
    digest: str,
    epoch: int,
    first: int,
    end: int,
    *,
    seed: int | None = None,
    share: Share | None = None,
) -> None:
    """This rank has read positions `first` up to `end` of a dataset's global order.

    `share` says which of them, where all ranks read the range together.
    """
    if (recording := current()) is not None:
        recording.notes.data(DataRange(name, digest, epoch, first, end, seed, share))


def note_opened(name: str, digest: str) -> None:
    """This process has opened a dataset, and can read any sample of it by its number."""
    found = opened(name, digest)
    if (recording := current()) is not None:
        recording.notes.data(found)


def note_checkpoint_in(name: str, manifest: str, content: str | None = None) -> None:
    """This rank has loaded a checkpoint."""
    if (recording := current()) is not None:
        recording.notes.checkpoint_in(CheckpointRef(name, recording.next_step, manifest, content))


def note_checkpoint_out(name: str, manifest: str, content: str | None = None) -> None:
    """This rank has completed a checkpoint, of which others may have written parts."""
    if (recording := current()) is not None:
        step = recording.steps_in_checkpoint
        recording.notes.checkpoint_out(CheckpointRef(name, step, manifest, content))


# ---- a transformation, in the folder of a run


def record_transformation(
    run: Path,
    transformation: Transformation,
    signer: Credentials | Ed25519PrivateKey,
    authorities: Sequence[x509.Certificate] = (),
) -> Path:
    """Signs it and writes it into the run's folder; into its log as well where its key is here.

    Before training there is no log yet: rank 0 then logs what it finds. `authorities` are those of
    the run's workers, whose statements may still have to be logged.
    """
    run = run.absolute()
    envelope = sign_statement(transformation, signer)
    name = f"{transformation.kind}-{statement_digest(envelope)[:16]}"
    path = write_statement(run, name, envelope)
    if (run / "run.json").exists() and (folder := open_run(run)).key.exists():
        RunLog(folder, authorities).append_new()
    return path
