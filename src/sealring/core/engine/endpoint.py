"""The base class of a group's engine and mailbox: links to peers, one GPU, failure and closing."""

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
"""A number of records, and their running SHA-256."""


class LinkTraffic(NamedTuple):
    """The number and the running hash of the data records that went over a link, in each direction.

    A direction is None if the host does not see its records' tags.
    """

    peer: int
    """The peer's rank in the group."""
    sent: Count | None
    received: Count | None


def _of_all_lanes(lanes: list[tuple[int, Count | None]]) -> Count | None:
    """Joins the counts of a link's lanes as docs/spec.md, section 17, says. The first is lane 0."""
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
    """A group's engine or mailbox with its links and its GPU.

    Parameters number ranks within the group; errors name ranks by their numbers in the job.
    """

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

        Only links for collectives get the peers' group keys. `hosts` has the hosts of all members,
        by rank in the group.
        """
        self._native: Native = native
        self._names = names
        self.first_failure = first_failure
        self._gpu: Attachment | None = None
        self._preparing = threading.Lock()
        """Held while the GPU is attached: several threads may bring a first tensor."""
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
        """Takes a link that was made later; may be called by any thread.

        If the group has ended, returns what is left to do: telling the peer how it ended.
        """
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
        """The traffic of every link, also after the group has ended."""
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
        """Sends a goodbye to every peer and wipes the keys. First ends an operation under way."""
        self._native.close()

    def fail(self, failure: _native.Failure) -> None:
        """Ends with a failure that happened elsewhere in the group, and tells the other ranks."""
        self._native.fail(failure)
        self._refuse_links(self.error_of(self.first_failure.settle(failure)))

    def _refuse_links(self, failure: GroupError) -> None:
        """Called with every failure, so that members without a link to this one learn it, too."""
        if self.late is not None:
            self.late.refuse_from_now(failure)

    def release_gpu(self, patience_s: float = 2.0) -> bool:
        """Frees what a closed group holds on the GPU. Returns False if it could not do so in time.

        Releases the GIL, because CUDA may wait until the GPU is idle, and other groups' threads
        must go on. Results that streams still wait for are first overwritten with ones, which are
        NaN in float types, once the caller's stream has reached the call.
        """
        return self._native.release_gpu(patience_s)

    def error_of(self, failure: _native.Failure) -> GroupError:
        return error_from(failure, self._names)
