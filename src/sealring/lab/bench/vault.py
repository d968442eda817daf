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
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from sealring import _native
from sealring.lab.bench.harness import reports_of, seconds_of
from sealring.lab.bench.workers import Report
from sealring.vault import freeing, keys
from sealring.vault.datasets.ingest import ingest
from sealring.vault.datasets.running import in_this_process
from sealring.vault.sealed import AES
from sealring.vault.vault import Vault

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch.distributed.tensor import DTensor

    from sealring.vault import Dataset

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
    secret = {"SEALRING_SECRET": secrets.token_hex(32)}
    with own_folder(folder) as place:
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


@contextmanager
def own_folder(folder: Path) -> Iterator[Path]:
    """A new directory below `folder`, which is removed again."""
    place = folder / f"sealring-bench-{secrets.token_hex(4)}"
    place.mkdir(mode=0o700)
    try:
        yield place
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
        action: _IN_MEMORY / median(seconds_of(action) for _ in range(blocks)) / 1e9
        for action in (seal, open_again, copy)
    }
    for what, action in (("sealing alone", seal), ("opening alone", open_again)):
        yield Case(what, 1, rates[action], rates[copy], rates[action] / rates[copy], None, None)


def _drop_from_page_cache(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _run(world: int, task: _Task, environment: dict[str, str]) -> list[Case]:
    (cases,) = reports_of(world, _worker, task, environment=environment)
    return list(cases)


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

    def case(what: str, times: tuple[float, float], read: int | None, needed: int | None) -> Case:
        sealed, plain = (total / one / 1e9 for one in times)
        return Case(what, world, sealed, plain, sealed / plain, read, needed)

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
    if rank == 0:
        report(cases)


# ---- datasets, on one core, from the page cache
#
# The plain samples are what torch.utils.data gives of a mapped file: the same items, batches, type.


TOKENS: Final = 1024
BATCH: Final = 32
_BLOCK: Final = 8 << 20


def measure_datasets(
    folder: Path, size: int, blocks: int, progress: Callable[[str], None]
) -> Iterator[Case]:
    import torch

    from sealring.vault import Dataset

    threads = torch.get_num_threads()
    allowed = os.sched_getaffinity(0)
    with own_folder(folder) as place:
        progress("sealing a dataset")
        items = max(BATCH, size // (2 * TOKENS))
        plain = place / "tokens.bin"
        drawn = np.random.default_rng(0).integers(0, 1 << 16, items * TOKENS, dtype=np.uint16)
        vault = vault_of_tokens(place, drawn)
        drawn.tofile(plain)
        try:
            torch.set_num_threads(1)
            os.sched_setaffinity(0, {min(allowed)})
            dataset = Dataset(vault, "tokens", length=TOKENS)
            progress("reading a dataset")
            yield _case("dataset read, a core", dataset.bytes, blocks,
                        lambda: _read_sealed(dataset), lambda: _read_plain(plain))  # fmt: skip
            progress("shuffled samples")
            yield _case("samples, shuffled", dataset.bytes, blocks,
                        lambda: _load_sealed(dataset), lambda: _load_plain(plain))  # fmt: skip
            dataset.close()
        finally:
            os.sched_setaffinity(0, allowed)
            torch.set_num_threads(threads)


def vault_of_tokens(place: Path, tokens: NDArray[np.uint16], suite: str = AES) -> Vault:
    """A new vault with the dataset `tokens`."""
    source = place / "source.bin"
    tokens.tofile(source)
    keys.make_key_file(place / "key")
    vault = Vault.create(place / "vault", keys.key_file(place / "key"), "bench")
    ingest(vault, source, "tokens", in_this_process, dtype="uint16", suite=suite)
    source.unlink()
    return vault


def _case(
    what: str, size: int, blocks: int, sealed: Callable[[], None], plain: Callable[[], None]
) -> Case:
    sealed()
    plain()
    pairs = [(seconds_of(sealed), seconds_of(plain)) for _ in range(blocks)]
    rates = [size / median(times) / 1e9 for times in zip(*pairs, strict=True)]
    return Case(what, 1, rates[0], rates[1], rates[0] / rates[1], None, None)


def _read_sealed(dataset: Dataset) -> None:
    room = bytearray(_BLOCK)
    for number, shard in enumerate(dataset.shards):
        reader = dataset.shard(number).sealed
        for start in range(0, shard.bytes, _BLOCK):
            reader.read_into(start, memoryview(room)[: min(_BLOCK, shard.bytes - start)])


def _read_plain(path: Path) -> None:
    room = bytearray(_BLOCK)
    with open(path, "rb", buffering=0) as file:
        while file.readinto(room):
            pass


def _load_sealed(dataset: Dataset) -> None:
    from sealring.vault import Loader, Stream

    for _ in Loader(Stream(dataset, batch_size=BATCH, rank=0, world=1)):
        pass


def _load_plain(path: Path) -> None:
    from torch.utils.data import DataLoader

    for _ in DataLoader(_mapped(path), batch_size=BATCH, shuffle=True):
        pass


def _mapped(path: Path) -> Any:
    import torch
    from torch.utils.data import Dataset as TorchDataset

    class Mapped(TorchDataset[Any]):
        def __init__(self) -> None:
            self._tokens = np.memmap(path, dtype=np.uint16, mode="r")

        def __len__(self) -> int:
            return len(self._tokens) // TOKENS

        def __getitem__(self, number: int) -> Any:
            part = self._tokens[number * TOKENS : (number + 1) * TOKENS]
            return {"tokens": torch.from_numpy(part.astype(np.int64))}

    return Mapped()
