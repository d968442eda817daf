"""A broker's time: its machine's, but it never goes back.

A clock that is moved back would make what has ended good again: nonces, tokens, certificates. So
the time goes on from where it was, as far as CLOCK_BOOTTIME has counted, until the machine's clock
has passed it. A broker that starts goes on from the newest entry of its audit log.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Final

_LOG = logging.getLogger("sealring.broker")
SKEW_SECONDS: Final = 60
"""Replicas' clocks may differ by so much."""


class SteadyClock:
    def __init__(self, wall: Callable[[], float], start: float) -> None:
        """`start` is a time that has passed: when the authority was made."""
        self._wall = wall
        self._lock = threading.Lock()
        self._counted = _boottime()
        self._now = max(wall(), start)

    def __call__(self) -> float:
        with self._lock:
            counted = _boottime()
            self._now = max(self._wall(), self._now + counted - self._counted)
            self._counted = counted
            return self._now

    def start_after(self, seen: float) -> None:
        """Go on from `seen`, if that is later."""
        with self._lock:
            behind = seen - self._now
            self._now = max(self._now, seen)
        if behind > SKEW_SECONDS:
            _LOG.error(
                "this machine's clock is %d s behind the newest entry of the audit log, and the "
                "broker's time goes on from there: set the clock",
                behind,
            )


def _boottime() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)
