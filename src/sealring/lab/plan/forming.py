"""How long a job takes to form: its links along a tree, and every member verified by every member.

    T = shared (rank + members * member) + latency * messages + bytes / network

A rank's own work is proportional to the number of members. A message of a round goes up and down
the tree; on its way down, a rank of the tree sends all statements to each of its children in turn.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Final

from sealring.formats.strict import strictly
from sealring.lab.plan.collectives import Cluster
from sealring.lab.plan.profiles import Device, Figure, Network, parse_toml
from sealring.lab.results import ScaleCase

_ROUNDS: Final = 3
_MESSAGES_OF_A_LINK: Final = 10
"""TCP, TLS, hellos, transport: one after the other."""
_FEWEST: Final = 3
"""Numbers of ranks to which a line is fitted."""


@dataclass(frozen=True, slots=True)
class Forming:
    rank_s: Figure
    """Of a rank's processor, for the links of the tree and for all that does not grow."""
    member_s: Figure
    """... and for each member."""
    member_bytes: Figure
    """Of a member's statement, signature and confirmation."""


@cache
def shipped() -> Forming:
    """For profiles that were not measured with `bench scale`."""
    name = "forming.toml"
    text = files("sealring.lab.plan").joinpath("figures", name).read_text()
    found: Forming = strictly(Forming, parse_toml(text, name), name, "profile")
    return found


def forming_of(cases: Sequence[ScaleCase], source: str) -> Forming | None:
    """Fitted to the groups of all ranks; None where too few were measured."""
    worlds = [case for case in cases if case.what == "world" and case.ranks > 8]
    if len({case.ranks for case in worlds}) < _FEWEST:
        return None
    ranks = [float(case.ranks) for case in worlds]
    line = statistics.linear_regression(ranks, [case.cpu_seconds_per_rank for case in worlds])
    if line.slope <= 0:
        return None
    return Forming(
        Figure(max(0.0, line.intercept), source),
        Figure(line.slope, source),
        shipped().member_bytes,
    )


def forming_seconds(
    forming: Forming, ranks: int, cluster: Cluster, device: Device, network: Network
) -> float:
    """From the moment at which all ranks are there until the group exists on all of them."""
    if ranks < 2:
        return 0.0
    depth = (ranks - 1).bit_length()
    # Beside a GPU there is more than one core for its rank.
    shared = cluster.per_host / device.cores_per_host.value if device.kind == "cpu" else 1.0
    working = max(1.0, shared) * (forming.rank_s.value + ranks * forming.member_s.value)
    waiting = network.latency_s.value * (2 * _ROUNDS * depth + _MESSAGES_OF_A_LINK)
    sent = ranks * forming.member_bytes.value * depth * (depth + 1) / 2
    between = cluster.hosts > 1
    return working + (waiting + sent / network.bytes_per_s.value if between else 0.0)
