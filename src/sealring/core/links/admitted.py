"""Connections whose peer is admitted, until each is a link: a conversation each, and no thread."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Final, TypeAlias

from sealring.core.handshake.incoming import Incoming
from sealring.core.links.unproven import Unproven
from sealring.errors import MalformedSetup, PeerUnreachable, SealringError

_LOG = logging.getLogger("sealring")

HandOver: TypeAlias = Callable[[], None]
"""Called when the socket is no longer the listener's, or the dialer's."""
Serving: TypeAlias = Generator[None, None, HandOver]
"""What is said with an admitted peer until the link is made. It yields while bytes are missing."""
MOST_OF_A_WORKER: Final = 4
"""Connections of one worker that are being set up at once: two kinds of links, and again."""


@dataclass(eq=False, slots=True)
class Admitted:
    connection: Unproven
    """As it was until its peer was admitted."""
    incoming: Incoming
    serving: Serving

    def go_on(self) -> HandOver | SealringError | None:
        """With the bytes that have come; None while some are missing.

        An error is told to the peer. The socket stays open, so that the peer can read that.
        """
        try:
            next(self.serving)
            if time.monotonic() < self.incoming.deadline:
                return None
            return self.give_up("did not finish the set-up in time")
        except StopIteration as ended:
            hand_over: HandOver = ended.value
            return hand_over
        except SealringError as error:
            self.incoming.tell(error)
            return error
        except Exception as problem:
            # Whatever this is, the peer may have caused it, so it must not end the job.
            _LOG.exception("sealring: a connection was dropped")
            who = self.incoming.who
            return MalformedSetup(f"the connection of {who} was dropped: {problem!r}")

    def give_up(self, why: str) -> SealringError:
        """The error of a link that is not made."""
        self.serving.close()
        error = PeerUnreachable(f"{self.incoming.who} {why}", peer=self.incoming.rank, proven=True)
        self.incoming.tell(error)
        return error

    def close(self) -> None:
        self.serving.close()
        self.connection.close()

    def hand_over(self, call: HandOver) -> None:
        try:
            call()
        except Exception:
            _LOG.exception("sealring: a worker's connection was not served to its end")
