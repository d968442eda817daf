"""Measures sealed checkpoints and datasets against torch's own, alternately, on one file system.

Each world of workers saves and loads the same tensors through the same process group, with fsync.
Only the storage differs. A case is the median of its blocks. `load` reads from the page cache,
`load from disk` from the disk. Files of an earlier save are removed before the clock starts.
`sealing alone` and `opening alone` are the speed of cipher and digests on all cores, without files
and ranks; `AES alone`, `SHA-256 alone` and `BLAKE3 alone` of each of them. The plain figure beside
these is a copy in memory. No save or load on this machine can be faster.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from typing_extensions import Buffer

from sealring import _native
from sealring.lab.bench.harness import Timings, alternate, in_turn, reports_of
from sealring.lab.bench.workers import Report, WorkerPlace, settle
from sealring.vault import files, keys
from sealring.vault.datasets.building import ingest
from sealring.vault.datasets.work import in_this_process
from sealring.vault.digests import computed, faster
from sealring.vault.sealed import AES, CHACHA
from sealring.vault.sealed import Place as SealedPlace
from sealring.vault.vault import Vault

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray
    from torch.distributed.tensor import DTensor

    from sealring.vault import Dataset, Vault
    from sealring.vault.gpu_batches import SealedPart


TENSORS: Final = 8
COLUMNS: Final = 1024
RESHARDING: Final = (4, 2, 3)
_IN_MEMORY: Final = 64 << 20
"""Bytes that are sealed and opened without a file; more than the caches hold."""
_SEALED_AT_ONCE: Final = 4 << 20
"""Bytes of which the ciphertext is kept; more would measure how fast memory is made."""
_NAME: Final = "bench"


@dataclass(frozen=True, slots=True)
class Case:
    what: str
    ranks: int
    sealed_gb_s: float
    plain_gb_s: float
    ratio: float
    bytes_read: int | None = None
    """Bytes that all ranks read of sealed files; None for a save."""
    bytes_needed: int | None = None
    steps: dict[str, float] | None = None
    """Seconds of the steps of a loader's two threads, in the last pass (`GpuLoader.seconds`)."""


@dataclass(frozen=True, slots=True)
class _Task:
    """The work of one world."""

    folder: str
    size: int
    blocks: int
    loads: str | None
    """The checkpoint to load: this world's, or the previous world's."""
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
    """Makes a new directory in `folder`, and removes it at the end."""
    place = folder / f"sealring-bench-{secrets.token_hex(4)}"
    place.mkdir(mode=0o700)
    try:
        yield place
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _alone(blocks: int) -> Iterator[Case]:
    """Measures sealing and opening in memory, with the digests that ranks sign, against copying."""
    plain, opened = bytearray(_IN_MEMORY), bytearray(_IN_MEMORY)
    key = _native.Secret.random(32)
    digest = computed(faster())

    def seal(hash: _native.ChunkHash | None) -> None:
        for start in range(0, _IN_MEMORY, _SEALED_AT_ONCE):
            _sealed(key, memoryview(plain)[start : start + _SEALED_AT_ONCE], hash)

    def open_again() -> None:
        reader = _native.SealedFileReader(
            lambda start, size: view[start : start + size],
            key, AES, b"bench", "bench", 0, len(sealed),
        )  # fmt: skip
        reader.expect(digests, digest)
        reader.read_into(0, opened)

    def copy() -> None:
        opened[:] = plain

    writer = _sealed(key, plain, digest)
    sealed, digests = writer.take(), writer.digests
    view = memoryview(sealed)
    for what, action in (
        ("AES alone", lambda: seal(None)),
        ("SHA-256 alone", lambda: _native.chunk_digests(plain)),
        ("BLAKE3 alone", lambda: _native.chunk_digests(plain, computed("blake3"))),
        ("sealing alone", lambda: seal(digest)),
        ("opening alone", open_again),
    ):
        yield case_of(what, _IN_MEMORY, _alternated({"sealed": action, "plain": copy}, blocks))


def _sealed(
    key: _native.Secret, plain: Buffer, digest: _native.ChunkHash | None
) -> _native.SealedFileWriter:
    writer = _native.SealedFileWriter(-1, key, AES, b"bench", "bench", 0, digest)
    writer.write([plain])
    writer.finish()
    return writer


def case_of(
    what: str, size: int, samples: Mapping[str, Timings], ranks: int = 1, **more: Any
) -> Case:
    sealed, plain = (size / samples[each].median / 1e9 for each in ("sealed", "plain"))
    return Case(what, ranks, sealed, plain, sealed / plain, **more)


def _alternated(
    variants: Mapping[str, Callable[[], object]],
    blocks: int,
    wait: Callable[[], None] = lambda: None,
) -> dict[str, Timings]:
    """Like `alternate`, in this process. `wait` waits for the end of the work of a call."""

    def settled(call: Callable[[], object]) -> Callable[[], None]:
        def both() -> None:
            call()
            wait()

        return both

    calls = {name: settled(call) for name, call in variants.items()}
    return alternate(calls, blocks=blocks, calls=1, warm_up=2, between=wait)


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
        # Torch would warn about an existing save. The time of a sealed save ends when it returns.
        if rank == 0:
            files.wait_until_freed()
            shutil.rmtree(plain, ignore_errors=True)

    def save_plain() -> None:
        dcp.save(state, storage_writer=FileSystemWriter(plain, overwrite=True))

    def drop() -> None:
        if rank == 0:
            _drop_from_page_cache(place)

    def alternately(
        sealed: Callable[[], None],
        plain: Callable[[], None],
        before: Callable[[], None] = lambda: None,
    ) -> dict[str, Timings]:
        def line_up() -> None:
            before()
            dist.barrier()

        variants = {"sealed": sealed, "plain": plain}
        # The first save, which is not timed, creates files and memory.
        return in_turn(variants, report, blocks=task.blocks, between=line_up)

    cases = []
    saved = alternately(save_sealed, save_plain, remove_plain)
    # A sealed save that came last has removed the plain one, which is loaded below.
    remove_plain()
    dist.barrier()
    save_plain()
    cases.append(case_of("save", total, saved, world))
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
        read = {"bytes_read": int(counts[0]), "bytes_needed": int(counts[1])}
        cases.append(case_of("load", total, loaded, world, **read))
        if task.loads == task.label:
            cold = alternately(load_sealed, load_plain, drop)
            cases.append(case_of("load from disk", total, cold, world, **read))
    dist.destroy_process_group()
    if rank == 0:
        report(cases)


# ---- datasets, on one core, from the page cache
#
# The plain variant is torch.utils.data on a mapped file, with the same items, batches and type.


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
            reading = {
                "sealed": lambda: _read_sealed(dataset), "plain": lambda: _read_plain(plain)
            }  # fmt: skip
            yield case_of("dataset read, a core", dataset.bytes, _alternated(reading, blocks))
            progress("shuffled samples")
            loading = {
                "sealed": lambda: _load_sealed(dataset), "plain": lambda: _load_plain(plain)
            }  # fmt: skip
            yield case_of("samples, shuffled", dataset.bytes, _alternated(loading, blocks))
            dataset.close()
        finally:
            os.sched_setaffinity(0, allowed)
            torch.set_num_threads(threads)


def vault_of_tokens(place: Path, tokens: NDArray[np.uint16], suite: str = AES) -> Vault:
    """Makes a vault with the dataset `tokens`."""
    source = place / "source.bin"
    tokens.tofile(source)
    keys.make_key_file(place / "key")
    vault = Vault.create(place / "vault", keys.key_file(place / "key"), "bench")
    ingest(vault, source, "tokens", in_this_process, dtype="uint16", suite=suite)
    source.unlink()
    return vault


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

    for _ in DataLoader(mapped_tokens(path), batch_size=BATCH, shuffle=True):
        pass


def mapped_tokens(path: Path) -> Any:
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


# ---- data to and from a GPU: batches, training, offloading
#
# Each case alternates with the same work without cryptography, in one process. The variants without
# cryptography exist only here.


BATCH_BYTES: Final = 64 << 20
_BUFFERS: Final = 3


def measure_on_gpu(
    place: WorkerPlace, folder: Path, blocks: int, progress: Callable[[str], None]
) -> Iterator[Case]:
    with own_folder(folder) as own:
        for report in reports_of(1, _gpu_worker, place, own, blocks):
            if isinstance(report, str):
                progress(report)
            else:
                yield report


# ---- in the worker


def _gpu_worker(rank: int, report: Report, place: WorkerPlace, folder: Path, blocks: int) -> None:
    device = place.enter(rank, 1)
    report("sealing a file and a dataset")
    part = _sealed_file(folder)
    vault, tokens = token_dataset(folder)
    measurements: tuple[tuple[str, Callable[[], tuple[Any, ...]]], ...] = (
        ("pinned memory to the GPU", lambda: _from_pinned_memory(device, part, blocks)),
        (
            "shuffled batches of a vault to the GPU",
            lambda: shuffled(device, vault, tokens, blocks),
        ),
        (f"training {MODEL} from a vault", lambda: training(device, vault, tokens, blocks)),
        (f"optimizer of {MODEL} in host memory", lambda: _optimizer(device, blocks)),
    )
    for what, measured in measurements:
        report(what)
        size, samples, *steps = measured()
        report(case_of(what, size, samples, steps=steps[0] if steps else None))


def _sealed_file(folder: Path) -> SealedPart:
    """A sealed file with one batch of random tokens below 50,257."""
    import torch

    from sealring.vault.gpu_batches import SealedPart

    tokens = torch.randint(50257, (BATCH_BYTES // 4,), dtype=torch.int32).numpy().data.cast("B")
    place = SealedPlace(bytes(16), bytes(16), 1, CHACHA, _native.Secret.random(32))
    path = folder / "tokens.sealed"
    with path.open("wb") as file:
        writer = place.writer(file.fileno(), "tokens")
        writer.write([tokens])
        writer.finish()
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)  # open until the worker ends
    return SealedPart(place.reader(descriptor, "tokens", path.name), path.name)


def _from_pinned_memory(
    device: torch.device, part: SealedPart, blocks: int
) -> tuple[int, dict[str, Timings]]:
    """Measures copies that are opened while the next one comes, against copies alone."""
    import numpy as np
    import torch

    from sealring.core.engine.cuda.chunks import ChunkKernels
    from sealring.core.engine.streams import new_event, new_stream
    from sealring.vault.gpu_batches import Sample, plan_of

    plan = plan_of([Sample(0, 0, BATCH_BYTES)], [part])
    size = plan.sealed_bytes
    pinned = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    _native.copy_sealed([part.reader], plan.reads.view(np.uint8).data, pinned.numpy().data, 1)
    kernels = ChunkKernels(device, 1)
    assert kernels.add(part.reader) == 0
    sealed = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(_BUFFERS)]
    plain = [torch.empty(plan.plain_bytes, dtype=torch.uint8, device=device) for _ in range(2)]
    opened = [new_event() for _ in range(_BUFFERS)]
    failed = torch.full((1,), -1, dtype=torch.int64, device=device)
    copies, opens = new_stream(device), new_stream(device)
    batches = 16

    def copy_and_open() -> None:
        kept = []
        for number in range(batches):
            at = number % _BUFFERS
            copies.wait_event(opened[at])  # the buffer's earlier content has been opened
            with torch.cuda.stream(copies):
                sealed[at].copy_(pinned, non_blocking=True)
            opens.wait_stream(copies)
            with torch.cuda.stream(opens):
                kept.append(kernels.open(sealed[at], plan.chunks, plain[number % 2], failed))
                opened[at].record(opens)
        torch.cuda.synchronize(device)

    def copy() -> None:
        with torch.cuda.stream(copies):
            for number in range(batches):
                plain[number % 2].copy_(pinned[:BATCH_BYTES], non_blocking=True)

    times = _alternated({"sealed": copy_and_open, "plain": copy}, blocks, partial(settle, device))
    assert failed.item() == -1
    return batches * BATCH_BYTES, times


def _optimizer(device: torch.device, blocks: int) -> tuple[int, dict[str, Timings]]:
    """Measures steps of AdamW whose state is parked, sealed or in plaintext."""
    import torch

    from sealring.lab.bench.models import build
    from sealring.train.offload import OffloadedOptimizer, Parked, Parking

    class PlainParking(Parking):
        """Parks tensors without sealing them."""

        def park(self, tensor: torch.Tensor) -> Parked:
            memory = tensor.detach().view(-1).view(torch.uint8)
            parked = self.place_for(tensor, memory.nbytes)
            self.send(memory, parked.host)
            return self.sent(parked)

        def bring(self, parked: Parked) -> torch.Tensor:
            with torch.cuda.stream(self._in):
                tensor = parked.room(self.device)
            self.receive(parked.host, tensor.view(-1).view(torch.uint8))
            return tensor

    def adam(groups: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(groups, lr=1e-5, fused=True)

    variants: dict[str, Callable[[], None]] = {}
    state_bytes = 0
    for name, kind in (("sealed", Parking), ("plain", PlainParking)):
        with device:
            model: Any = build(MODEL)
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 1e-3)
        state_bytes = 2 * 2 * sum(parameter.nbytes for parameter in model.parameters())
        variants[name] = OffloadedOptimizer(model.parameters(), adam, kind(device)).step
    return state_bytes, _alternated(variants, blocks, partial(settle, device))


# ---- a vault's dataset opened by a GPU in a stream's order, against the same tokens in memory


WINDOW: Final = 1025
"""Tokens of a sample: a window of 1,024 tokens and the next token."""
TRAINED_WINDOWS: Final = 8
SHUFFLED_WINDOWS: Final = 256
DATASET_BYTES: Final = 256 << 20
MODEL: Final = "gpt2"
_CALLS: Final = 4


def token_dataset(folder: Path) -> tuple[Vault, torch.Tensor]:
    """Makes a vault, for GPUs, with random tokens below 50,257; returns it and the same windows."""
    import numpy as np
    import torch

    windows = DATASET_BYTES // 2 // WINDOW
    drawn = np.random.default_rng(0).integers(0, 50257, windows * WINDOW, dtype=np.uint16)
    vault = vault_of_tokens(folder, drawn, CHACHA)
    return vault, torch.from_numpy(drawn.view(np.int16)).view(windows, WINDOW)


def shuffled(
    device: torch.device, vault: Vault, tokens: torch.Tensor, blocks: int
) -> tuple[int, dict[str, Timings], dict[str, float]]:
    """Measures batches in a stream's order, against rows of a tensor in memory, pinned and copied.

    The last returned value has the times of the loader's steps in the last pass.
    """
    import torch

    from sealring.vault import Dataset, GpuLoader, Stream

    dataset = Dataset(vault, "tokens", length=WINDOW)
    stream = Stream(dataset, batch_size=SHUFFLED_WINDOWS, rank=0, world=1)
    loader = GpuLoader(stream, device)
    steps = len(tokens) // SHUFFLED_WINDOWS
    sums: dict[str, int] = {}
    spent: dict[str, float] = {}

    def from_vault() -> None:
        before = asdict(loader.seconds)
        start = dict(stream.state_dict(), epoch=0, position=0)
        loader.load_state_dict(start)
        total = torch.zeros((), dtype=torch.int64, device=device)
        for _, batch in zip(range(steps), loader, strict=False):
            total += batch["tokens"][:, 0].sum()
        sums["sealed"] = int(total)
        spent.update({step: now - before[step] for step, now in asdict(loader.seconds).items()})

    def from_memory() -> None:
        order = torch.randperm(len(tokens))
        total = torch.zeros((), dtype=torch.int64, device=device)
        for step in range(steps):
            rows = tokens[order[step * SHUFFLED_WINDOWS : (step + 1) * SHUFFLED_WINDOWS]]
            batch = rows.pin_memory().to(device, non_blocking=True).long() & 0xFFFF
            total += batch[:, 0].sum()
        sums["plain"] = int(total)

    variants = {"sealed": from_vault, "plain": from_memory}
    times = _alternated(variants, blocks, partial(settle, device))
    assert all(total > 0 for total in sums.values())
    loader.close()
    dataset.close()
    return steps * SHUFFLED_WINDOWS * WINDOW * 2, times, spent


def training(
    device: torch.device, vault: Vault, tokens: torch.Tensor, blocks: int
) -> tuple[int, dict[str, Timings]]:
    """Measures training on shuffled windows: opened on the GPU, or copied from memory."""
    import torch

    from sealring.lab.bench.models import build
    from sealring.vault import Dataset, GpuLoader, Stream

    with device:
        model: Any = build(MODEL)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    draw = torch.Generator().manual_seed(0)
    dataset = Dataset(vault, "tokens", length=WINDOW)
    loader = GpuLoader(Stream(dataset, batch_size=TRAINED_WINDOWS, rank=0, world=1), device)

    def endless() -> Iterator[torch.Tensor]:
        while True:
            for batch in loader:
                yield batch["tokens"]

    sealed_batches = endless()

    def step(batch: torch.Tensor) -> None:
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(batch[:, :-1], batch[:, 1:])
        loss.backward()
        optimizer.step()

    def from_sealed() -> None:
        for _ in range(_CALLS):
            step(next(sealed_batches))

    def from_plain() -> None:
        for _ in range(_CALLS):
            rows = tokens[torch.randint(len(tokens), (TRAINED_WINDOWS,), generator=draw)]
            step(rows.pin_memory().to(device, non_blocking=True).long() & 0xFFFF)

    variants = {"sealed": from_sealed, "plain": from_plain}
    times = _alternated(variants, blocks, partial(settle, device))
    loader.close()
    dataset.close()
    return _CALLS * TRAINED_WINDOWS * WINDOW * 2, times
