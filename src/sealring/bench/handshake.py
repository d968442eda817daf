"""`sealring bench handshake`: how long a group takes to form."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import Any

from sealring.bench.workers import Report, run_workers


@dataclass(frozen=True, slots=True)
class Result:
    ranks: int
    links: int
    transport: str
    seconds: float
    """Of the slowest rank, from the moment all processes stand ready."""
    seconds_per_link: float

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def measure_handshake(ranks: int, transport: str) -> Result:
    environment = {"SEALRING_TRANSPORT": transport}
    reports = run_workers(ranks, _worker, environment=environment)
    seconds = max(value for _, value in reports)
    links = ranks * (ranks - 1) // 2
    return Result(ranks, links, transport, round(seconds, 3), round(seconds / links, 5))


def _worker(rank: int, report: Report) -> None:
    import torch.distributed as dist
    from torch.distributed.rendezvous import rendezvous

    # Importing takes longer than the handshake; it is done first, and everybody waits for it.
    import sealring.group.create  # noqa: F401

    store, _, world = next(iter(rendezvous("env://")))
    store.add("ready", 1)
    while store.add("ready", 0) < world:
        time.sleep(0.005)
    start = time.perf_counter()
    dist.init_process_group("sealring", store=store, rank=rank, world_size=world)
    seconds = time.perf_counter() - start
    dist.barrier()
    report(seconds)
    dist.destroy_process_group()
