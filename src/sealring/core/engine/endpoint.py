"""What a group's collectives and its messages have in common: links, one GPU, an end."""

from __future__ import annotations

import hashlib
import struct
import threading
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from sealring import _native
from sealring.core.engine.failures import Names, error_from
from sealring.core.engine.link_ends import (
    LateEnds,
    LinkEnds,
    LinkSocket,
    hand_over,
    hand_over_late,
    socket_of,
)
from sealring.core.handshake.terms import Purpose
from sealring.core.links.exchange import Exchange, Rest
from sealring.core.links.link import Link
from sealring.errors import GroupError, Unsupported

if TYPE_CHECKING:
    from sealring.core.engine.cuda.attachment import Attachment

Native = TypeVar("Native", _native.Engine, _native.Mailbox)


Count = tuple[int, bytes]
"""Records, and their running hash."""


class LinkTraffic(NamedTuple):
    """Data records that went over a link, each way: how many, and a running SHA-256.

    None where the host does not see the records' tags.
    """

    peer: int
    """Its rank in the group."""
    sent: Count | None
    received: Count | None


def _of_all_lanes(lanes: list[tuple[int, Count | None]]) -> Count | None:
    """As docs/spec.md, section 17, joins them. The first is lane number 0."""
    first = lanes[0][1]
    if any(count is None for _, count in lanes):
        return None
    counts = [(lane, count) for lane, count in lanes if count is not None and count[0]]
    if not counts or counts[-1][0] == lanes[0][0]:
        return first
    digest = hashlib.sha256(b"sealring-1 commitment of lanes\0")
    for number, (records, commitment) in counts:
        digest.update(struct.pack("<IQ", number, records) + commitment)
    return sum(records for _, (records, _) in counts), digest.digest()


class Endpoint(Generic[Native]):
    """Ranks are numbered within the group; errors name them by their numbers in the job."""

    def __init__(
        self,
        native: Native,
        names: Names,
        first_failure: _native.FirstFailure,
        links: Iterable[tuple[int, LinkEnds]],
        lease: _native.Lease | None,
        *,
        purpose: Purpose,
        hosts: Mapping[int, str] | None = None,
        exchange: Exchange | None = None,
    ) -> None:
        """`exchange` opens the pipes to members that are not in `links`, when they are needed.

        Records of a group key are opened on links for collectives. `hosts` has the hosts of all
        members, by rank in the group.
        """
        self._native: Native = native
        self._names = names
        self.first_failure = first_failure
        self._gpu: Attachment | None = None
        self._preparing = threading.Lock()
        """Several threads may come with a first tensor."""
        if lease is not None:
            native.use_lease(lease)
        names.hosts.update(hosts or {})
        self.link_sockets: list[LinkSocket] = []
        for peer, link in links:
            names.hosts[peer] = link.host
            self.link_sockets.append(socket_of(names.members[peer], link))
            hand_over(native, peer, link, publishes=purpose == "collectives")
        self.late = None if exchange is None else LateEnds(self, exchange, purpose, names.members)

    def add_late_link(self, peer: int, link: Link) -> Rest | None:
        """From any thread. Where the group has ended, what is left to do: to tell the peer how."""
        self.link_sockets.append(socket_of(self._names.members[peer], link))
        return hand_over_late(self._native, peer, link)

    def _require_gpu(self, ordinal: int, what: str) -> None:
        if self._gpu is not None and self._gpu.ordinal != ordinal:
            raise Unsupported(
                f"this group's {what} have been on cuda:{self._gpu.ordinal}, this one is on "
                f"cuda:{ordinal}: a rank uses one GPU per group"
            )

    @property
    def has_gpu(self) -> bool:
        return self._gpu is not None

    def commitments(self) -> list[LinkTraffic]:
        """Of each link that there has been, also when the group has ended."""
        by_peer: dict[int, list[tuple[int, Count | None, Count | None]]] = {}
        for peer, lane, sent, received in sorted(
            self._native.commitments(), key=lambda link: link[:2]
        ):
            by_peer.setdefault(peer, []).append((lane, sent, received))
        return [
            LinkTraffic(
                peer,
                _of_all_lanes([(lane, sent) for lane, sent, _ in lanes]),
                _of_all_lanes([(lane, received) for lane, _, received in lanes]),
            )
            for peer, lanes in by_peer.items()
        ]

    def close(self) -> None:
        """Says goodbye to every peer and wipes the keys. An operation under way is ended first."""
        self._native.close()

    def fail(self, failure: _native.Failure) -> None:
        """Ends with a failure that the group saw elsewhere, and tells the other ranks."""
        self._native.fail(failure)
        self._refuse_links(self.error_of(self.first_failure.settle(failure)))

    def _refuse_links(self, failure: GroupError) -> None:
        """Called with every failure: members that have no link with this one are told, too."""
        if self.late is not None:
            self.late.refuse_from_now(failure)

    def release_gpu(self, patience_s: float = 2.0) -> bool:
        """Gives back what a closed group has of the GPU, without the GIL; False if not yet.

        CUDA may wait until the GPU is idle, and other groups' threads must go on meanwhile. What
        streams wait for is first overwritten with ones, which are NaN, but not before the caller's
        stream has come to the call.
        """
        return self._native.release_gpu(patience_s)

    def error_of(self, failure: _native.Failure) -> GroupError:
        return error_from(failure, self._names)
