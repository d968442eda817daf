"""The counts of this process as one flat dictionary, which every logger takes."""

from __future__ import annotations

import time
from typing import Final

from sealring.observe.metrics import COUNTERS
from sealring.observe.process import counts_of_all_groups, recorders

MOST_PEERS: Final = 64
"""With more peers there is one sum of the waiting."""


class Figures:
    """Called at every log: the counts of all groups of this process, and rates since the last call.

    wandb.log(figures()), or writer.add_scalar for each name and value.
    """

    def __init__(self, prefix: str = "sealring/") -> None:
        self._prefix = prefix
        self._last: tuple[float, float, float] | None = None

    def __call__(self) -> dict[str, float]:
        totals = {metric.plain_name: 0.0 for metric in COUNTERS}
        by_peer: dict[int, float] = {}
        for series, value in counts_of_all_groups().items():
            totals[series.metric] += value
            if series.metric == "wait_seconds":
                peer = int(series.label)
                by_peer[peer] = by_peer.get(peer, 0.0) + value
        found = {**totals, "groups": float(sum(not each.closed for each in recorders()))}
        if len(by_peer) <= MOST_PEERS:
            for peer, seconds in sorted(by_peer.items()):
                found[f"wait_seconds/rank_{peer}"] = seconds
        found |= self._rates(totals["sealed_bytes"], totals["opened_bytes"])
        return {f"{self._prefix}{name}": value for name, value in found.items()}

    def _rates(self, sealed: float, opened: float) -> dict[str, float]:
        now = time.monotonic()
        last, self._last = self._last, (now, sealed, opened)
        if last is None or now <= last[0]:
            return {}
        seconds = now - last[0]
        return {
            "sealed_bytes_per_second": (sealed - last[1]) / seconds,
            "opened_bytes_per_second": (opened - last[2]) / seconds,
        }
