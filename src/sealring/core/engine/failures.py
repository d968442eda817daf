"""Converts between failures of the native core and the exceptions that a training script gets."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Final

from sealring import _native
from sealring._native import Failure, FailureCode
from sealring.core.schedule.program import OF_THE_GROUP, ROOTED, Algorithm, Operation
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

ERROR_BY_CODE: Final[dict[FailureCode, type[GroupError]]] = {
    FailureCode.TAMPERED: TamperedRecord,
    FailureCode.MISSING: MissingRecord,
    FailureCode.REPLAYED: ReplayedRecord,
    FailureCode.OUT_OF_STEP: OutOfStep,
    FailureCode.PEER_LOST: PeerLost,
    FailureCode.PEER_SILENT: PeerSilent,
    FailureCode.CLOSED: GroupClosed,
    FailureCode.NO_LONGER_ADMITTED: NoLongerAdmitted,
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
    NoLongerAdmitted: "`sealring broker audit` says why; start a new group without it.",
}

_IN_AN_INTRODUCTION: Final = (
    "; a rank in an introduction forms the group, has its tensor on a GPU, or calls its first "
    "large collective: all ranks must make the same calls, on the same kind of device"
)


def failure_of(error: GroupError) -> Failure:
    """The native form of an error. Given to the native core, every rank learns of the error."""
    if error.native is not None:
        return error.native
    code = next(code for code, kind in ERROR_BY_CODE.items() if isinstance(error, kind))
    # The text may contain a file name that is not UTF-8.
    said = str(error).encode(errors="backslashreplace").decode()
    return Failure(code, said, -1 if error.peer is None else error.peer, error.collective or 0)


def unraised(error: GroupError) -> GroupError:
    """Returns a copy without a traceback, to be kept or raised again.

    A traceback refers to the frames that the error passed through, and so to the script's variables
    (its tensors, and the group itself). Such references would keep all of them alive.
    """
    return copy.copy(error)


_OPERATIONS: Final[dict[int, str]] = {each: each.name.lower() for each in Operation}
_ALGORITHMS: Final[dict[int, str]] = {each: each.name.lower() for each in Algorithm}


@dataclass(frozen=True, slots=True)
class Names:
    """The names of the group's ranks in errors: numbers in the job, and hosts."""

    rank: int
    members: tuple[int, ...]
    """The number in the job of each rank of the group."""
    hosts: dict[int, str] = field(default_factory=dict)

    def number(self, rank: int) -> int | None:
        """A rank's number in the job; None if the group has no such rank."""
        return self.members[rank] if 0 <= rank < len(self.members) else None

    def for_native(self) -> _native.Names:
        """The names that the native core uses in the texts of failures."""
        return _native.Names(
            self.members,
            _OPERATIONS,
            _ALGORITHMS,
            ROOTED,
            dict.fromkeys(OF_THE_GROUP, _IN_AN_INTRODUCTION),
        )


def error_from(
    failure: Failure,
    names: Names,
    number: int | None = None,
    operation: Operation | None = None,
) -> GroupError:
    """The exception for a failure that this rank saw in collective `number`."""
    kind = ERROR_BY_CODE[failure.code]
    about, host = names.number(failure.peer), names.hosts.get(failure.peer)
    witness = names.number(failure.reported_by) if failure.reported_by != names.rank else None
    collective = failure.collective
    # Another rank may report a collective that this rank has not begun or has already ended.
    called = operation.name.lower() if operation is not None and number == collective else None
    numbered = f"collective {collective}" if collective else "a message"
    where = [f"{called}, {numbered}" if called else numbered]
    if not collective and kind in (NoLongerAdmitted, GroupClosed):  # outside of any operation
        where = []
    if about is not None and kind is not OutOfStep:
        where.insert(0, f"rank {about} on {host}" if host else f"rank {about}")
    reported = "" if witness is None else f"rank {witness} reported: "
    # A member may lie about what others saw. If it did not come from the witness, say who told it.
    if witness is not None and failure.told_by not in (failure.reported_by, -1):
        reported = f"rank {names.number(failure.told_by)} says that {reported}"
    met = f" ({'; '.join(where)})" if where else ""
    error = kind(
        f"{reported}{failure.text}{met}. The group is closed. {_REMEDY[kind]}",
        peer=about,
        host=host,
        operation=called,
        collective=collective or None,
        reported_by=witness,
    )
    error.native = failure
    return error


def timed_out(seconds: float) -> str:
    """The beginning of Gloo's timeout message; the native core uses it, too."""
    return f"Timed out waiting {seconds * 1000:.0f}ms: "
