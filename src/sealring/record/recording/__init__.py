"""What training writes down: each worker's signed account of every interval.

code         the script, the packages and the versions that run
traffic      groups, collectives and links, as the flight recorders know them
noted        what happened since the last statement: data, checkpoints, privacy
chain        one rank's statements in a run's folder, each naming the one before it
transformed  what an ingest, a stage, an export or an evaluation made
run_log      the run's transparency log, which rank 0 keeps
run          `record_run`: all of these together, for a training script
hooks        for what reports to this process's recording by itself

Knows no torch.
"""

from __future__ import annotations

from sealring.core.hooks import Share
from sealring.record.recording.hooks import note_checkpoint_in, note_checkpoint_out, note_data
from sealring.record.recording.run import Recording, record_run
from sealring.record.recording.transformed import record_transformation

__all__ = [
    "Recording",
    "Share",
    "note_checkpoint_in",
    "note_checkpoint_out",
    "note_data",
    "record_run",
    "record_transformation",
]
