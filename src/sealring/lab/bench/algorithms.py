"""`python -m sealring.lab algorithms`: compares the algorithms of each operation.

They are run in turn, in one run and one group. The result is the table by which sealring chooses
algorithms (schedule/table.py). One machine can only emulate several hosts: ranks that give their
hosts different names use TCP over loopback. To measure a real network, run this code in the workers
of a job.
"""

from __future__ import annotations

import math
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

from sealring.core.schedule import (
    ALGORITHMS,
    Algorithm,
    Operation,
    Selection,
    Topology,
    cuts_into_chunks,
    program_for,
)
from sealring.core.schedule.table import (
    ALGORITHM_NAMES,
    OPERATIONS,
    AlgorithmTable,
    Key,
    Placement,
    Row,
)
from sealring.core.settings import with_settings
from sealring.errors import ConfigurationError
from sealring.lab.bench.collectives import CALLS, Tensors
from sealring.lab.bench.harness import (
    Progress,
    Timings,
    in_turn,
    reports_of,
    sealed_world,
)
from sealring.lab.bench.workers import Report
from sealring.lab.results import this_machine

SIZES: Final = tuple(1024 << shift for shift in range(0, 15, 3))
"""1 KiB to 4 MiB. Longer messages use the algorithm that is best for large ones."""
CROWDED_BYTES: Final = 512 << 10
"""The largest size if ranks share cores; larger ones would measure the cores."""
_OF_A_PART: Final = frozenset({Operation.REDUCE_SCATTER, Operation.ALL_GATHER})
"""Operations in which a rank's message is one part, and the tensor has one part for each rank."""
Plan = Sequence[tuple[Operation, int]]


def plan_of(operations: Sequence[str], sizes: Sequence[int]) -> list[tuple[Operation, int]]:
    unknown = [name for name in operations if name not in OPERATIONS]
    if unknown:
        raise ConfigurationError(
            f"{unknown[0]!r} is not an operation with a choice of algorithms; there is "
            f"{', '.join(OPERATIONS)}"
        )
    return [(OPERATIONS[name], size) for name in operations for size in sizes]


def candidates(operation: Operation, topology: Topology) -> list[Algorithm]:
    """The algorithms to compare. On one host a hierarchy has only one level, so it is left out."""
    flat = Placement.of(topology) is Placement.ONE
    return [
        algorithm
        for algorithm in ALGORITHMS[operation]
        if not (flat and algorithm is Algorithm.HIERARCHICAL)
    ]


def busiest_rank_bytes(
    operation: Operation, algorithm: Algorithm, topology: Topology, size: int
) -> int:
    """The bytes that the busiest rank seals and opens, computed from the programs."""
    world = len(topology.host_of)
    cut = cuts_into_chunks(operation, algorithm)
    length = size // world if cut else size

    def of(rank: int) -> int:
        program = program_for(operation, algorithm, world, rank, topology=topology)
        slots = [length] * program.slots
        return program.sealed_bytes(slots) + program.opened_bytes(slots)

    return max(map(of, range(world)))


def measure_algorithms(
    plan: Plan,
    ranks: int,
    hosts: int,
    *,
    blocks: int,
    progress: Progress | None = None,
) -> Iterator[list[Cell]]:
    """Yields the cells of one operation and size at a time. `progress` gets the finished part."""
    if ranks > len(os.sched_getaffinity(0)):
        plan = [(operation, size) for operation, size in plan if size <= CROWDED_BYTES]
    arguments = (ranks, hosts, list(plan), blocks)
    return reports_of(ranks, _pretending, *arguments, progress=progress)


def about_this_machine(ranks: Sequence[int], hosts: Sequence[str], blocks: int) -> dict[str, str]:
    """The origin of a table, for its file, without characters that TOML would escape."""
    machine = this_machine()
    cpu = "".join(char for char in machine.cpu if char.isprintable() and char not in '"\\')
    return {
        "by": f"sealring {machine.sealring} bench algorithms, the fastest of {blocks} blocks",
        "on": f"{machine.cores} cores of {machine.architecture}, {cpu}",
        "torch": machine.torch,
        "ranks": ", ".join(map(str, ranks)),
        "hosts": ", ".join(hosts),
    }


# ---- in the workers


def _pretending(
    rank: int,
    report: Report,
    ranks: int,
    hosts: int,
    plan: list[tuple[Operation, int]],
    blocks: int,
) -> None:
    if hosts > 1:
        host = rank * hosts // ranks
        os.environ.update(with_settings(os.environ, host=f"host-{host}"))
        # Different addresses, as of different hosts, so that shared memory is not used.
        os.environ["SEALRING_ADDRESS"] = f"127.0.0.{2 + host}"
    in_a_worker(plan, blocks, report)


def in_a_worker(plan: Plan, blocks: int, report: Report) -> None:
    """Measures in the workers of a job; all ranks call it. Rank 0 reports cells and progress."""
    import torch.distributed as dist

    with sealed_world() as group:
        for operation, size in plan:
            calls = max(1, min(10, (2 << 20) // (size * dist.get_world_size())))
            samples = _turns(operation, size, group, blocks, calls, report)
            if dist.get_rank() == 0:
                report(_cells(operation, size, group.topology, samples, calls))


def _turns(
    operation: Operation, size: int, group: Any, blocks: int, calls: int, report: Report
) -> dict[str, Timings]:
    import torch.distributed as dist

    ranks = dist.get_world_size()
    whole = size * ranks if operation in _OF_A_PART else size
    tensors = Tensors(dist.get_rank(), ranks, whole)
    call = CALLS[operation.name.lower()]
    table_alone = group.selection

    def variant(algorithm: Algorithm) -> Callable[[], None]:
        fixed = Selection(group.topology, fixed={operation: algorithm})

        def run() -> None:
            group.selection = fixed
            call(tensors, dist, group)

        return run

    def line_up() -> None:
        group.selection = table_alone
        dist.barrier()

    variants = {
        algorithm.name.lower(): variant(algorithm)
        for algorithm in candidates(operation, group.topology)
    }
    try:
        return in_turn(variants, report, blocks=blocks, calls=calls, warm_up=2, between=line_up)
    finally:
        group.selection = table_alone


def _cells(
    operation: Operation, size: int, topology: Topology, samples: Mapping[str, Timings], calls: int
) -> list[Cell]:
    return [
        Cell(
            operation=operation.name.lower(),
            hosts=Placement.of(topology).value,
            ranks=len(topology.host_of),
            bytes=size,
            algorithm=algorithm,
            us=round(times.median * 1e6, 1),
            fastest_us=round(times.fastest * 1e6, 1),
            spread=round(times.spread, 4),
            busiest_rank_bytes=busiest_rank_bytes(
                operation, ALGORITHM_NAMES[algorithm], topology, size
            ),
            blocks=len(times.seconds),
            calls=calls,
        )
        for algorithm, times in samples.items()
    ]


# ---- from times to a table: which algorithm up to which size, and where one overtakes the other
#
# Times within the factor ALIKE count as equal. Then the algorithm is chosen whose busiest rank has
# the least to seal and open: with a core for every rank it is the faster one, and with fewer cores
# the times hardly differ. Above the largest measured size only this decides, because time is then
# proportional to bytes.


ALIKE: Final = 1.05
A_CHANGE_COSTS: Final = math.log(1.05)
"""A further algorithm must gain this much over its sizes; otherwise the table would show noise."""
_A_TRIFLE: Final = 1e-3
"""The weight of the second measure, which decides only between equal algorithms."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One algorithm's time for one size."""

    operation: str
    hosts: str
    ranks: int
    bytes: int
    algorithm: str
    us: float
    """The median time."""
    fastest_us: float
    """The time of the fastest block. Other programs on a machine can only add to a time."""
    spread: float
    busiest_rank_bytes: int
    """The plaintext that the busiest rank seals and opens."""
    blocks: int
    calls: int


Times = Mapping[Algorithm, Cell]


def fit(cells: Iterable[Cell]) -> AlgorithmTable:
    """Computes the table that loses least against the fastest algorithm over all measured sizes."""
    found: dict[tuple[Key, int], dict[int, dict[Algorithm, Cell]]] = defaultdict(
        lambda: defaultdict(dict)
    )
    for cell in cells:
        key = Operation[cell.operation.upper()], Placement(cell.hosts)
        found[key, cell.ranks][cell.bytes][ALGORITHM_NAMES[cell.algorithm]] = cell
    rows: dict[Key, list[Row]] = defaultdict(list)
    for (key, ranks), by_size in sorted(found.items()):
        row = _row(ranks, dict(sorted(by_size.items())))
        # A row that equals the previous one is left out.
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
    """Returns one algorithm per size, and one for all larger sizes.

    The path minimizes the sum of the losses against the best and of the costs of changes.
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
    """The loss of each algorithm against the best by `first`, and between equals by `then`."""
    least, least_then = (min(map(each, of_size.values())) for each in (first, then))
    return {
        algorithm: max(0.0, math.log(first(cell) / least / ALIKE))
        + _A_TRIFLE * math.log(then(cell) / least_then)
        for algorithm, cell in of_size.items()
    }


def _overtaken(
    sizes: Sequence[int], before: Algorithm, after: Algorithm, by_size: Mapping[int, Times]
) -> int:
    """The size between two sizes where the lines through the logarithms of the times cross."""
    small, large = sizes
    ahead, behind = (
        math.log(by_size[size][slow].fastest_us / by_size[size][fast].fastest_us)
        for size, fast, slow in ((small, before, after), (large, after, before))
    )
    part = ahead / (ahead + behind) if ahead > 0 and behind > 0 else 0.5
    crossing: float = small * (large / small) ** part
    # Rounded to three binary digits, as the measurement is not more precise.
    unit = 1 << max(0, int(math.log2(crossing)) - 2)
    return max(small, round(crossing / unit) * unit)
