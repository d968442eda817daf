"""The keys of one link: the connection's exporter over both certificates and both hellos."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from sealring import _native
from sealring.core.handshake.connection import Connection
from sealring.core.handshake.terms import Terms, link_context
from sealring.core.identity.verification import VerifiedPeer
from sealring.limits import KEY_BYTES

_LABEL: Final = b"EXPORTER-sealring-2-link"


@dataclass(frozen=True, slots=True)
class LinkKeys:
    """One key per direction. Not printable."""

    send: _native.Secret = field(repr=False)
    receive: _native.Secret = field(repr=False)

    def wipe(self) -> None:
        self.send.wipe()
        self.receive.wipe()


def export_link_keys(connection: Connection, context: bytes, *, dialer: bool) -> LinkKeys:
    """`context` is this connection's `pair_context`."""
    material = connection.export(_LABEL, 2 * KEY_BYTES, context)
    forth, back = material.part(0, KEY_BYTES), material.part(KEY_BYTES, KEY_BYTES)
    material.wipe()
    return LinkKeys(forth, back) if dialer else LinkKeys(back, forth)


def pair_context(
    connection: Connection,
    terms: Terms,
    peer: VerifiedPeer,
    own_hello: bytes,
    peer_hello: bytes,
    *,
    dialer: bool,
) -> bytes:
    """What both ends of this connection have said and proved, as 32 bytes."""
    ends = [
        (terms.rank, connection.own_fingerprint, own_hello),
        (peer.rank, peer.fingerprint, peer_hello),
    ]
    first, second = ends if dialer else reversed(ends)
    return link_context(
        terms,
        dialer=first[0],
        acceptor=second[0],
        dialer_fingerprint=first[1],
        acceptor_fingerprint=second[1],
        dialer_hello=first[2],
        acceptor_hello=second[2],
    )
