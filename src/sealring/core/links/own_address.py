"""Watches the address that the rendezvous store shows for this worker."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Sequence
from typing import Final

from sealring.core.links.dialer import Dialer
from sealring.core.links.rendezvous import Address, AddressBook
from sealring.errors import HandshakeError, PeerUnreachable

_LOG = logging.getLogger("sealring")

LOOK_SECONDS: Final = 1.0


class OwnAddress:
    """One thread uses it."""

    def __init__(
        self, book: AddressBook, rank: int, addresses: Sequence[Address], dialer: Dialer
    ) -> None:
        self._book = book
        self._rank = rank
        self._addresses = tuple(addresses)
        self._dialer = dialer
        self._next_look = time.monotonic() + LOOK_SECONDS
        self._probing = False

    def publish(self) -> None:
        self._book.publish(self._rank, self._addresses)

    def check(self) -> None:
        """Put our address back if the store shows another one, and look who answers there.

        Either a second worker has our rank, which it can prove, or the store is wrong. The address
        is corrected first, because a false one may lead to a server that answers slowly.
        """
        if time.monotonic() < self._next_look:
            return
        self._next_look = time.monotonic() + LOOK_SECONDS
        found: tuple[Address, ...] = ()
        shown = "another"
        try:
            found = self._book.lookup(self._rank)
            shown = shown if found else "no"
        except PeerUnreachable:
            shown = "no"  # it does not answer
        except HandshakeError:
            pass
        if found == self._addresses:
            return
        if not self._probing:
            _LOG.warning("sealring: the store shows %s address for rank %d", shown, self._rank)
        with contextlib.suppress(PeerUnreachable):
            self.publish()
        if not self._probing:
            self._probing = True  # one at a time: the store chooses how many addresses there are
            self._dialer.probe(self._rank, found, self._on_probed)

    def _on_probed(self) -> None:
        self._probing = False
