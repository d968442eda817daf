"""Flight records: written to files, read back, their clocks aligned, and drawn as a Chrome trace.

The trace is for Perfetto (ui.perfetto.dev) or chrome://tracing. In it a process is a rank, and a
thread is a group, because collectives of a group never overlap. Waiting collectives and messages do
overlap, so they have tracks of their own (async events). Arrows lead from the rank that began a
collective first to all others.
"""

from __future__ import annotations

import dataclasses
import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any, Final

from sealring.core.engine.flight import CollectiveAccount, GroupAccount, MessageAccount
from sealring.errors import ConfigurationError
from sealring.formats.files import read_there
from sealring.formats.strict import read_object, strictly

FORMAT: Final = "sealring flight record"
VERSION: Final = 1


@dataclass(frozen=True, slots=True)
class ProcessAccount:
    job: str
    rank: int
    host: str
    pid: int
    written_ns: int
    groups: list[GroupAccount]

    def to_json(self) -> str:
        head = {"format": FORMAT, "version": VERSION}
        return json.dumps({**head, **dataclasses.asdict(self)}, indent=1)

    @staticmethod
    def from_json(text: str | bytes, name: str) -> ProcessAccount:
        """Reads back the output of to_json. `name` is the file's name for an error."""
        refusal = ConfigurationError(
            f"{name} is not a flight record; those are named *.flight.json"
        )
        document = read_object(text, refusal)
        if document.pop("format", None) != FORMAT:
            raise refusal
        if (version := document.pop("version", None)) != VERSION:
            raise ConfigurationError(
                f"{name} is a flight record of version {version!r}; this sealring reads {VERSION}"
            )
        return strictly(ProcessAccount, document, name, "flight record")


# ---- several ranks' files, and their trace


MAX_FILE_BYTES: Final = 256 << 20

# In these operations no rank is done before all ranks have begun.
_MEETINGS: Final = frozenset(
    {"all_reduce", "reduce_scatter", "all_gather", "barrier", "all_to_all"}
)


def read_flight_records(paths: Iterable[Path]) -> list[ProcessAccount]:
    """The records in these files, and in *.flight.json of these directories, sorted by rank."""
    files: list[Path] = []
    for path in paths:
        found = sorted(path.glob("*.flight.json")) if path.is_dir() else [path]
        if not found:
            raise ConfigurationError(f"{path} holds no *.flight.json")
        files += found
    accounts = [
        ProcessAccount.from_json(read_there(file, MAX_FILE_BYTES, ConfigurationError), str(file))
        for file in dict.fromkeys(files)
    ]
    if len(jobs := sorted({account.job for account in accounts})) > 1:
        raise ConfigurationError(
            f"these are flight records of different jobs ({', '.join(jobs)}): pass those of one"
        )
    processes = Counter((account.host, account.pid, account.rank) for account in accounts)
    for (host, pid, rank), count in processes.items():
        if count > 1:
            raise ConfigurationError(
                f"two of these files are of one process (rank {rank}, {host}, process {pid}): "
                "pass the later one"
            )
    return sorted(accounts, key=lambda account: (account.rank, account.written_ns))


def clock_offsets_ns(accounts: Sequence[ProcessAccount]) -> dict[int, int]:
    """How far each account's clock is ahead of the first one's, by index.

    All ranks leave an all-reduce or a barrier at nearly the same moment. So the median difference
    of those ends is the difference of the clocks, up to a part of a collective's time. A rank that
    shares none of them with the first is left out.
    """
    ends = [_meetings(account) for account in accounts]
    offsets = {}
    for index, own in enumerate(ends):
        shared = own.keys() & ends[0].keys()
        if shared:
            offsets[index] = int(median(own[each] - ends[0][each] for each in shared))
    return offsets


def _meetings(account: ProcessAccount) -> dict[tuple[str, int], int]:
    return {
        (group.id, each.number): each.ended_ns
        for group in account.groups
        for each in group.collectives
        if each.operation in _MEETINGS
        and each.state == "done"
        and each.number is not None
        and each.ended_ns is not None
    }


Event = dict[str, Any]


def chrome_trace(
    accounts: Sequence[ProcessAccount], offsets_ns: Mapping[int, int] | None = None
) -> dict[str, Any]:
    """One trace of all accounts. `offsets_ns`, by index, is subtracted from an account's times."""
    offsets = offsets_ns or {}
    begun = [
        time_ns - offsets.get(index, 0)
        for index, account in enumerate(accounts)
        for group in account.groups
        for time_ns in (
            *(each.queued_ns for each in group.collectives),
            *(each.posted_ns for each in group.messages),
        )
    ]
    # A float cannot hold the nanoseconds of a time since 1970, so times count from the first event.
    zero = min(begun, default=0)
    events: list[Event] = []
    arrows: dict[tuple[str, int], list[Event]] = defaultdict(list)
    for pid, account in enumerate(accounts):
        clock = _Clock(zero + offsets.get(pid, 0), account.written_ns)
        events += _process(pid, account)
        for tid, group in enumerate(account.groups):
            events.append(_named("thread_name", pid, tid, f"group {group.name}"))
            for each in group.collectives:
                shown = list(_collective(clock, pid, tid, group, each))
                events += shown
                if each.number is not None:
                    arrows[group.id, each.number] += [e for e in shown if e["ph"] == "X"]
            for number, message in enumerate(group.messages):
                events += _message(clock, pid, tid, group, message, number)
    for identity, slices in enumerate(arrows.values()):
        events += _arrows(identity, slices)
    return {
        "traceEvents": events,
        "displayTimeUnit": "ns",
        "otherData": {
            "began": datetime.fromtimestamp(zero / 1e9, UTC).isoformat(),
            "job": ", ".join(sorted({account.job for account in accounts})),
        },
    }


class _Clock:
    def __init__(self, zero_ns: int, written_ns: int) -> None:
        self._zero_ns = zero_ns
        self._written_ns = written_ns

    def us(self, time_ns: int | None) -> float:
        """Microseconds since the trace began. For a missing time, the time of writing is used."""
        return ((time_ns or self._written_ns) - self._zero_ns) / 1000


def _process(pid: int, account: ProcessAccount) -> Iterable[Event]:
    name = f"rank {account.rank} ({account.host}, process {account.pid})"
    yield _named("process_name", pid, 0, name)
    yield {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0,
           "args": {"sort_index": account.rank}}  # fmt: skip


def _named(what: str, pid: int, tid: int, name: str) -> Event:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name}}


def _collective(
    clock: _Clock, pid: int, tid: int, group: GroupAccount, each: CollectiveAccount
) -> Iterator[Event]:
    place = {"pid": pid, "tid": tid, "cat": "sealring"}
    arguments = _arguments(
        group, each, "number", "bytes", "dtype", "reduction", "root", "algorithm", "state",
        "sealed_bytes", "opened_bytes", "error",
    )  # fmt: skip
    queued, started, ended = (clock.us(t) for t in (each.queued_ns, each.started_ns, each.ended_ns))
    wait = {**place, "name": f"queued {each.operation}", "id": f"{pid}.{tid}.{each.queued_ns}"}
    yield {**wait, "ph": "b", "ts": queued, "args": arguments}
    yield {**wait, "ph": "e", "ts": started}
    if each.started_ns is not None:
        slice_ = {**place, "name": each.operation, "ph": "X", "ts": started, "dur": ended - started}
        if each.state == "failed":
            slice_["cname"] = "terrible"
        yield {**slice_, "args": arguments}


def _message(
    clock: _Clock, pid: int, tid: int, group: GroupAccount, each: MessageAccount, number: int
) -> Iterator[Event]:
    towards = "to" if each.operation == "send" else "from"
    whom = "anyone" if each.peer is None else f"rank {each.peer}"
    arguments = _arguments(group, each, "peer", "tag", "bytes", "dtype", "state", "error")
    event = {
        "pid": pid, "tid": tid, "cat": "sealring", "name": f"{each.operation} {towards} {whom}",
        "id": f"{pid}.{tid}.message.{number}",
    }  # fmt: skip
    yield {**event, "ph": "b", "ts": clock.us(each.posted_ns), "args": arguments}
    yield {**event, "ph": "e", "ts": clock.us(each.ended_ns)}


def _arguments(
    group: GroupAccount, each: CollectiveAccount | MessageAccount, *keys: str
) -> dict[str, Any]:
    known = {key: value for key in keys if (value := getattr(each, key)) is not None}
    return {"group": group.name, **known}


def _arrows(identity: int, slices: list[Event]) -> Iterator[Event]:
    if len(slices) < 2:
        return
    first, *others = sorted(slices, key=lambda event: event["ts"])
    for index, other in enumerate(others):
        flow = {"name": "same collective", "cat": "sealring", "id": f"{identity}.{index}"}
        for phase, end in (("s", first), ("f", other)):
            place = {"pid": end["pid"], "tid": end["tid"], "ts": end["ts"]}
            yield {**flow, **place, "ph": phase, **({"bp": "e"} if phase == "f" else {})}
