"""What a worker did and does: flight records, one export of metrics, the live view.

process     all groups of this process: their records, written on error, on request, on a signal
metrics     counts of all groups, also of those that ended; the table of what is counted
trace       flight records as files, of several ranks: clocks aligned, as a Chrome trace
directory   the private directory with one Unix socket for each worker
status      what a worker answers, as plain values; asks all workers of a directory
gather      the status of this process, from its flight recorders
server      the thread that answers on the socket, started once in a process
exporter    their answers as text for Prometheus, over HTTP, in a process of its own
watch       the sockets of a job, and which of them are sealed links

The last collectives and messages of one group are in engine/flight.py. Knows no torch. No answer
holds a key, a secret or a tensor. Nothing here may fail a collective.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from sealring.core.engine.flight import (
        CollectiveAccount,
        FlightRecorder,
        GroupAccount,
        MessageAccount,
    )
    from sealring.observe.process import dump_flight_record, flight_record
    from sealring.observe.trace import ProcessAccount

__all__ = [
    "CollectiveAccount",
    "FlightRecorder",
    "GroupAccount",
    "MessageAccount",
    "ProcessAccount",
    "dump_flight_record",
    "flight_record",
]

# Every process group loads this package: what few scripts need is loaded when they ask for it.
_LOADED_ON_USE: Final = {
    "CollectiveAccount": "sealring.core.engine.flight",
    "FlightRecorder": "sealring.core.engine.flight",
    "GroupAccount": "sealring.core.engine.flight",
    "MessageAccount": "sealring.core.engine.flight",
    "ProcessAccount": "sealring.observe.trace",
    "dump_flight_record": "sealring.observe.process",
    "flight_record": "sealring.observe.process",
}


def __getattr__(name: str) -> Any:
    if name in _LOADED_ON_USE:
        return getattr(import_module(_LOADED_ON_USE[name]), name)
    raise AttributeError(f"module 'sealring.observe' has no attribute {name!r}")
