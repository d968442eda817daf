"""What it costs that ranks share cores, from all-reduces of more ranks than there are cores."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Final

from sealring.plan.layouts import alone
from sealring.plan.measured import setting_of
from sealring.plan.profiles import Profile, Way, with_figures
from sealring.results import CollectiveCase, Results, median_of
from sealring.schedule import Operation

_SHARES: Final = tuple(step / 20 for step in range(21))


def with_shares(profile: Profile, results: Results) -> Profile:
    for way in profile.ways():
        cases = turns_from(results, way)
        if cases and way == "sealed":
            turn = _turn(profile, way, cases, results)
            profile = with_figures(profile, way, "the shortest all-reduce in a crowd", turn_s=turn)
        elif cases:
            profile = _with_share(profile, way, cases, results)
    return profile


def turns_from(results: Results, way: Way) -> list[CollectiveCase]:
    """The all-reduces of more ranks than cores from which it is learnt what sharing one costs.

    Nearly all of the shortest one is waiting, so of sealed ones it is enough, and the others are
    left to be predicted.
    """
    crowded = [
        case
        for case in [*results.allreduce, *results.collectives]
        if case.collective == "all_reduce" and case.variant == way and case.device == "cpu"
        if case.ranks > results.machine.cores
    ]
    if way != "sealed":
        return crowded
    shared = [case for case in crowded if case.transport == "shm"]
    return sorted(shared, key=lambda case: (case.ranks, case.bytes))[:1]


def _with_share(
    profile: Profile, way: Way, cases: Sequence[CollectiveCase], results: Results
) -> Profile:
    tried = []
    for share in _SHARES:
        shared = with_figures(profile, way, "", core_share=share)
        turn = _turn(shared, way, cases, results)
        turning = with_figures(shared, way, "", turn_s=turn)
        error = statistics.mean(
            abs(_alone(turning, way, case, results) / median_of(case.seconds) - 1) for case in cases
        )
        tried.append((error, share, turn))
    _, share, turn = min(tried)
    source = "all-reduces of more ranks than cores"
    return with_figures(profile, way, source, core_share=share, turn_s=turn)


def _turn(profile: Profile, way: Way, cases: Sequence[CollectiveCase], results: Results) -> float:
    """By least squares of the relative error; a time is all but linear in it."""
    probe = 1e-5
    probed = with_figures(profile, way, "", turn_s=probe)
    along = across = 0.0
    for case in cases:
        measured = median_of(case.seconds)
        base = _alone(profile, way, case, results)
        slope = (_alone(probed, way, case, results) - base) / probe / measured
        along += slope * (1 - base / measured)
        across += slope * slope
    return max(0.0, along / across) if across else 0.0


def _alone(profile: Profile, way: Way, case: CollectiveCase, results: Results) -> float:
    setting = setting_of(results, profile, way, case.ranks, case.transport)
    return alone(setting, Operation.ALL_REDUCE, case.bytes)
