"""Why the mesh is not complete when its time is up: the most telling thing that was seen. Pure."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final

from sealring.core.links.rendezvous import Address
from sealring.errors import (
    ConfigurationError,
    HandshakeError,
    PeerNotAdmitted,
    PeerUnreachable,
    SealringError,
)

_NAMED = 8

NOT_ADMITTED: Final = {
    "handshake.wrong_job",
    "handshake.peer_not_admitted",
    *PeerNotAdmitted.codes,
}
"""Codes of what a peer is refused with that is not, or no longer, of this job. No group ends
because of one, but when a rank is missing they are the likely reason."""


def is_telling(error: SealringError) -> bool:
    """Whether it is likely to say why a rank is missing."""
    if error.code in NOT_ADMITTED:
        return True
    return isinstance(error, HandshakeError) and error.misdirected


def time_is_up(
    *,
    missing: Sequence[int],
    awaited: Sequence[int],
    timeout: float,
    own_addresses: Sequence[Address],
    problems: Mapping[int, SealringError],
    strangers: Sequence[HandshakeError],
) -> HandshakeError:
    """The error to raise.

    `missing` ranks have no link. `awaited` ones have, and without their message the members cannot
    agree; they may wait for others in turn. `problems` is what dialing met, `strangers` who was
    refused here; they decide nothing but the name of the error.
    """
    if not missing:
        return PeerUnreachable(
            f"all ranks are linked to this one, but {_ranks(awaited)} did not finish within "
            f"{timeout:g} s: look at the errors there",
            peer=awaited[0] if awaited else None,
        )
    text = f"{_ranks(missing)} did not appear within {timeout:g} s"
    for rank in missing:
        problem = problems.get(rank)
        if isinstance(problem, HandshakeError):
            told = f"{text}; the last attempt: {problem}"
            return type(problem)(told, peer=rank, code=problem.code)
    for stranger in strangers:
        if is_telling(stranger) and (stranger.peer is None or stranger.peer in missing):
            told = f"{text}, and somebody was refused: {stranger}"
            return type(stranger)(told, peer=missing[0], code=stranger.code)
    where = " or ".join(f"{host} port {port}" for host, port in own_addresses)
    hint = f"this worker listens at {where}" if where else "no address is in the rendezvous store"
    refused = f"; the last connection refused: {strangers[-1]}" if strangers else ""
    return PeerUnreachable(
        f"{text} ({hint}{refused}): check that they run, that they use one rendezvous, that "
        "SEALRING_ADDRESS names the network between the machines, and that no firewall keeps them "
        "out (docs/reach.md)",
        peer=missing[0],
    )


def _ranks(ranks: Sequence[int]) -> str:
    named = ", ".join(str(rank) for rank in ranks[:_NAMED])
    more = f" and {len(ranks) - _NAMED} more" if len(ranks) > _NAMED else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {named}{more}"


_NO_THREAD: Final = "can't start new thread"
"""Python says it with a bare RuntimeError."""
_ADVICE: Final = {
    errno.EMFILE: "raise this process's limit of open files (ulimit -n)",
    errno.ENFILE: "raise this machine's limit of open files (sysctl fs.file-max)",
    errno.EAGAIN: "raise this user's limit of processes (ulimit -u), or the container's",
    errno.ENOMEM: "free memory on this machine, or raise the container's limit",
    errno.ENOBUFS: "free memory on this machine, or raise the container's limit",
}
"""By what is lacking. Any other OSError is left as it is: a store may have raised it."""


@contextmanager
def explain_resource_limits() -> Iterator[None]:
    try:
        yield
    except OSError as problem:
        if problem.errno not in _ADVICE:
            raise
        raise _named(problem.errno) from problem
    except RuntimeError as problem:
        if str(problem) != _NO_THREAD:
            raise
        raise _named(errno.EAGAIN) from problem


def _named(number: int) -> ConfigurationError:
    why = _NO_THREAD if number == errno.EAGAIN else os.strerror(number)
    return ConfigurationError(f"this worker cannot form a group ({why}): {_ADVICE[number]}")
