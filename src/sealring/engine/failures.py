"""From what the native engine reports to the exception that the training script gets."""

from __future__ import annotations

import re
from typing import Final

from sealring.engine.datatypes import DType, ReduceKind
from sealring.errors import (
    GroupClosed,
    GroupError,
    MissingRecord,
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
}

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
}

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


def error_from(fields: Fields, *, rank: int, hosts: dict[int, str]) -> GroupError:
    """The exception for (code, peer, collective, reported_by, text) as seen by `rank`."""
    code, peer, collective, reported_by, text = fields
    kind = ERROR_BY_CODE[code]
    about = f"rank {peer} ({hosts[peer]})" if peer in hosts else f"rank {peer}"
    seen_by = f"rank {reported_by} reported: " if reported_by not in (-1, rank) else ""
    between = f", from {about}" if peer >= 0 and kind is not OutOfStep else ""
    where = f"collective {collective}" if collective else "a message"
    message = f"{seen_by}{_named(text)} ({where}{between}). The group is closed. {_REMEDY[kind]}"
    error = kind(
        message,
        peer=peer if peer >= 0 else None,
        collective=collective,
        reported_by=reported_by if reported_by not in (-1, rank) else None,
    )
    error.native = fields
    return error


def _named(text: str) -> str:
    """The native engine's numbers put into words."""

    def words(match: re.Match[str]) -> str:
        operation, algorithm, dtype, reduction, root, total = map(int, match.groups())
        reducing = f" {_name(ReduceKind, reduction)}" if reduction else ""
        rooted = f" at root {root}" if operation in ROOTED else ""
        return (
            f"({_name(Operation, operation)}{reducing}{rooted} of {total} bytes of "
            f"{_name(DType, dtype)}, {_name(Algorithm, algorithm)})"
        )

    return _VIEW.sub(words, text)


def _name(
    enum: type[Operation] | type[Algorithm] | type[DType] | type[ReduceKind], value: int
) -> str:
    try:
        return enum(value).name.lower()
    except ValueError:
        return f"{enum.__name__.lower()} {value}"
