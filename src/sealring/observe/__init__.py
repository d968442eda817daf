"""Shows what a worker did and does: flight records, metrics, and the live view.

process     all groups of this process: their records, written on an error, a request or a signal
metrics     counts of all groups, also of ended ones; the table of metrics
trace       flight records of several ranks as files: clocks aligned, as a Chrome trace
directory   the private directory with one Unix socket for each worker
status      a worker's answer as plain values; asks all workers of a directory
gather      the status of this process, from its flight recorders
server      the thread that answers on the socket, started once in a process
exporter    workers' answers as text for Prometheus, over HTTP, in its own process
watch       the sockets of a job, and which of them are sealed links

A group's last collectives and messages are kept by engine/flight.py. Nothing here imports torch. No
answer holds a key, a secret or a tensor. Nothing here may make a collective fail.
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

# Every process group loads this package, so rarely needed names are loaded at their first use.
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
