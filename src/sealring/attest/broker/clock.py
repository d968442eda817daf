"""A broker's time: the machine's clock, except that it never goes back and never jumps ahead.

If the clock could go back, ended nonces, tokens and certificates would be valid again. So when the
machine's clock is moved back, the broker's time goes on by CLOCK_BOOTTIME until the machine's clock
has caught up. A broker that starts goes on from the newest entry of its audit log.

If the clock could jump ahead, all replicas of a store would forget what is still valid, and the
audit log would be dated in the future. A running broker does not follow such a jump. It decides
nothing until the clock is right again or the broker is restarted. A broker that starts believes its
machine's clock: it cannot tell a wrong clock from a long time in which no broker ran.
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
"""How much replicas' clocks may differ, and how far a running broker's clock may be set ahead."""


class SteadyClock:
    def __init__(
        self, wall: Callable[[], float], boottime: Callable[[], float], start: float
    ) -> None:
        """`start` is a time in the past: when the authority was made."""
        self._wall, self._boottime = wall, boottime
        self._lock = threading.Lock()
        self._offset = max(wall(), start) - boottime()
        """The broker's time minus CLOCK_BOOTTIME. It never becomes smaller."""

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
        """Lets the time go on from `seen`, if that is later than now."""
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
