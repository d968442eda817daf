"""Links that are made after the group has formed, when a program or a message first needs them.

A member knows from the group's formation who every member is and where it listens; the hello of
such a link states the group's transcript, and the member at the other end must be the very process
that signed it. Either end may dial. For a collective both ends need the link, and the higher rank
dials, or after seconds without it the lower one too; for a message the end that needs it does. It
is dialed until the call that needs the link ends, because a member may run no Python for minutes;
it is given up before only where no process listens any more or where the member refuses for good.

A group that has failed goes on listening until it is closed, and refuses with its failure: a member
without any other link to it learns of it in this way.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from dataclasses import replace

from sealring.core.handshake.messages import Hello
from sealring.core.handshake.terms import Terms
from sealring.core.links.formed import FormedGroup
from sealring.core.links.late_kind import LinksOfAKind
from sealring.core.links.listener import Listener

_LOG = logging.getLogger("sealring")


class LateLinks:
    """Every method may be called from any thread."""

    def __init__(
        self, group: FormedGroup, terms: Terms, linked: Iterable[int], listener: Listener
    ) -> None:
        """`linked` are the members that there are links with for collectives."""
        self._group = group
        self._listener = listener
        self._stopping = threading.Lock()
        """Taken for good by the thread that stops all."""
        self._refusing = threading.Lock()
        """Taken for good by the thread that ends the dialing."""
        agreed = group.agreed
        formed = replace(
            terms,
            transcript=agreed.transcript.hex(),
            certificates=frozenset(each.certificate for each in agreed.members.values()),
        )
        self.collectives = LinksOfAKind(group, formed, linked)
        self.messages = LinksOfAKind(group, replace(formed, epoch=f"{terms.epoch}.messages"), ())
        group.on_failure = self._end_dialing_soon

    def kind_of(self, hello: Hello) -> LinksOfAKind:
        return self.messages if hello.epoch == self.messages.terms.epoch else self.collectives

    def stop(self) -> None:
        """Make no further link, and end the threads. A forked child leaves its parent's alone."""
        if self._group.here:
            self._stop()

    def stop_soon(self) -> None:
        """The same in a thread of its own: the group was dropped, at any point of any thread."""
        self._in_a_thread(self._stop)

    def _end_dialing_soon(self) -> None:
        if not self._refusing.locked():
            self._in_a_thread(self._end_dialing)

    def _in_a_thread(self, job: Callable[[], None]) -> None:
        if self._group.here and not self._stopping.locked():
            try:
                threading.Thread(target=job, name="sealring-late-stop", daemon=True).start()
            except RuntimeError as problem:  # stop() does it when the group is closed
                _LOG.warning("sealring: a thread cannot be started: %s", problem)

    def _end_dialing(self) -> None:
        if self._refusing.acquire(blocking=False):
            for kind in (self.collectives, self.messages):
                kind.stop()

    def _stop(self) -> None:
        if self._stopping.acquire(blocking=False):
            self._listener.stop()
            self._end_dialing()
