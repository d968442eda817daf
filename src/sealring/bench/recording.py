"""What signed statements of a run cost: training steps with them against the same without.

Both train one model in one run, in turn, in blocks of as many steps as an interval has. A recorded
block ends when its statement is on the disk and, on rank 0, every rank's is in the log.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from sealring.bench.measure import Samples, alternate, of_slowest
from sealring.bench.noise import compare
from sealring.bench.place import CPU
from sealring.bench.trainee import Trainee
from sealring.bench.workers import Report, run_workers
from sealring.provenance.runs import open_run

BAR: Final = 1.01
"""A step with records takes at most this many times one without."""


@dataclass(frozen=True, slots=True)
class Work:
    model: str
    ranks: int
    batch: int
    every: int
    blocks: int
    folder: str


@dataclass(frozen=True, slots=True)
class RecordingCost:
    model: str
    ranks: int
    every: int
    recorded_ms: float
    """A step, the median over blocks."""
    unrecorded_ms: float
    ratio: float
    told: float | None
    """The same, or None where it cannot be told from the noise."""
    noise: float
    bar: float
    statements: int
    bytes_per_statement: float
    """Of one rank and interval, with signature and certificate."""
    disk_bytes: int
    """Of the whole folder: statements, log and evidence."""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def measure_recording(
    model: str,
    *,
    ranks: int,
    batch: int,
    every: int,
    blocks: int,
    folder: Path | None = None,
    progress: Callable[[float], None] | None = None,
) -> RecordingCost:
    """Trains in a temporary folder inside `folder`, on whose disk the statements go."""
    with tempfile.TemporaryDirectory(prefix="sealring-records-", dir=folder) as made:
        run = Path(made) / "run"
        work = Work(model, ranks, batch, every, blocks, str(run))
        samples: dict[str, Samples] = {}
        for _, report in run_workers(ranks, _worker, work, environment={}):
            if isinstance(report, dict):
                samples = report
            elif progress is not None:
                progress(report)
        recorded, unrecorded = samples["recorded"], samples["unrecorded"]
        compared = compare(recorded.seconds, unrecorded.seconds)
        sizes = [len(envelope) for _, envelope in open_run(run).statements()]
        on_disk = sum(path.stat().st_size for path in run.rglob("*") if path.is_file())
    return RecordingCost(
        model=model,
        ranks=ranks,
        every=every,
        recorded_ms=round(recorded.median * 1e3, 2),
        unrecorded_ms=round(unrecorded.median * 1e3, 2),
        ratio=round(recorded.median / unrecorded.median, 4),
        told=compared.told and round(compared.told, 4),
        noise=round(compared.noise, 4),
        bar=BAR,
        statements=len(sizes),
        bytes_per_statement=round(sum(sizes) / len(sizes), 1),
        disk_bytes=on_disk,
    )


# ---- in the workers


def _worker(rank: int, report: Report, work: Work) -> None:
    import torch.distributed as dist

    from sealring.recording import note_data, record_run

    dist.init_process_group("sealring")
    trainee = Trainee(
        "sealed",
        work.model,
        work.batch,
        "fp32",
        25.0,
        rank=rank,
        device=CPU.enter(rank, work.ranks),
        sealed=dist.group.WORLD,
        plain=None,
        ring=None,
    )
    with record_run(work.folder, every=work.every, rank=rank, world=work.ranks) as records:

        def recorded_block() -> None:
            for _ in range(work.every):
                trainee.step()
                first = records.next_step * work.batch
                note_data("synthetic", "00" * 32, 0, first, first + work.batch)
                records.step()
            records.wait()

        def unrecorded_block() -> None:
            for _ in range(work.every):
                trainee.step()

        samples = alternate(
            {"recorded": recorded_block, "unrecorded": unrecorded_block},
            blocks=work.blocks,
            calls=1,
            warm_up=1,
            between=dist.barrier,
            after_block=(lambda block: report((block + 1) / work.blocks)) if rank == 0 else None,
        )
        everyones: list[Any] = [None] * work.ranks
        dist.all_gather_object(everyones, samples)
    if rank == 0:
        per_step = {
            name: Samples(tuple(second / work.every for second in each.seconds))
            for name, each in of_slowest(everyones).items()
        }
        report(per_step)
    dist.barrier()
    dist.destroy_process_group()
