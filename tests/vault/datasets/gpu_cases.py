"""What a loader on any device must give: the batches of `Loader`, bit by bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sealring.vault import Dataset, GpuLoader, Loader, Stream
from sealring.vault.datasets.building import run_stages, stages_of
from sealring.vault.datasets.work import in_this_process
from sealring.vault.sealed import CHACHA
from sealring.vault.vault import Vault
from tests.vault.datasets import array_stages
from tests.vault.datasets.made import json_lines, sealed

LENGTH = 48
TOKENS = 40_000
"""More than fit a chunk, and no multiple of any length."""


def token_file(folder: Path, dtype: str = "uint16", count: int = TOKENS) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    largest = np.iinfo(dtype).max
    drawn = np.random.default_rng(1).integers(0, largest, count, dtype=dtype, endpoint=True)
    drawn.tofile(folder / "a.bin")
    return folder


def seal_tokens(vault: Vault, folder: Path, name: str = "data", dtype: str = "uint16") -> None:
    """Several shards, whose last sequences are not full."""
    sealed(vault, token_file(folder, dtype), name, shard=25_000, dtype=dtype, suite=CHACHA)


@contextmanager
def packed(vault: Vault, name: str = "data", **options: Any) -> Iterator[Dataset]:
    dataset = Dataset(vault, name, **({"length": LENGTH, "pad": 7} | options))
    try:
        yield dataset
    finally:
        dataset.close()


def stream(datasets: Dataset | list[Dataset], rank: int = 0, world: int = 1, **options: Any) -> Any:
    chosen: dict[str, Any] = {"batch_size": 5, "seed": 3, "block": 64} | options
    return Stream(datasets, rank=rank, world=world, **chosen)


def assert_same(found: Any, expected: Any) -> None:
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name].cpu(), tensor), name


def assert_same_epochs(loader: GpuLoader, other: Loader, epochs: int = 1) -> None:
    """Batches, their number and the state after each."""
    for _ in range(epochs):
        assert len(loader) == len(other)
        for found, expected in zip(loader, other, strict=True):
            assert_same(found, expected)
            assert loader.state_dict() == other.state_dict()


def check_every_world(
    made: Callable[..., GpuLoader], device: object, vault: Vault, **options: Any
) -> None:
    """Each rank of each world, two epochs."""
    with packed(vault) as dataset:
        for world in (1, 2, 3):
            for rank in range(world):
                loader = made(stream(dataset, rank, world, **options), device)
                other = Loader(stream(dataset, rank, world, **options))
                assert_same_epochs(loader, other, epochs=2)
                loader.close()


def check_resumed(made: Callable[..., GpuLoader], device: object, vault: Vault) -> None:
    """Stopped anywhere, also between batches that were opened together; on other worlds."""
    with packed(vault) as dataset:
        for taken, world in ((1, 1), (7, 2), (30, 3)):
            first = made(stream(dataset), device)
            for _, _ in zip(range(taken), first, strict=False):
                pass
            state = first.state_dict()
            first.close()
            assert state["position"] == taken * 5
            for rank in range(world):
                loader = made(stream(dataset, rank, world, seed=9), device)
                other = Loader(stream(dataset, rank, world, seed=9))
                loader.load_state_dict(state)
                other.load_state_dict(state)
                assert_same_epochs(loader, other)
                loader.close()


def check_mixture(
    made: Callable[..., GpuLoader], device: object, vault: Vault, folder: Path
) -> None:
    """Of two types of tokens."""
    seal_tokens(vault, folder / "other", "other", "uint32")
    with packed(vault) as one, packed(vault, "other") as two:
        loader = made(stream([one, two], weights=[3, 1]), device)
        assert_same_epochs(loader, Loader(stream([one, two], weights=[3, 1])))
        loader.close()


def check_types(made: Callable[..., GpuLoader], device: object, vault: Vault, folder: Path) -> None:
    for dtype in ("uint16", "uint32"):
        seal_tokens(vault, folder / dtype, dtype, dtype)
        with packed(vault, dtype, documents=True) as dataset:
            loader = made(stream(dataset), device)
            assert_same_epochs(loader, Loader(stream(dataset)))
            loader.close()


def seal_arrays(vault: Vault, folder: Path) -> None:
    """The datasets of array_stages.py. The vault's suite is the one for GPUs."""
    sealed(vault, json_lines(folder, count=12), "raw")
    list(run_stages(vault, stages_of(Path(array_stages.__file__)), in_this_process))


def check_arrays(
    made: Callable[..., GpuLoader], device: object, vault: Vault, folder: Path
) -> None:
    """Samples as they are, in batches and one by one."""
    seal_arrays(vault, folder)
    for name, batch_size in (("equal", 4), ("short", 4), ("empty", 4), ("ragged", None)):
        dataset = Dataset(vault, name)
        loader = made(stream(dataset, batch_size=batch_size), device)
        for found, expected in zip(loader, Loader(stream(dataset, batch_size=batch_size)),
                                   strict=True):  # fmt: skip
            assert_same(found, {"values": torch.as_tensor(expected["values"])})
        loader.close()
        dataset.close()
