"""From times to a table: which algorithm up to which size, and where one overtakes the other."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, Final

from sealring.schedule import Algorithm, Operation
from sealring.schedule.table import ALGORITHM_NAMES, AlgorithmTable, Key, Placement, Row

A_CHANGE_COSTS: Final = math.log(1.05)
"""Another algorithm must gain this much over the sizes it is for, or the table is noise."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One algorithm's time for one size."""

    operation: str
    hosts: str
    ranks: int
    bytes: int
    algorithm: str
    us: float
    spread: float
    blocks: int
    calls: int

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def fit(cells: Iterable[Cell]) -> AlgorithmTable:
    """The table that loses least against the fastest at every size that was measured."""
    times: dict[tuple[Key, int], dict[int, dict[Algorithm, float]]] = defaultdict(
        lambda: defaultdict(dict)
    )
    for cell in cells:
        key = Operation[cell.operation.upper()], Placement(cell.hosts)
        times[key, cell.ranks][cell.bytes][ALGORITHM_NAMES[cell.algorithm]] = cell.us
    rows: dict[Key, list[Row]] = defaultdict(list)
    for (key, ranks), by_size in sorted(times.items()):
        rows[key].append(_row(ranks, dict(sorted(by_size.items()))))
    return AlgorithmTable({key: tuple(each) for key, each in rows.items()})


def _row(ranks: int, by_size: Mapping[int, Mapping[Algorithm, float]]) -> Row:
    path = _cheapest_path(list(by_size.values()))
    sizes = list(by_size)
    limits: list[int] = []
    algorithms = [path[0]]
    for at, (before, after) in enumerate(pairwise(path)):
        if before is not after:
            limits.append(_overtaken(sizes[at : at + 2], before, after, by_size))
            algorithms.append(after)
    return Row(ranks, tuple(limits), tuple(algorithms))


def _cheapest_path(times: Sequence[Mapping[Algorithm, float]]) -> list[Algorithm]:
    """One algorithm per size: the sum of what each loses to the fastest, and of the changes."""
    best: dict[Algorithm, tuple[float, list[Algorithm]]] = {}
    for at, of_size in enumerate(times):
        fastest = min(of_size.values())
        found: dict[Algorithm, tuple[float, list[Algorithm]]] = {}
        for algorithm, time in of_size.items():
            ways = [
                (cost + A_CHANGE_COSTS * (path[-1] is not algorithm), path)
                for cost, path in best.values()
            ]
            cost, path = min(ways, key=lambda way: way[0]) if at else (0.0, [])
            found[algorithm] = (cost + math.log(time / fastest), [*path, algorithm])
        best = found
    return min(best.values(), key=lambda way: way[0])[1]


def _overtaken(
    sizes: Sequence[int],
    before: Algorithm,
    after: Algorithm,
    by_size: Mapping[int, Mapping[Algorithm, float]],
) -> int:
    """Between two sizes, where the lines through the logarithms of the times cross."""
    small, large = sizes
    ahead = math.log(by_size[small][after] / by_size[small][before])
    behind = math.log(by_size[large][before] / by_size[large][after])
    part = ahead / (ahead + behind) if ahead > 0 and behind > 0 else 0.5
    crossing: float = small * (large / small) ** part
    # To three binary digits: more would pretend to a precision that no measurement has.
    unit = 1 << max(0, int(math.log2(crossing)) - 2)
    return max(small, round(crossing / unit) * unit)
