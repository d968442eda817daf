"""Packed sequences of many steps at once, without a Python object for each of them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from sealring.vault.datasets.order import Numbers
from sealring.vault.datasets.reading import OpenDataset, Windows


@dataclass(frozen=True, slots=True)
class Rows:
    """Sequences in the order in which they were asked for, in the type that they were sealed in."""

    view: Windows
    tokens: NDArray[np.integer]
    counts: Numbers
    """Tokens of each; a row that has fewer than the others is to be filled up."""
    beside: dict[str, Numbers]

    def batch(self, first: int, end: int) -> dict[str, torch.Tensor]:
        """What torch's collate makes of these items. It shares no memory with other batches."""
        tokens = self.tokens[first:end].astype(np.int64)
        for row in np.flatnonzero(self.counts[first:end] < self.view.length).tolist():
            tokens[row, self.counts[first + row] :] = self.view.pad
        found = {self.view.name: torch.from_numpy(tokens)}
        for name, rows in self.beside.items():
            found[name] = torch.from_numpy(rows[first:end].copy())
        return found


def read_rows(opened: OpenDataset, view: Windows, shards: Numbers, numbers: Numbers) -> Rows:
    """Each chunk is opened once, as by `OpenDataset.items`."""
    tokens = np.empty((len(shards), view.length), dtype=view.dtype)
    counts = np.empty(len(shards), dtype=np.int64)
    beside: dict[str, Numbers] = {}
    for shard in np.unique(shards).tolist():
        places = np.flatnonzero(shards == shard)
        for part, plain, sizes in opened.runs(view, shard, numbers[places]):
            chosen = places[part]
            counts[chosen] = sizes // np.uint64(view.dtype.itemsize)
            flat = np.frombuffer(plain, view.dtype)
            if bool((counts[chosen] == view.length).all()):
                tokens[chosen] = flat.reshape(len(chosen), view.length)
                continue
            ends = np.cumsum(counts[chosen])
            for place, end in zip(chosen.tolist(), ends.tolist(), strict=True):
                count = int(counts[place])
                tokens[place, :count] = flat[end - count : end]
        reader = opened.reader(shard)
        for name, values in view.beside(reader, numbers[places]).items():
            room = beside.setdefault(name, np.empty((len(shards), values.shape[1]), np.int64))
            room[places] = values
    return Rows(view, tokens, counts, beside)
