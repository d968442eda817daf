"""A broker's time: its machine's, but it never goes back and never jumps ahead.

A clock that is moved back would make what has ended good again: nonces, tokens, certificates. So
the time goes on from where it was, as far as CLOCK_BOOTTIME has counted, until the machine's clock
has passed it. A broker that starts goes on from the newest entry of its audit log.

A clock that jumps ahead would make all replicas of a store forget what is still good, and date the
audit log in the future. A live broker does not follow it, and decides nothing until the clock is
right again or the broker is started again. A broker that starts believes its machine's clock: it
cannot tell a wrong clock from a long time in which no broker ran.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Final

from sealring.errors import BrokerUnavailable

_LOG = logging.getLogger("sealring.attest.broker")
SKEW_SECONDS: Final = 60
"""Replicas' clocks may differ by so much, and a live broker's may be set ahead by as much."""


class SteadyClock:
    def __init__(
        self, wall: Callable[[], float], boottime: Callable[[], float], start: float
    ) -> None:
        """`start` is a time that has passed: when the authority was made."""
        self._wall, self._boottime = wall, boottime
        self._lock = threading.Lock()
        self._offset = max(wall(), start) - boottime()
        """The broker's time less CLOCK_BOOTTIME. It never becomes smaller."""

    def __call__(self) -> float:
        with self._lock:
            counted = self._boottime()
            ahead = self._wall() - counted - self._offset
            if ahead > SKEW_SECONDS:
                raise BrokerUnavailable(
                    f"the clock of the broker's machine jumped {ahead:.0f} s ahead, so the broker "
                    "decides nothing: set the clock right; if it is right now, start the broker "
                    "again",
                    code="broker.store_unavailable",
                )
            self._offset += max(0.0, ahead)
            return counted + self._offset

    def start_after(self, seen: float) -> None:
        """Go on from `seen`, if that is later."""
        with self._lock:
            behind = seen - self._boottime() - self._offset
            self._offset += max(0.0, behind)
        if behind > SKEW_SECONDS:
            _LOG.error(
                "this machine's clock is %d s behind the newest entry of the audit log, and the "
                "broker's time goes on from there: set the clock",
                behind,
            )


def boottime() -> float:
    """Seconds of CLOCK_BOOTTIME: it counts during suspend, and no program can set it."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
