"""A vault's dataset, opened by a GPU in a stream's order, against the same tokens in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from sealring.bench.measure import alternate
from sealring.vault.sealed import CHACHA

if TYPE_CHECKING:
    import torch

    from sealring.vault import Vault

WINDOW: Final = 1025
"""Tokens of a sample: a window of 1,024 and the one behind it."""
TRAINED_WINDOWS: Final = 8
SHUFFLED_WINDOWS: Final = 256
DATASET_BYTES: Final = 256 << 20
MODEL: Final = "gpt2"
_CALLS: Final = 4


def medians(
    variants: dict[str, Callable[[], None]], blocks: int, device: torch.device, calls: int
) -> dict[str, float]:
    import torch

    def settle() -> None:
        torch.cuda.synchronize(device)

    def settled(call: Callable[[], None]) -> Callable[[], None]:
        def both() -> None:
            call()
            settle()

        return both

    samples = alternate(
        {name: settled(call) for name, call in variants.items()},
        blocks=blocks, calls=calls, warm_up=2, between=settle,
    )  # fmt: skip
    return {name: one.median for name, one in samples.items()}


def token_dataset(folder: Path) -> tuple[Vault, torch.Tensor]:
    """Random tokens below 50,257 in a vault, for GPUs, and the same in memory: windows of them."""
    import numpy as np
    import torch

    from sealring.vault import Vault, keys
    from sealring.vault.datasets.ingest import ingest
    from sealring.vault.datasets.running import in_this_process

    windows = DATASET_BYTES // 2 // WINDOW
    drawn = np.random.default_rng(0).integers(0, 50257, windows * WINDOW, dtype=np.uint16)
    source = folder / "tokens.bin"
    drawn.tofile(source)
    keys.make_key_file(folder / "key")
    vault = Vault.create(folder / "vault", keys.key_file(folder / "key"), "bench")
    ingest(vault, source, "tokens", in_this_process, dtype="uint16", suite=CHACHA)
    source.unlink()
    return vault, torch.from_numpy(drawn.view(np.int16)).view(windows, WINDOW)


def shuffled(
    device: torch.device, vault: Vault, tokens: torch.Tensor, blocks: int
) -> tuple[int, dict[str, float], dict[str, float]]:
    """Batches in the order of a stream, against rows of a tensor in memory, pinned and copied.

    The last value is where the loader's time went, in the last pass.
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

    times = medians({"sealed": from_vault, "plain": from_memory}, blocks, device, 1)
    assert all(total > 0 for total in sums.values())
    loader.close()
    dataset.close()
    return steps * SHUFFLED_WINDOWS * WINDOW * 2, times, spent


def training(
    device: torch.device, vault: Vault, tokens: torch.Tensor, blocks: int
) -> tuple[int, dict[str, float]]:
    """Steps on shuffled windows: opened on the GPU, or copied from a tensor in memory."""
    import torch

    from sealring.bench.models import build
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

    times = medians({"sealed": from_sealed, "plain": from_plain}, blocks, device, 1)
    loader.close()
    dataset.close()
    return _CALLS * TRAINED_WINDOWS * WINDOW * 2, times
