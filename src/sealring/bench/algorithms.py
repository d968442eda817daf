"""`sealring bench algorithms`: the algorithms of each operation against each other.

They take turns in one run, on one group, and the outcome is the table that sealring chooses by
(schedule/table.py). On one machine it can only pretend to have several hosts: ranks that call their
hosts by different names talk TCP over loopback. What a real network does to the choice is measured
there, with this same code in the workers of a job.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from sealring.bench.crossover import Cell
from sealring.bench.exchange import CALLS, Tensors
from sealring.bench.measure import Samples, alternate, of_slowest
from sealring.bench.workers import Report, run_workers
from sealring.errors import ConfigurationError
from sealring.schedule import (
    ALGORITHMS,
    Algorithm,
    Operation,
    Selection,
    Topology,
    cuts_into_chunks,
    program_for,
)
from sealring.schedule.table import ALGORITHM_NAMES, OPERATIONS, Placement
from sealring.version import __version__

SIZES: Final = tuple(1024 << shift for shift in range(0, 15, 3))
"""1 KiB to 4 MiB: what is longer takes what is best at the end."""
CROWDED_BYTES: Final = 512 << 10
"""Where ranks share cores, longer ones would measure the cores."""
_OF_A_PART: Final = frozenset({Operation.REDUCE_SCATTER, Operation.ALL_GATHER})
"""Where a rank's message is one part, and the tensor has one for each rank."""
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
    """The algorithms that differ: on one host a hierarchy has only its lowest level."""
    flat = Placement.of(topology) is Placement.ONE
    return [
        algorithm
        for algorithm in ALGORITHMS[operation]
        if not (flat and algorithm is Algorithm.HIERARCHICAL)
    ]


def busiest_rank_bytes(
    operation: Operation, algorithm: Algorithm, topology: Topology, size: int
) -> int:
    """What the rank with the most of it seals and opens, by the programs themselves."""
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
    progress: Callable[[float], None] | None = None,
) -> Iterator[list[Cell]]:
    """Yields the cells of one operation and size at a time; `progress` gets the part done of it."""
    if ranks > len(os.sched_getaffinity(0)):
        plan = [(operation, size) for operation, size in plan if size <= CROWDED_BYTES]
    for _, report in run_workers(ranks, _pretending, ranks, hosts, list(plan), blocks):
        if isinstance(report, list):
            yield report
        elif progress is not None:
            progress(report)


def about_this_machine(ranks: Sequence[int], hosts: Sequence[str], blocks: int) -> dict[str, str]:
    """What a table's file says of its origin."""
    import torch

    return {
        "by": f"sealring {__version__} bench algorithms, the fastest of {blocks} blocks",
        "on": f"{len(os.sched_getaffinity(0))} cores of {platform.machine()}, {_cpu_name()}",
        "torch": torch.__version__,
        "ranks": ", ".join(map(str, ranks)),
        "hosts": ", ".join(hosts),
    }


def _cpu_name() -> str:
    """What the kernel calls the processor, without characters that a TOML string would escape."""
    name = platform.processor() or "unnamed processor"
    try:
        with open("/proc/cpuinfo") as file:
            for line in file:
                key, _, value = line.partition(":")
                if key.strip() in ("model name", "CPU part"):
                    name = value.strip()
                    break
    except OSError:
        pass
    return "".join(char for char in name if char.isprintable() and char not in '"\\')


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
        os.environ["SEALRING_HOST"] = f"host-{host}"
        # Addresses that differ, as two hosts' do, so that none is offered shared memory.
        os.environ["SEALRING_ADDRESS"] = f"127.0.0.{2 + host}"
    in_a_worker(plan, blocks, report)


def in_a_worker(plan: Plan, blocks: int, report: Report) -> None:
    """All ranks of a job call it; rank 0 reports lists of cells, and parts done in between."""
    import torch.distributed as dist

    dist.init_process_group("sealring")
    group: Any = dist.group.WORLD
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for operation, size in plan:
        samples = _turns(operation, size, group, blocks, report if rank == 0 else None)
        everyones: list[Any] = [None] * ranks
        dist.all_gather_object(everyones, samples)
        if rank == 0:
            report(_cells(operation, size, group.topology, everyones, blocks, _calls(size, ranks)))
    dist.barrier()
    dist.destroy_process_group()


def _turns(
    operation: Operation, size: int, group: Any, blocks: int, report: Report | None
) -> dict[str, Samples]:
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

    def after_block(block: int) -> None:
        if report is not None:
            report((block + 1) / blocks)

    variants = {
        algorithm.name.lower(): variant(algorithm)
        for algorithm in candidates(operation, group.topology)
    }
    try:
        return alternate(
            variants,
            blocks=blocks,
            calls=_calls(size, ranks),
            warm_up=2,
            between=line_up,
            after_block=after_block,
        )
    finally:
        group.selection = table_alone


def _calls(size: int, ranks: int) -> int:
    return max(1, min(10, (2 << 20) // (size * ranks)))


def _cells(
    operation: Operation,
    size: int,
    topology: Topology,
    everyones: Sequence[Mapping[str, Samples]],
    blocks: int,
    calls: int,
) -> list[Cell]:
    cells = []
    for algorithm, times in of_slowest(everyones).items():
        cells.append(
            Cell(
                operation=operation.name.lower(),
                hosts=Placement.of(topology).value,
                ranks=len(everyones),
                bytes=size,
                algorithm=algorithm,
                us=round(times.median * 1e6, 1),
                fastest_us=round(times.fastest * 1e6, 1),
                spread=round(times.spread, 4),
                busiest_rank_bytes=busiest_rank_bytes(
                    operation, ALGORITHM_NAMES[algorithm], topology, size
                ),
                blocks=blocks,
                calls=calls,
            )
        )
    return cells
