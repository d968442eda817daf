"""Reads a stream's batches in the order of `Stream`, and opens them on a GPU with `GpuBatches`."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from sealring.errors import ConfigurationError
from sealring.vault.closing import Closable
from sealring.vault.datasets.dataset import Dataset, Stream
from sealring.vault.datasets.order import Numbers
from sealring.vault.datasets.reading import View, put_rows
from sealring.vault.datasets.shards import OpenShards, ShardReader
from sealring.vault.gpu_batches import (
    SAMPLE,
    Batch,
    CudaOpener,
    GpuBatches,
    Opener,
    Samples,
    SealedPart,
    SealedParts,
)


class GpuLoader(Closable):
    """Opens a stream's batches on a GPU while the caller computes with earlier ones.

    Batches of one block are read and opened together, up to 64 MiB. `ahead` is how many of these
    groups are opened ahead. The batches equal those of `Loader` and are in the GPU's memory. The
    state is the stream's five numbers, and counts the batches that the caller has taken. A new
    iteration ends the previous one. `close()` overwrites the keys, also in the GPU's memory, and
    leaves the stream and its datasets open.
    """

    _what, _instead = "the loader", "make a new one"

    def __init__(
        self, stream: Stream, device: torch.device | str = "cuda", *, ahead: int = 2
    ) -> None:
        forms = stream.forms()
        self._stream = stream
        self._name, self._length = forms[0].name, forms[0].length
        self._dtype: torch.dtype = getattr(torch, forms[0].dtype)
        self._items, self._pads = (
            np.array([getattr(one, what) for one in forms], np.int64) for what in ("item", "pad")
        )
        self._files = _Shards(stream.datasets)
        self._opener = self.make_opener(torch.device(device), self._files)
        self._batches = GpuBatches(self._opener, self._files, ahead=ahead)
        self.seconds = self._batches.seconds
        """Where the time of the iterations went."""

    def make_opener(self, device: torch.device, files: SealedParts) -> Opener:
        return CudaOpener(device, files)

    def __iter__(self) -> Iterator[Any]:
        base, step = self._stream.absolute, self._stream.step
        beside: deque[dict[str, Numbers]] = deque()
        opened = self._batches.opened(self._planned(base, len(self._stream), beside))
        position = base
        with contextlib.closing(opened):
            for group in opened:
                rows, current = beside.popleft(), self._batches.current
                for first in range(0, len(group), self._stream.batch):
                    self._batches.require_current(current)
                    end = first + self._stream.batch
                    made = self._tensors(
                        group.part(first, end),
                        {name: values[first:end] for name, values in rows.items()},
                    )
                    position += step
                    self._stream.advance_to(position)
                    yield made

    def __len__(self) -> int:
        return len(self._stream)

    def state_dict(self) -> dict[str, int]:
        return self._stream.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.require_open()
        self._batches.stop()
        self._stream.load_state_dict(state_dict)

    def _release(self) -> None:
        self._batches.close()
        self._files.close()

    def _tensors(self, batch: Batch, beside: dict[str, Numbers]) -> Any:
        length = self._common_length(batch) if self._length is None else self._length
        made = {self._name: batch.take(length, self._dtype)}
        for name, rows in beside.items():
            made[name] = torch.from_numpy(rows).to(batch.plain.device)
        return made if self._stream.batched else {name: rows[0] for name, rows in made.items()}

    def _common_length(self, batch: Batch) -> int:
        sizes = batch.samples["bytes"]
        if not bool((sizes == sizes[0]).all()):
            raise ConfigurationError(
                f"the arrays {self._name!r} of a batch have different lengths, and do not form a "
                "tensor: pack them with length=, or use batch_size=None"
            )
        return int(sizes[0]) // self._dtype.itemsize

    # ---- in the thread that reads ahead

    def _planned(
        self, base: int, steps: int, beside: deque[dict[str, Numbers]]
    ) -> Iterator[Samples]:
        """Yields the samples of several steps together, so that a shared chunk is opened once."""
        first = 0
        while first < steps:
            count = self._stream.together(base + first * self._stream.step, 1)
            numbers = range(first, min(first + count, steps))
            first = numbers.stop
            self._files.trim()  # the batches planned before have been read
            samples, rows = self._located(base, numbers)
            beside.append(rows)
            yield samples

    def _located(self, base: int, numbers: range) -> tuple[NDArray[np.void], dict[str, Numbers]]:
        sources, shards, inside = self._stream.located(base, numbers)
        files = self._files.numbers(sources, shards)
        samples = np.empty(len(files), SAMPLE)
        samples["file"] = files
        samples["item"], samples["pad"] = self._items[sources], self._pads[sources]
        rows: dict[str, Numbers] = {}
        for file in np.flatnonzero(np.bincount(files)).tolist():
            chosen = np.flatnonzero(files == file)
            reader, view = self._files.reader(file), self._files.view(file)
            samples["offset"][chosen], samples["bytes"][chosen] = view.runs(reader, inside[chosen])
            put_rows(rows, len(files), chosen, view.beside(reader, inside[chosen]))
        return samples, rows


class _Shards:
    """The shards of all datasets, numbered in order. Only one thread uses this object."""

    def __init__(self, datasets: Sequence[Dataset]) -> None:
        self._datasets = datasets
        self._ends = np.cumsum([len(dataset.shards) for dataset in datasets], dtype=np.int64)
        self._open = OpenShards()

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, number: int) -> SealedPart:
        reader = self.reader(number)
        return SealedPart(reader.sealed, reader.name)

    def numbers(self, sources: Numbers, shards: Numbers) -> Numbers:
        before = np.append(0, self._ends[:-1])
        found: Numbers = before[sources] + shards
        return found

    def view(self, number: int) -> View:
        return self._dataset(number)[0].view

    def reader(self, number: int) -> ShardReader:
        dataset, shard = self._dataset(number)
        dataset.require_open()
        return self._open.get(number, lambda _: dataset.new_reader(shard))

    def _dataset(self, number: int) -> tuple[Dataset, int]:
        source = int(np.searchsorted(self._ends, number, side="right"))
        dataset = self._datasets[source]
        return dataset, number - (int(self._ends[source]) - len(dataset.shards))

    def trim(self) -> None:
        """Closes the least recently used shards. Never call it while a batch is read."""
        self._open.trim()

    def close(self) -> None:
        self._open.close()
