"""From times to a table: which algorithm up to which size, and where one overtakes the other.

Times within ALIKE of each other count as equal, and then the algorithm is taken whose busiest rank
has the least to seal and open: on a machine with a core for every rank that one is the faster, and
one with fewer cores than ranks can hardly tell them apart. Beyond the largest size that was
measured that alone decides: there, time is bytes.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, Final

from sealring.schedule import Algorithm, Operation
from sealring.schedule.table import ALGORITHM_NAMES, AlgorithmTable, Key, Placement, Row

ALIKE: Final = 1.05
A_CHANGE_COSTS: Final = math.log(1.05)
"""Another algorithm must gain this much over the sizes it is for, or the table is noise."""
_A_TRIFLE: Final = 1e-3
"""What decides between equals must not decide anything else."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One algorithm's time for one size."""

    operation: str
    hosts: str
    ranks: int
    bytes: int
    algorithm: str
    us: float
    """The median."""
    fastest_us: float
    """The fastest block: what else runs on a machine only ever adds to a time."""
    spread: float
    busiest_rank_bytes: int
    """Plaintext that it seals and opens."""
    blocks: int
    calls: int

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


Times = Mapping[Algorithm, Cell]


def fit(cells: Iterable[Cell]) -> AlgorithmTable:
    """The table that loses least against the fastest at every size that was measured."""
    found: dict[tuple[Key, int], dict[int, dict[Algorithm, Cell]]] = defaultdict(
        lambda: defaultdict(dict)
    )
    for cell in cells:
        key = Operation[cell.operation.upper()], Placement(cell.hosts)
        found[key, cell.ranks][cell.bytes][ALGORITHM_NAMES[cell.algorithm]] = cell
    rows: dict[Key, list[Row]] = defaultdict(list)
    for (key, ranks), by_size in sorted(found.items()):
        row = _row(ranks, dict(sorted(by_size.items())))
        # A row that says what the one before it says is none.
        if not rows[key] or (row.up_to_bytes, row.algorithms) != (
            rows[key][-1].up_to_bytes,
            rows[key][-1].algorithms,
        ):
            rows[key].append(row)
    return AlgorithmTable({key: tuple(each) for key, each in rows.items()})


def _row(ranks: int, by_size: Mapping[int, Times]) -> Row:
    sizes = list(by_size)
    *path, beyond = _cheapest_path(list(by_size.values()))
    limits: list[int] = []
    algorithms = [path[0]]
    for at, (before, after) in enumerate(pairwise(path)):
        if before is not after:
            limits.append(_overtaken(sizes[at : at + 2], before, after, by_size))
            algorithms.append(after)
    if beyond is not path[-1]:
        limits.append(sizes[-1])
        algorithms.append(beyond)
    return Row(ranks, tuple(limits), tuple(algorithms))


def _cheapest_path(times: Sequence[Times]) -> list[Algorithm]:
    """One algorithm per size, and one for what is longer than all of them.

    It has the least sum of what each loses to the best, and of what the changes cost.
    """
    best: dict[Algorithm, tuple[float, list[Algorithm]]] = {}
    losses = [*(_loss(of_size, _time, _work) for of_size in times), _loss(times[-1], _work, _time)]
    for at, loss in enumerate(losses):
        found: dict[Algorithm, tuple[float, list[Algorithm]]] = {}
        for algorithm in times[-1]:
            ways = [
                (cost + A_CHANGE_COSTS * (path[-1] is not algorithm), path)
                for cost, path in best.values()
            ]
            cost, path = min(ways, key=lambda way: way[0]) if at else (0.0, [])
            found[algorithm] = (cost + loss[algorithm], [*path, algorithm])
        best = found
    return min(best.values(), key=lambda way: way[0])[1]


def _time(cell: Cell) -> float:
    return cell.fastest_us


def _work(cell: Cell) -> float:
    return cell.busiest_rank_bytes + 1.0


def _loss(
    of_size: Times, first: Callable[[Cell], float], then: Callable[[Cell], float]
) -> dict[Algorithm, float]:
    """What each loses to the best by one measure, and between equals by the other."""
    least, least_then = (min(map(each, of_size.values())) for each in (first, then))
    return {
        algorithm: max(0.0, math.log(first(cell) / least / ALIKE))
        + _A_TRIFLE * math.log(then(cell) / least_then)
        for algorithm, cell in of_size.items()
    }


def _overtaken(
    sizes: Sequence[int], before: Algorithm, after: Algorithm, by_size: Mapping[int, Times]
) -> int:
    """Between two sizes, where the lines through the logarithms of the times cross."""
    small, large = sizes
    ahead, behind = (
        math.log(by_size[size][slow].fastest_us / by_size[size][fast].fastest_us)
        for size, fast, slow in ((small, before, after), (large, after, before))
    )
    part = ahead / (ahead + behind) if ahead > 0 and behind > 0 else 0.5
    crossing: float = small * (large / small) ** part
    # To three binary digits: more would pretend to a precision that no measurement has.
    unit = 1 << max(0, int(math.log2(crossing)) - 2)
    return max(small, round(crossing / unit) * unit)
