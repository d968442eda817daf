"""Why the mesh is not complete when its time is up: the most telling thing that was seen. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sealring.core.links.rendezvous import Address
from sealring.errors import (
    CertificateExpired,
    CertificateNotYetValid,
    CertificateRevoked,
    HandshakeError,
    NotAttested,
    PeerNotAdmitted,
    PeerUnreachable,
    SealringError,
    UnknownAuthority,
    WrongJob,
)

_NAMED = 8

NOT_ADMITTED = (
    UnknownAuthority,
    WrongJob,
    CertificateExpired,
    CertificateNotYetValid,
    CertificateRevoked,
    NotAttested,
    PeerNotAdmitted,
)
"""What a peer is refused with that is not, or no longer, of this job. No group ends because of one,
but when a rank is missing they are the likely reason."""


def is_telling(error: SealringError) -> bool:
    """Whether it is likely to say why a rank is missing."""
    if isinstance(error, NOT_ADMITTED):
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
            return type(problem)(f"{text}; the last attempt: {problem}", peer=rank)
    for stranger in strangers:
        if is_telling(stranger) and (stranger.peer is None or stranger.peer in missing):
            return type(stranger)(f"{text}, and somebody was refused: {stranger}", peer=missing[0])
    where = " or ".join(f"{host} port {port}" for host, port in own_addresses)
    hint = f"this worker listens at {where}" if where else "no address is in the rendezvous store"
    refused = f"; the last connection refused: {strangers[-1]}" if strangers else ""
    return PeerUnreachable(
        f"{text} ({hint}{refused}): check that they run, that they use one rendezvous, that "
        "SEALRING_INTERFACE or SEALRING_ADDRESS names the network between the machines, and that "
        "no firewall keeps them out",
        peer=missing[0],
    )


def _ranks(ranks: Sequence[int]) -> str:
    named = ", ".join(str(rank) for rank in ranks[:_NAMED])
    more = f" and {len(ranks) - _NAMED} more" if len(ranks) > _NAMED else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {named}{more}"
