"""`sealring bench handshake`: how long a group takes to form and to do its first all-reduce."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import Any

from sealring.bench.workers import Report, run_workers


@dataclass(frozen=True, slots=True)
class Result:
    ranks: int
    handshakes: int
    """TLS handshakes of all ranks, until the first all-reduce is done."""
    transport: str
    seconds: float
    """Until the slowest rank has the group, from the moment all processes stand ready."""
    first_all_reduce_seconds: float
    """Until the slowest rank has done its first all-reduce, from the same moment."""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def measure_handshake(ranks: int, transport: str) -> Result:
    environment = {"SEALRING_TRANSPORT": transport}
    reports = [value for _, value in run_workers(ranks, _worker, environment=environment)]
    formed, reduced, shaken = zip(*reports, strict=True)
    return Result(ranks, sum(shaken) // 2, transport, round(max(formed), 3), round(max(reduced), 3))


def _worker(rank: int, report: Report) -> None:
    import torch
    import torch.distributed as dist
    from torch.distributed.rendezvous import rendezvous

    # Importing takes longer than the handshake; it is done first, and everybody waits for it.
    import sealring.group.create  # noqa: F401
    from sealring.handshake import process_sessions

    store, _, world = next(iter(rendezvous("env://")))
    store.add("ready", 1)
    while store.add("ready", 0) < world:
        time.sleep(0.005)
    start = time.perf_counter()
    dist.init_process_group("sealring", store=store, rank=rank, world_size=world)
    formed = time.perf_counter() - start
    dist.all_reduce(torch.ones(1024))
    reduced = time.perf_counter() - start
    report((formed, reduced, process_sessions("local", rank).handshakes))
    dist.barrier()
    dist.destroy_process_group()
