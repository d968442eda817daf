"""The recording of this process, for datasets and checkpoints, which report by themselves.

Where nothing is recorded, a note is dropped.
"""

from __future__ import annotations

import os
from pathlib import Path

from cryptography import x509

from sealring.core.hooks import Share
from sealring.core.identity.credentials import read_authorities
from sealring.record.provenance.intervals import CheckpointRef, DataRange
from sealring.record.provenance.replay import requested
from sealring.record.recording.noted import opened
from sealring.record.recording.run import current


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
