"""Sealed checkpoints against torch's own, alternately, on one file system, with fsync for both.

Each world of workers saves and loads the same tensors through the same process group; what differs
is the storage. A case is the median of its blocks. `load` reads what the page cache holds, `load
from disk` what the disk has. What an earlier save has left is removed before the clock starts.
`sealing alone` and `opening alone` are what the cipher and the hash allow on all cores, without
files and ranks: no save or load of this machine can be faster.
"""

from __future__ import annotations

import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Final

from sealring import _native
from sealring.bench.workers import Report, run_workers
from sealring.vault import freeing, keys
from sealring.vault.sealed import AES
from sealring.vault.vault import Vault

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

TENSORS: Final = 8
COLUMNS: Final = 1024
RESHARDING: Final = (4, 2, 3)
_IN_MEMORY: Final = 64 << 20
"""Bytes that are sealed and opened without a file: more than the caches hold."""
_NAME: Final = "bench"


@dataclass(frozen=True, slots=True)
class Case:
    what: str
    ranks: int
    sealed_gb_s: float
    plain_gb_s: float
    ratio: float
    bytes_read: int | None
    """Of sealed files, by all ranks; None for a save."""
    bytes_needed: int | None
    steps: dict[str, float] | None = None
    """Seconds of the steps of a loader's two threads, in the last pass (`GpuLoader.seconds`)."""


@dataclass(frozen=True, slots=True)
class _Task:
    """What one world does."""

    folder: str
    size: int
    blocks: int
    loads: str | None
    """The checkpoint to load: of this world, or of the world before."""
    label: str


def measure_vault(
    folder: Path, size: int, ranks: list[int], blocks: int, progress: Callable[[str], None]
) -> Iterator[Case]:
    """Measures in a new directory below `folder`, which is removed again."""
    place = folder / f"sealring-bench-{secrets.token_hex(4)}"
    place.mkdir(mode=0o700)
    secret = {"SEALRING_SECRET": secrets.token_hex(32)}
    try:
        keys.make_key_file(place / "key")
        Vault.create(place / "vault", keys.key_file(place / "key"), "bench")
        progress("sealing and opening alone")
        yield from _alone(blocks)
        for world in ranks:
            progress(f"save and load, {world} ranks")
            task = _Task(str(place), size, blocks, f"{world}", f"{world}")
            yield from _run(world, task, secret)
        before: str | None = None
        for number, world in enumerate(RESHARDING):
            progress(f"reshard to {world} ranks")
            label = f"resharded-{number}"
            cases = _run(world, _Task(str(place), size, blocks, before, label), secret)
            for case in cases:
                if case.what == "load":
                    yield replace(case, what=f"reshard {RESHARDING[number - 1]} to {world}")
            before = label
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _alone(blocks: int) -> Iterator[Case]:
    """Sealing and opening in memory, with the digests that ranks sign, against copying."""
    plain, opened = bytearray(_IN_MEMORY), bytearray(_IN_MEMORY)
    key = _native.Secret.random(32)

    def seal() -> tuple[bytes, bytes]:
        writer = _native.SealedFileWriter(-1, key, AES, b"bench", "bench", 0, True)
        writer.write([plain])
        writer.finish()
        return writer.take(), writer.digests

    def open_again() -> None:
        reader = _native.SealedFileReader(
            lambda start, size: view[start : start + size],
            key, AES, b"bench", "bench", 0, len(sealed),
        )  # fmt: skip
        reader.expect(digests)
        reader.read_into(0, opened)

    def copy() -> None:
        opened[:] = plain

    sealed, digests = seal()
    view = memoryview(sealed)
    rates = {
        action: _IN_MEMORY / median(_seconds(action) for _ in range(blocks)) / 1e9
        for action in (seal, open_again, copy)
    }
    for what, action in (("sealing alone", seal), ("opening alone", open_again)):
        yield Case(what, 1, rates[action], rates[copy], rates[action] / rates[copy], None, None)


def _seconds(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def _drop_from_page_cache(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _run(world: int, task: _Task, environment: dict[str, str]) -> Iterator[Case]:
    reports = [one for _, one in run_workers(world, _worker, task, environment=environment)]
    for case in next(one for one in reports if one is not None):
        yield Case(**case)


def _worker(rank: int, report: Report, task: _Task) -> None:
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    from sealring.vault import CheckpointReader, CheckpointWriter

    torch.set_num_threads(1)
    dist.init_process_group("sealring")
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    rows = max(world, task.size // TENSORS // COLUMNS // 4)
    state: dict[str, DTensor] = {
        f"tensor-{number}": distribute_tensor(torch.randn(rows, COLUMNS), mesh, [Shard(0)])
        for number in range(TENSORS)
    }
    total = rows * COLUMNS * 4 * TENSORS
    place = Path(task.folder)
    vault = Vault.open(place / "vault", keys.key_file(place / "key"))
    writer = CheckpointWriter(vault, f"{_NAME}-{task.label}", keep=1)
    plain = place / f"plain-{task.label}"

    def save_sealed() -> None:
        dcp.save(state, storage_writer=writer)

    def remove_plain() -> None:
        # torch would warn of what was saved before. A sealed save's clock stops when it returns.
        if rank == 0:
            freeing.wait()
            shutil.rmtree(plain, ignore_errors=True)

    def save_plain() -> None:
        dcp.save(state, storage_writer=FileSystemWriter(plain, overwrite=True))

    def timed(action: Callable[[], None], before: Callable[[], None]) -> float:
        before()
        dist.barrier()
        start = time.perf_counter()
        action()
        dist.barrier()
        return time.perf_counter() - start

    def drop() -> None:
        if rank == 0:
            _drop_from_page_cache(place)

    def alternately(
        sealed: Callable[[], None],
        plain: Callable[[], None],
        before: Callable[[], None] = lambda: None,
    ) -> tuple[float, float]:
        # Once without a clock: files and memory are there then.
        sealed()
        plain()
        pairs = [(timed(sealed, before), timed(plain, before)) for _ in range(task.blocks)]
        return median(one for one, _ in pairs), median(one for _, one in pairs)

    def case(what: str, times: tuple[float, float], read: int | None, needed: int | None) -> Any:
        sealed, plain = (total / one / 1e9 for one in times)
        return asdict(Case(what, world, sealed, plain, sealed / plain, read, needed))

    cases = []
    saved = alternately(save_sealed, save_plain, remove_plain)
    cases.append(case("save", saved, None, None))
    if task.loads is not None:
        last: list[CheckpointReader] = []

        def load_sealed() -> None:
            last[:] = [CheckpointReader(vault, f"{_NAME}-{task.loads}")]
            dcp.load(state, storage_reader=last[0])

        def load_plain() -> None:
            dcp.load(state, storage_reader=FileSystemReader(place / f"plain-{task.loads}"))

        loaded = alternately(load_sealed, load_plain)
        counts = torch.tensor([last[0].bytes_read, last[0].bytes_needed])
        dist.all_reduce(counts)
        read, needed = int(counts[0]), int(counts[1])
        cases.append(case("load", loaded, read, needed))
        if task.loads == task.label:
            cold = alternately(load_sealed, load_plain, drop)
            cases.append(case("load from disk", cold, read, needed))
    dist.destroy_process_group()
    report(cases if rank == 0 else None)
