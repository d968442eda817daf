"""What a worker did last, kept in memory and written down when something breaks.

flight    the last collectives of one group, as they run
mail      its last messages
account   the same as plain values: what the files hold
process   all groups of this process: its files, on error, on request, on a signal
metrics   counts of all groups, also of those that ended; the table of what is counted
trace     files of several ranks read back, their clocks aligned, as a Chrome trace

Knows no torch. Nothing here may fail a collective.
"""

from sealring.recorder.account import (
    CollectiveAccount,
    GroupAccount,
    MessageAccount,
    ProcessAccount,
)
from sealring.recorder.flight import FlightRecorder
from sealring.recorder.process import dump_flight_record, flight_record

__all__ = [
    "CollectiveAccount",
    "FlightRecorder",
    "GroupAccount",
    "MessageAccount",
    "ProcessAccount",
    "dump_flight_record",
    "flight_record",
]
