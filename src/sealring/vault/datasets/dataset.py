"""Datasets for torch.utils.data: read by number, or as a stream.

A saved stream can go on with another number of ranks.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.sharedctypes import RawArray
from operator import index
from typing import Any, Final

import numpy as np
from torch.utils.data import DataLoader, IterableDataset, default_collate, get_worker_info
from torch.utils.data import Dataset as TorchDataset

from sealring.core.hooks import Share, run_notes
from sealring.errors import ConfigurationError, Unsupported, VaultError
from sealring.vault.checkpoint_form import rank_and_world
from sealring.vault.closing import Closable
from sealring.vault.datasets.order import Mixture, Numbers
from sealring.vault.datasets.reading import (
    Form,
    OpenDataset,
    Rows,
    Samples,
    View,
    Windows,
)
from sealring.vault.datasets.shards import Shard, ShardReader
from sealring.vault.vault import Vault

BLOCK: Final = 1 << 14
"""The number of samples in a block. Samples are shuffled within blocks."""
_AHEAD_BYTES: Final = 64 << 20
"""The most bytes read at once: a whole block of windows of 1,024 tokens, so that each chunk is read
once."""
_WORKERS: Final = 1024
"""The most workers of a loader whose states are kept apart."""
_STATE: Final = ("epoch", "position", "seed", "block", "data")


class Dataset(Closable, TorchDataset[Any]):
    """A dataset of a vault, whose items are read by number.

    With `length`, an item is that many tokens, packed from the samples of a shard. The last item of
    a shard is filled up with `pad`. `documents` adds the number of the sample to which each token
    belongs. `threads` is how many threads open the chunks of one read; 0 means one for each CPU.
    `close()` wipes the shards' keys in this process. A loader's worker keeps its own keys until it
    ends.
    """

    def __init__(
        self,
        vault: Vault,
        name: str,
        *,
        version: int | None = None,
        length: int | None = None,
        pad: int = 0,
        documents: bool = False,
        transform: Callable[[Any], Any] | None = None,
        threads: int = 1,
    ) -> None:
        if threads < 0:
            raise ConfigurationError("threads= is a number of threads, or 0 for one for each CPU")
        length, pad = None if length is None else int(index(length)), int(index(pad))
        self._what = f"the dataset {name!r}"
        self._opened = OpenDataset(vault, name, version, threads)
        for notes in run_notes.all():
            notes.note_opened(name, self._opened.digest)
        fields = self._opened.index.fields
        self.view: View = (
            Samples(fields) if length is None else Windows(fields, length, pad, documents=documents)
        )
        self._transform = transform
        self.sizes = self.view.sizes(self._opened.index)
        self._ends = np.cumsum(np.asarray(self.sizes, dtype=np.int64))
        self.name, self.version = name, self._opened.version
        self.digest = self._opened.digest
        view = [self.digest] if length is None else [self.digest, length, pad]
        self.fingerprint = hashlib.sha256(repr(view).encode()).hexdigest()

    @property
    def bytes(self) -> int:
        return self._opened.index.bytes

    @property
    def shards(self) -> list[Shard]:
        return self._opened.index.shards

    def shard(self, number: int) -> ShardReader:
        """An open shard, which is closed with the dataset."""
        self.require_open()
        return self._opened.reader(number)

    def new_reader(self, number: int) -> ShardReader:
        """Opens a shard that the caller closes. Another thread may read it."""
        self.require_open()
        return self._opened.new_reader(number)

    def form(self) -> Form:
        """How a GPU makes items from the shards' bytes. Raises Unsupported if it cannot."""
        self.require_open()
        self._opened.require_suite_for_gpus()
        found = self.view.form()
        if self._transform is not None:
            raise Unsupported("transform= is called by the CPU: apply it to the opened batches")
        return found

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getitem__(self, number: int) -> Any:
        return self.__getitems__([number])[0]

    def __getitems__(self, numbers: Sequence[int]) -> list[Any]:
        """Reads several items at once, as torch's DataLoader asks. Opens each chunk once."""
        self.require_open()
        wanted = np.asarray(numbers, dtype=np.int64)
        wanted = np.where(wanted < 0, wanted + len(self), wanted)
        if len(wanted) and not (int(wanted.min()) >= 0 and int(wanted.max()) < len(self)):
            raise IndexError(f"{self.name!r} has {len(self)} items")
        shards = np.searchsorted(self._ends, wanted, side="right")
        inside = wanted - (self._ends[shards] - np.asarray(self.sizes, np.int64)[shards])
        return self.fetch(shards, inside)

    def fetch(self, shards: Numbers, inside: Numbers) -> list[Any]:
        self.require_open()
        found = self.view.items(self._opened, shards, inside)
        return found if self._transform is None else [self._transform(one) for one in found]

    def fetch_rows(self, shards: Numbers, inside: Numbers) -> Rows | None:
        """Like `fetch`, as rows from which batches are cut; None if items differ in size."""
        self.require_open()
        if not isinstance(self.view, Windows) or self._transform is not None:
            return None
        return self.view.rows(self._opened, shards, inside)

    def _release(self) -> None:
        self._opened.close()


class Stream(IterableDataset[Any]):
    """Batches of one or several datasets. Their order is independent of ranks and workers.

    `state_dict` is five numbers that say where the stream stands after a step of all ranks. Rank r
    of w takes every w-th item. The last batch of an epoch is filled up with the first items of the
    next epoch. So all ranks have equally many batches, and each item comes once in each epoch.
    Without `batch_size` it gives single items; else `collate`, or torch's collate, makes batches.
    """

    def __init__(
        self,
        datasets: Dataset | Sequence[Dataset],
        *,
        batch_size: int | None = None,
        weights: Sequence[float] | None = None,
        shuffle: bool = True,
        seed: int = 0,
        block: int = BLOCK,
        rank: int | None = None,
        world: int | None = None,
        collate: Callable[[list[Any]], Any] | None = None,
    ) -> None:
        self.datasets = [datasets] if isinstance(datasets, Dataset) else list(datasets)
        if not self.datasets:
            raise ConfigurationError("a stream has at least one dataset")
        for dataset in self.datasets:
            dataset.require_open()
        # Makes Python integers of numpy's or torch's: the order is derived from their text.
        seed, block = int(index(seed)), int(index(block))
        self._weights = [1.0] * len(self.datasets) if weights is None else [*map(float, weights)]
        if len(self._weights) != len(self.datasets):
            raise ConfigurationError("there is one weight for each dataset")
        if block < 1 or seed < 0 or (batch_size is not None and batch_size < 1):
            raise ConfigurationError("block and batch_size are at least 1, and seed at least 0")
        own_rank, own_world = rank_and_world()
        self._world = own_world if world is None else world
        self._rank = own_rank if rank is None else rank
        if not 0 <= self._rank < self._world:
            raise ConfigurationError(f"rank {self._rank} is none of a world of {self._world}")
        self._collate = (collate or default_collate) if batch_size is not None else None
        self.batch = batch_size or 1
        """The number of items in one step of a rank."""
        self._own_collate = collate is not None
        self.absolute = 0
        """The number of items that all ranks together have had, in all epochs."""
        self._aligned = 0
        """The position at which the steps of this number of ranks began."""
        self._finished = RawArray("q", [-1] * _WORKERS)
        """Shared memory of the workers. For each, the position at which it began the epoch whose
        share it has read to the end. Each worker reads only its own entry, since another worker may
        have ended before this one begins."""
        self._epoch: int | None = None
        """In a worker, the epoch that it reads. It may have read its whole share already."""
        self._arrange(seed, block if shuffle else 0)

    def _arrange(self, seed: int, block: int) -> None:
        self._seed, self._block = seed, block
        sizes = [dataset.sizes for dataset in self.datasets]
        self._mixture = Mixture(sizes, self._weights, seed, block)
        data = [[one.fingerprint for one in self.datasets], self._weights]
        self._digest = hashlib.sha256(repr(data).encode()).hexdigest()
        self._data = int(self._digest[:14], 16)

    def __getstate__(self) -> dict[str, Any]:
        """Leaves the mixture out: a spawned worker makes it again."""
        return {name: value for name, value in self.__dict__.items() if name != "_mixture"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._arrange(self._seed, self._block)

    # ---- where it stands -------------------------------------------------------------------------

    @property
    def batched(self) -> bool:
        """Whether a step gives a batch instead of a single item."""
        return self._collate is not None

    def forms(self) -> list[Form]:
        """How a GPU makes the batches of each dataset. Raises Unsupported if it cannot."""
        found = [dataset.form() for dataset in self.datasets]
        if self._own_collate:
            raise Unsupported("collate= is called by the CPU: apply it to the opened batches")
        if len({(one.name, one.dtype, one.length, one.documents) for one in found}) != 1:
            shown = (
                f"{one.name} ({one.dtype}, length={one.length}, documents={one.documents})"
                for one in found
            )
            raise Unsupported(
                "a GPU makes batches of datasets whose items have one name, type and length, and "
                f"all documents= or none: {', '.join(shown)}. Read them with Loader"
            )
        return found

    @property
    def step(self) -> int:
        """The number of items in one step of all ranks."""
        return self.batch * self._world

    def advance_to(self, absolute: int) -> None:
        """Moves the stream on: all ranks have had the items before this position.

        Outside a loader's worker this also records which of them this rank had.
        """
        if get_worker_info() is None:
            self._note(self.absolute, absolute)
        self.absolute = absolute

    def _note(self, first: int, end: int) -> None:
        digest, name = self.datasets[0].digest, self.datasets[0].name
        if len(self.datasets) > 1:
            names = ", ".join(dataset.name for dataset in self.datasets)
            digest, name = self._digest, f"mixture of {names}"
        length, seed = self._mixture.length, self._seed if self._block else None
        while first < end:
            epoch, start = divmod(first, length)
            stop = min(length, start + end - first)
            # This rank has one of each `world` items; its first one may lie before `first`.
            offset = (self._rank - (first - self._aligned)) % self._world
            share = Share(self._world, offset, 1)
            for notes in run_notes.all():
                notes.note_data(name, digest, epoch, start, stop, seed=seed, share=share)
            first += stop - start

    def state_dict(self) -> dict[str, int]:
        epoch = self.absolute // self._mixture.length
        if get_worker_info() is not None and self._epoch is not None:
            epoch = self._epoch
        position = self.absolute - epoch * self._mixture.length
        return {
            "epoch": epoch, "position": position, "seed": self._seed, "block": self._block,
            "data": self._data,
        }  # fmt: skip

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if set(state_dict) != set(_STATE) or not all(
            isinstance(value, int) and value >= 0 for value in state_dict.values()
        ):
            raise VaultError(
                f"a stream's state is the numbers {', '.join(_STATE)}", code="vault.wrong_position"
            )
        if state_dict["data"] != self._data:
            raise VaultError(
                "the state belongs to other data: to other datasets or versions of them, another "
                "length of packed sequences or other weights. Open what it was saved with",
                code="vault.wrong_position",
            )
        self._arrange(int(state_dict["seed"]), int(state_dict["block"]))
        self.absolute = state_dict["epoch"] * self._mixture.length + state_dict["position"]
        self._aligned = self.absolute
        worker = get_worker_info()
        for number in range(_WORKERS) if worker is None else [worker.id % _WORKERS]:
            self._finished[number] = -1
        self._epoch = state_dict["epoch"] if worker is not None else None

    # ---- items -----------------------------------------------------------------------------------

    def __len__(self) -> int:
        """How many batches this rank has until the end of the epoch."""
        return (self._finish() - self.absolute) // self.step

    def _finish(self) -> int:
        """The position at which the next epoch's first step begins."""
        epoch = self.absolute // self._mixture.length if self._epoch is None else self._epoch
        end = (epoch + 1) * self._mixture.length
        return end + (self.absolute - end) % self.step

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        workers, mine = (worker.num_workers, worker.id) if worker is not None else (1, 0)
        base, finish = self.absolute, self._finish()
        if worker is not None and self._finished[mine % _WORKERS] == base:
            raise Unsupported(
                "workers have read this epoch to its end, and the loader has not told the stream: "
                "it would give the same samples again. Use sealring.vault.Loader, which counts "
                "them, or load a state"
            )
        if worker is not None and self._epoch is None:
            self._epoch = base // self._mixture.length
        steps = (finish - base) // self.step
        first = mine
        while first < steps:
            numbers = range(first, steps, workers)
            numbers = numbers[: self.together(base + first * self.step, workers)]
            for number, batch in zip(numbers, self._batches(base, numbers), strict=True):
                # In a worker this does not count the batches of lower-numbered workers this round.
                self.advance_to(base + (number - mine + workers) * self.step)
                yield batch
            first = numbers[-1] + workers
        if worker is not None:
            self._finished[mine % _WORKERS] = base
        self.absolute, self._epoch = finish, None

    def together(self, position: int, workers: int) -> int:
        """How many batches to read at once: up to the end of the block, within a memory bound."""
        inside = position % self._mixture.length
        left = self._block - inside % self._block if self._block else BLOCK
        each = max(one.bytes // max(1, len(one)) for one in self.datasets)
        bound = _AHEAD_BYTES // max(1, each * self.batch)
        return max(1, min(math.ceil(left / (self.step * workers)), bound))

    def located(self, base: int, numbers: range) -> tuple[Numbers, Numbers, Numbers]:
        """This rank's items of these steps: each one's dataset, shard and number in the shard."""
        steps = np.asarray(numbers, dtype=np.int64)[:, None] * self.batch
        places = (steps + np.arange(self.batch, dtype=np.int64)) * self._world + self._rank + base
        return self._mixture.locate(places.reshape(-1))

    def _batches(self, base: int, numbers: range) -> Iterator[Any]:
        """Reads this rank's batches of these steps at once, and yields them."""
        sources, shards, inside = self.located(base, numbers)
        firsts = range(0, len(sources), self.batch)
        rows = None
        if len(self.datasets) == 1 and self._collate is default_collate:
            rows = self.datasets[0].fetch_rows(shards, inside)
        if rows is not None:
            yield from (rows.batch(first, first + self.batch) for first in firsts)
            return
        items = self._items(sources, shards, inside)
        for first in firsts:
            batch = items[first : first + self.batch]
            yield batch[0] if self._collate is None else self._collate(batch)

    def _items(self, sources: Numbers, shards: Numbers, inside: Numbers) -> list[Any]:
        found: list[Any] = [None] * len(sources)
        for number, dataset in enumerate(self.datasets):
            chosen = np.flatnonzero(sources == number)
            made = dataset.fetch(shards[chosen], inside[chosen])
            for place, item in zip(chosen.tolist(), made, strict=True):
                found[place] = item
        return found


class Loader(DataLoader[Any]):
    """Reads a stream with workers. Its state counts only batches that the caller has taken."""

    def __init__(self, stream: Stream, *, num_workers: int = 0, **options: Any) -> None:
        if options.get("persistent_workers") or options.get("batch_size") is not None:
            raise Unsupported(
                "a Loader starts its workers for each epoch, and the stream makes the batches: "
                "name batch_size there, and leave persistent_workers out"
            )
        super().__init__(stream, batch_size=None, num_workers=num_workers, **options)
        self._stream = stream

    def __iter__(self) -> Any:
        base, step = self._stream.absolute, self._stream.step
        for count, batch in enumerate(super().__iter__(), 1):
            self._stream.advance_to(base + count * step)
            yield batch

    def __len__(self) -> int:
        return len(self._stream)

    def state_dict(self) -> dict[str, int]:
        return self._stream.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._stream.load_state_dict(state_dict)
