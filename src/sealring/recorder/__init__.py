"""What a worker did last, kept in memory and written down when something breaks.

start     each new group's, and when it is written down
account   the file that holds them
process   all groups of this process: its files, on error, on request, on a signal
metrics   counts of all groups, also of those that ended; the table of what is counted
trace     files of several ranks read back, their clocks aligned, as a Chrome trace

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
