"""The record of a run, and what is done with it, in the order of the work.

recording   what a worker writes while it trains; `sealring.record_run` begins it
statements  what is signed, how it is signed, and the folder that holds it
witness     cosigns logs that only grow
audit       checks a finished run, and answers claims about it
replay      executes parts of a run again
papers      a model's signature, transparency bundle and bill of materials

Nothing here imports torch.
"""

from __future__ import annotations

from sealring.core.hooks import Share
from sealring.record.recording.run import (
    Recording,
    note_checkpoint_in,
    note_checkpoint_out,
    note_data,
    record_transformation,
)

__all__ = [
    "Recording",
    "Share",
    "note_checkpoint_in",
    "note_checkpoint_out",
    "note_data",
    "record_transformation",
]
