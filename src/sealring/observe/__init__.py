"""What a worker did and does: flight records, one export of metrics, the live view.

start       each new group's flight record, and when it is written down
account     the file that holds flight records
process     all groups of this process: its files, on error, on request, on a signal
metrics     counts of all groups, also of those that ended; the table of what is counted
trace       files of several ranks read back, their clocks aligned, as a Chrome trace
directory   the private directory that holds one Unix socket for each worker
status      what a worker answers, as plain values
gather      the status of this process, from its flight recorders
server      the thread that answers on the socket
worker      starts that thread once in a process, and removes the socket at its end
reader      asks all workers of a directory
exporter    their answers as text for Prometheus, over HTTP, in a process of its own
watch       the sockets of a job, and which of them are sealed links

The last collectives and messages of one group are in engine/flight.py. Knows no torch. No answer
holds a key, a secret or a tensor. Nothing here may fail a collective.
"""

from sealring.core.engine.flight import (
    CollectiveAccount,
    FlightRecorder,
    GroupAccount,
    MessageAccount,
)
from sealring.observe.account import ProcessAccount
from sealring.observe.process import dump_flight_record, flight_record

__all__ = [
    "CollectiveAccount",
    "FlightRecorder",
    "GroupAccount",
    "MessageAccount",
    "ProcessAccount",
    "dump_flight_record",
    "flight_record",
]
