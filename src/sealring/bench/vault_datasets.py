"""Sealed datasets against plain files of the same bytes, alternately, on one core.

Both are read from the page cache. The plain samples are what torch.utils.data gives of a mapped
file: the same items, batches and type.
"""

from __future__ import annotations

import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from sealring.bench.vault import Case
from sealring.vault import keys
from sealring.vault.datasets.ingest import ingest
from sealring.vault.datasets.running import in_this_process
from sealring.vault.vault import Vault

if TYPE_CHECKING:
    from sealring.vault import Dataset

TOKENS: Final = 1024
BATCH: Final = 32
_BLOCK: Final = 8 << 20


def measure_datasets(
    folder: Path, size: int, blocks: int, progress: Callable[[str], None]
) -> Iterator[Case]:
    """Measures in a new directory below `folder`, which is removed again."""
    import torch

    from sealring.vault import Dataset

    place = folder / f"sealring-bench-{secrets.token_hex(4)}"
    place.mkdir(mode=0o700)
    threads = torch.get_num_threads()
    allowed = os.sched_getaffinity(0)
    try:
        progress("sealing a dataset")
        items = max(BATCH, size // (2 * TOKENS))
        plain = place / "tokens.bin"
        drawn = np.random.default_rng(0).integers(0, 1 << 16, items * TOKENS, dtype=np.uint16)
        drawn.tofile(plain)
        keys.make_key_file(place / "key")
        vault = Vault.create(place / "vault", keys.key_file(place / "key"), "bench")
        ingest(vault, plain, "tokens", in_this_process, dtype="uint16")
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
        shutil.rmtree(place, ignore_errors=True)


def _case(
    what: str, size: int, blocks: int, sealed: Callable[[], None], plain: Callable[[], None]
) -> Case:
    sealed()
    plain()
    pairs = [(_timed(sealed), _timed(plain)) for _ in range(blocks)]
    rates = [size / median(times) / 1e9 for times in zip(*pairs, strict=True)]
    return Case(what, 1, rates[0], rates[1], rates[0] / rates[1], None, None)


def _timed(action: Callable[[], None]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


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
