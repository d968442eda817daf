"""What a worker did last, kept in memory and written down when something breaks.

start     each new group's, and when it is written down
account   the file that holds them
process   all groups of this process: its files, on error, on request, on a signal
chrome    accounts of one or more ranks as a Chrome trace
merge     files of several ranks read back, their clocks aligned
counts    of every group, also of those that ended
metrics   the same, through OpenTelemetry's API where it is installed

The last collectives and messages of one group are in engine/flight.py. Knows no torch. Nothing here
may fail a collective.
"""

from sealring.engine.flight import (
    CollectiveAccount,
    FlightRecorder,
    GroupAccount,
    MessageAccount,
)
from sealring.recorder.account import ProcessAccount
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
