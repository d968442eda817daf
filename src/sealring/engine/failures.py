"""From what the native engine reports to the exception that the training script gets."""

from __future__ import annotations

import copy
import re
from dataclasses import dataclass, field
from typing import Final

from sealring.engine.datatypes import DType, ReduceKind
from sealring.errors import (
    GroupClosed,
    GroupError,
    MissingRecord,
    NoLongerAdmitted,
    OutOfStep,
    PeerLost,
    PeerSilent,
    ReplayedRecord,
    TamperedRecord,
)
from sealring.schedule.program import ROOTED, Algorithm, Operation

# The numbers are native/failure.hpp's, and travel in alerts.
ERROR_BY_CODE: Final[dict[int, type[GroupError]]] = {
    1: TamperedRecord,
    2: MissingRecord,
    3: ReplayedRecord,
    4: OutOfStep,
    5: PeerLost,
    6: PeerSilent,
    7: GroupClosed,
    8: NoLongerAdmitted,
}
CLOSED: Final = 7
NO_LONGER_ADMITTED: Final = 8

_REMEDY: Final[dict[type[GroupError], str]] = {
    TamperedRecord: "Somebody on the way changes the traffic, or hardware is failing: check the "
    "path between these hosts, then start a new group.",
    MissingRecord: "Somebody on the way drops or reorders records: check the path between these "
    "hosts, then start a new group.",
    ReplayedRecord: "Somebody on the way replays traffic: check the path between these hosts, "
    "then start a new group.",
    OutOfStep: "All ranks must call the same collectives in the same order, with the same shapes "
    "and dtypes.",
    PeerLost: "Look at that rank's own log for why it ended, then start the job again.",
    PeerSilent: "That rank may hang, be stopped or be cut off; if it is only slow, pass a longer "
    "timeout to init_process_group.",
    GroupClosed: "Make a new group.",
    NoLongerAdmitted: "`sealring broker audit` says why; start a new group without it.",
}

_RANK = re.compile(r"\brank (\d{1,9})\b")
_SECONDS = re.compile(r"\b(\d{1,15}\.\d{6}) s\b")
_VIEW = re.compile(
    r"\{operation=(\d+) algorithm=(\d+) dtype=(\d+) reduction=(\d+) root=(\d+) bytes=(\d+)\}"
)


Fields = tuple[int, int, int, int, str]
"""(code, peer, collective, reported_by, text), as the native core tells and takes a failure."""


def fields_of(error: GroupError) -> Fields:
    """What the native core must be told, so that every rank learns of this error."""
    if error.native is not None:
        return error.native
    code = next(code for code, kind in ERROR_BY_CODE.items() if isinstance(error, kind))
    return code, -1 if error.peer is None else error.peer, error.collective or 0, -1, str(error)


def unraised(error: GroupError) -> GroupError:
    """A copy without a traceback, to be kept or to be raised again.

    A traceback refers to the frames of all that raised the error, and so to the script's variables:
    its tensors, and the group itself, which could then never be dropped.
    """
    return copy.copy(error)


@dataclass(frozen=True, slots=True)
class Names:
    """Who the group's ranks are to the people who read errors."""

    rank: int
    members: tuple[int, ...]
    """The group's ranks by their numbers in the job."""
    hosts: dict[int, str] = field(default_factory=dict)

    def number(self, rank: int) -> int | None:
        """A rank's number in the job; None if it has none."""
        return self.members[rank] if 0 <= rank < len(self.members) else None


def error_from(
    fields: Fields,
    names: Names,
    number: int | None = None,
    operation: Operation | None = None,
) -> GroupError:
    """The exception for (code, peer, collective, reported_by, text), met in collective `number`."""
    code, peer, collective, reported_by, text = fields
    kind = ERROR_BY_CODE[code]
    about, host = names.number(peer), names.hosts.get(peer)
    told_by = names.number(reported_by) if reported_by != names.rank else None
    # Another rank may report from a collective that this one has not come to, or has left.
    called = operation.name.lower() if operation is not None and number == collective else None
    numbered = f"collective {collective}" if collective else "a message"
    where = [f"{called}, {numbered}" if called else numbered]
    if not collective and kind in (NoLongerAdmitted, GroupClosed):  # outside of any of them
        where = []
    if about is not None and kind is not OutOfStep:
        where.insert(0, f"rank {about} on {host}" if host else f"rank {about}")
    reported = "" if told_by is None else f"rank {told_by} reported: "
    met = f" ({'; '.join(where)})" if where else ""
    error = kind(
        f"{reported}{_known_words(kind, text)}{_named(text, names)}{met}. The group is closed. "
        f"{_REMEDY[kind]}",
        peer=about,
        host=host,
        operation=called,
        collective=collective or None,
        reported_by=told_by,
    )
    error.native = fields
    return error


def _known_words(kind: type[GroupError], text: str) -> str:
    """What Gloo and torch's wrapper of it say in the same case: scripts and tools look for it."""
    if kind is PeerSilent and (waited := _SECONDS.search(text)):
        return timed_out(float(waited[1]))
    if kind is PeerLost and ("closed" in text or "left the group" in text):
        return "Connection closed by peer: "
    if kind is OutOfStep and _VIEW.search(text):
        return "Detected mismatch between collectives on ranks: "
    return ""


def timed_out(seconds: float) -> str:
    return f"Timed out waiting {seconds * 1000:.0f}ms: "


def _named(text: str, names: Names) -> str:
    """The native engine's numbers put into words, and its ranks into the job's."""

    def words(match: re.Match[str]) -> str:
        operation, algorithm, dtype, reduction, root, total = map(int, match.groups())
        reducing = f" {_name(ReduceKind, reduction)}" if reduction else ""
        rooted = f" at root {root}" if operation in ROOTED else ""
        return (
            f"({_name(Operation, operation)}{reducing}{rooted} of {total} bytes of "
            f"{_name(DType, dtype)}, {_name(Algorithm, algorithm)})"
        )

    def ranked(match: re.Match[str]) -> str:
        known = names.number(int(match[1]))
        return f"rank {match[1] if known is None else known}"

    if f"operation={Operation.INTRODUCTION.value} " in text:
        text += (
            "; a rank in an introduction has its tensor on a GPU: all ranks must keep theirs on "
            "the same kind of device"
        )
    seconds = _SECONDS.sub(lambda match: f"{float(match[1]):g} s", text)
    return _RANK.sub(ranked, _VIEW.sub(words, seconds))


def _name(
    enum: type[Operation] | type[Algorithm] | type[DType] | type[ReduceKind], value: int
) -> str:
    try:
        return enum(value).name.lower()
    except ValueError:
        return f"{enum.__name__.lower()} {value}"
