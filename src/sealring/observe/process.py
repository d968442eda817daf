"""The flight records of all groups of this process, and the files that hold them."""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from sealring.core.engine.flight import FlightRecorder, monotonic_zero_ns
from sealring.core.hooks import GroupMade, Made
from sealring.core.settings import TRACE
from sealring.errors import ConfigurationError
from sealring.formats.files import replace_private, writing
from sealring.observe.metrics import Counts, EndedGroups, counts_of, publish_metrics, total_of

if TYPE_CHECKING:
    from sealring.observe.trace import ProcessAccount

KEPT_CLOSED: Final = 8
"""The most ended groups in the record. They are kept so that a new group's failure does not lose
what happened before it."""

_LOG = logging.getLogger("sealring")
_lock = threading.Lock()
_recorders: list[FlightRecorder] = []
_ended = EndedGroups()


def _forget_all() -> None:
    """Forgets all groups, in a forked child: they are the parent's."""
    global _lock, _ended
    _lock, _ended = threading.Lock(), EndedGroups()
    _recorders.clear()


os.register_at_fork(after_in_child=_forget_all)


class FlightFiles(NamedTuple):
    record: Path
    trace: Path


def recorders() -> list[FlightRecorder]:
    """The recorders of open groups and of the last few ended ones, oldest first."""
    return list(_recorders)


def keep(recorder: FlightRecorder) -> None:
    """Called once for each group."""
    with _lock:
        closed = [each for each in _recorders if each.closed]
        for old in closed[:-KEPT_CLOSED]:
            _ended.add(old)
            _recorders.remove(old)
        _recorders.append(recorder)


def counts_of_all_groups() -> Counts:
    """The counts of every group that this process has made."""
    with _lock:  # held only for the copies, because a new group waits for this lock
        ended, known = _ended.parts(), list(_recorders)
    return total_of([*ended, *map(counts_of, known)])


def flight_record() -> ProcessAccount:
    """The last collectives of every group of this process, as plain values."""
    from sealring.observe.trace import ProcessAccount

    known = recorders()
    if not known:
        raise ConfigurationError(
            "there is no flight record: this process made no group of sealring's. Call "
            'init_process_group("sealring") first.'
        )
    latest = known[-1]
    zero_ns = monotonic_zero_ns()
    return ProcessAccount(
        job=latest.job,
        rank=latest.job_rank,
        host=socket.gethostname(),
        pid=os.getpid(),
        written_ns=time.time_ns(),
        groups=[recorder.account(zero_ns) for recorder in known],
    )


def dump_flight_record(directory: str | os.PathLike[str] | None = None) -> FlightFiles:
    """Writes the flight record to `directory`, as JSON and as a Chrome trace. Returns both paths.

    The default directory is that of $SEALRING_TRACE. Each file appears whole or not at all, only
    this user can read it, and it replaces what this process wrote before.
    """
    from sealring.observe.trace import chrome_trace

    chosen = directory if directory is not None else TRACE.read(os.environ)[0]
    if not chosen:
        raise ConfigurationError(
            "where should the flight record go? Pass a directory or set SEALRING_TRACE"
        )
    place = trace_directory(chosen)
    account = flight_record()
    name = f"{account.job}-rank-{account.rank}-{account.pid}"
    files = FlightFiles(place / f"{name}.flight.json", place / f"{name}.trace.json")
    replace_private(files.record, account.to_json().encode())
    replace_private(files.trace, json.dumps(chrome_trace([account])).encode())
    return files


def trace_directory(path: str | os.PathLike[str]) -> Path:
    """Makes the directory if necessary. Fails now if it could not be written to later."""
    directory = Path(path).absolute()
    with writing(f"{directory}, where flight records are to go,", "made"):
        directory.mkdir(parents=True, exist_ok=True)
    if not os.access(directory, os.W_OK | os.X_OK):
        raise ConfigurationError(f"{directory}, where flight records are to go, is not writable")
    return directory


def dump_without_failing(directory: Path, why: str) -> None:
    """Writes the flight record while something else matters more: a problem is only logged."""
    try:
        files = dump_flight_record(directory)
    except Exception as problem:
        _LOG.warning("the flight record could not be written: %s", problem)
    else:
        _LOG.warning("%s: the flight record is in %s", why, files.record)


def dump_on_signal(number: signal.Signals, directory: Path) -> None:
    """Writes the flight record whenever the signal comes, then calls the handler before it."""
    if threading.current_thread() is not threading.main_thread():
        _LOG.warning(
            "the signal in SEALRING_TRACE has no effect: Python lets only the main thread set a "
            "handler, and this group was made on another"
        )
        return
    before = signal.getsignal(number)
    if isinstance(before, _DumpOnSignal):
        before.directory = directory
    else:
        signal.signal(number, _DumpOnSignal(directory, before))


class _DumpOnSignal:
    def __init__(self, directory: Path, before: Any) -> None:
        self.directory = directory
        self._before = before

    def __call__(self, number: int, frame: FrameType | None) -> None:
        dump_without_failing(self.directory, f"{signal.Signals(number).name} came")
        if callable(self._before):
            self._before(number, frame)


# ---- what happens with the flight recorder of each new group


def observe_groups(environ: Mapping[str, str]) -> Made:
    """Keeps each group's record. Writes it where SEALRING_TRACE says.

    It is written when a call fails, and when the signal in SEALRING_TRACE comes.
    """
    folder, signal_name = TRACE.read(environ)
    directory = trace_directory(folder) if folder else None

    def made(group: GroupMade) -> None:
        flight = group.flight
        keep(flight)
        if directory is not None:
            why = f"a call of group {flight.group} failed"
            flight.on_failure = lambda: dump_without_failing(directory, why)
            if signal_name:
                dump_on_signal(signal.Signals[f"SIG{signal_name}"], directory)
        publish_metrics(counts_of_all_groups)

    return made
