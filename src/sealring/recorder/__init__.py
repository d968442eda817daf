"""What a worker did last, kept in memory and written down when something breaks.

flight    the last collectives of one group, as they run
mail      its last messages
account   the same as plain values: what the files hold
process   all groups of this process: its files, on error, on request, on a signal
chrome    accounts of one or more ranks as a Chrome trace
merge     files of several ranks read back, their clocks aligned
counts    of every group, also of those that ended
metrics   the same, through OpenTelemetry's API where it is installed

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
