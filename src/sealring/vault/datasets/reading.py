"""A dataset that is open: any samples of any shards, in few reads."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from sealring.errors import BadSource, ConfigurationError, Unsupported
from sealring.vault.datasets.building import sealed_place
from sealring.vault.datasets.fields import Field, decoder
from sealring.vault.datasets.order import Numbers
from sealring.vault.datasets.reading_keys import ReadingKeys
from sealring.vault.datasets.shards import Index, Offsets, ShardReader, index_of
from sealring.vault.sealed import AES, CHACHA
from sealring.vault.vault import Vault

OPEN_SHARDS: Final = 64
"""Shards that are open at the same time."""
_READ_BYTES: Final = 64 << 20
_DOCUMENT: Final = "document"


class Form(NamedTuple):
    """What a batch of items is as one tensor, which has a row for each."""

    name: str
    dtype: str
    """Of the tensor: numpy's and torch's name."""
    length: int | None
    """Numbers of each row, or None where the items say it."""
    item: int
    """The size of one number of an item, negative where it is signed and the tensor's is larger."""
    pad: int
    documents: bool = False
    """Whether a batch has the tensor `document` beside it."""


class View(Protocol):
    """What of a shard is an item, and what it looks like."""

    def sizes(self, index: Index) -> list[int]:
        """Items of each shard."""

    def runs(self, reader: ShardReader, numbers: Numbers) -> tuple[Offsets, Offsets]:
        """Where the items' bytes are."""

    def items(
        self, reader: ShardReader, numbers: Numbers, plain: memoryview, sizes: Offsets
    ) -> Iterator[Any]: ...

    def form(self) -> Form:
        """How a device makes a tensor of items' bytes. Unsupported if they are none of a tensor."""

    def beside(self, reader: ShardReader, numbers: Numbers) -> dict[str, Numbers]:
        """What a batch holds beside the items' bytes, a row for each item."""


class Samples:
    """An item is a sample, as it was ingested."""

    def __init__(self, fields: list[Field]) -> None:
        self._fields = fields
        self._decode = decoder(fields)

    def __reduce__(self) -> tuple[type[Samples], tuple[list[Field]]]:
        return Samples, (self._fields,)

    def sizes(self, index: Index) -> list[int]:
        return [shard.samples for shard in index.shards]

    def runs(self, reader: ShardReader, numbers: Numbers) -> tuple[Offsets, Offsets]:
        starts = reader.offsets[numbers]
        return starts, reader.offsets[numbers + 1] - starts

    def items(
        self, reader: ShardReader, numbers: Numbers, plain: memoryview, sizes: Offsets
    ) -> Iterator[Any]:
        at = 0
        for size in sizes.tolist():
            yield self._decode(plain[at : at + size])
            at += size

    def form(self) -> Form:
        dtype = self._fields[0].dtype if len(self._fields) == 1 else None
        if dtype is None:
            raise Unsupported(
                "a GPU opens samples of one field that is an array of numbers: "
                f"{', '.join(f'{one.name} ({one.kind})' for one in self._fields)} is decoded by "
                "the CPU. Read it with Loader, or make an array of it with a stage"
            )
        return Form(self._fields[0].name, dtype.name, None, dtype.itemsize, 0)

    def beside(self, reader: ShardReader, numbers: Numbers) -> dict[str, Numbers]:
        return {}


class Windows:
    """An item is a number of tokens, across the samples of a shard: packed sequences.

    The last one of a shard is filled up. `document` says, for each token, to which sample of the
    window it belongs, and -1 where it was filled up.
    """

    def __init__(self, fields: list[Field], length: int, pad: int, *, documents: bool) -> None:
        dtype = fields[0].dtype if len(fields) == 1 else None
        if dtype is None or dtype.kind not in "iu":
            raise ConfigurationError(
                "only a dataset whose one field is an array of integers can be packed: make one "
                "with a stage whose fields are {'tokens': 'array:uint32'}"
            )
        if length < 1:
            raise ConfigurationError("a packed sequence has at least one token")
        self.name, self.dtype = fields[0].name, dtype
        self.length, self.pad, self._documents = length, pad, documents
        self._bytes = length * dtype.itemsize

    def sizes(self, index: Index) -> list[int]:
        for shard in index.shards:
            if shard.bytes % self.dtype.itemsize:
                raise BadSource(f"{shard.part} has no whole number of tokens")
        return [-(-shard.bytes // self._bytes) for shard in index.shards]

    def runs(self, reader: ShardReader, numbers: Numbers) -> tuple[Offsets, Offsets]:
        starts = (numbers * self._bytes).astype("<u8")
        ends = np.minimum(starts + np.uint64(self._bytes), np.uint64(reader.shard.bytes))
        return starts, ends - starts

    def items(
        self, reader: ShardReader, numbers: Numbers, plain: memoryview, sizes: Offsets
    ) -> Iterator[Any]:
        import torch

        shape = len(numbers), self.length
        flat = np.frombuffer(plain, self.dtype)
        counts = (sizes // np.uint64(self.dtype.itemsize)).astype(np.int64)
        if bool((counts == self.length).all()):
            tokens = flat.astype(np.int64).reshape(shape)
        else:
            tokens = np.full(shape, self.pad, dtype=np.int64)
            at = 0
            for row, count in enumerate(counts.tolist()):
                tokens[row, :count] = flat[at : at + count]
                at += count
        rows = torch.from_numpy(tokens)
        for row in range(len(numbers)):
            item = {self.name: rows[row]}
            if self._documents:
                item[_DOCUMENT] = torch.from_numpy(self._document(reader, int(numbers[row])))
            yield item

    def form(self) -> Form:
        item = self.dtype.itemsize if self.dtype.kind == "u" else -self.dtype.itemsize
        return Form(self.name, "int64", self.length, item, self.pad, self._documents)

    def beside(self, reader: ShardReader, numbers: Numbers) -> dict[str, Numbers]:
        if not self._documents:
            return {}
        rows = [self._document(reader, number) for number in numbers.tolist()]
        return {_DOCUMENT: np.stack(rows)}

    def _document(self, reader: ShardReader, number: int) -> Numbers:
        start = number * self.length
        ends = reader.offsets[1:] // np.uint64(self.dtype.itemsize)
        tokens = np.arange(start, start + self.length, dtype=np.uint64)
        found = np.searchsorted(ends, tokens, side="right")
        numbered = np.unique(found, return_inverse=True)[1].astype(np.int64)
        numbered[found >= reader.shard.samples] = -1
        return numbered


class OpenDataset:
    """The index and the shards' keys; the vault itself is not needed any more."""

    def __init__(
        self, vault: Vault, name: str, version: int | None = None, threads: int = 1
    ) -> None:
        self._threads = threads
        with vault.reading():
            stored = vault.find(name, version)
        self.index = index_of(stored)
        self.name, self.version = name, stored.manifest.object_version
        self.digest = self.index.digest
        self._whose, self._folder = stored.whose, stored.copy.folder
        parts = stored.manifest.parts
        self._places = [sealed_place(stored.copy, part.name) for part in parts]
        self._commitments = [part.commitment for part in parts]
        self._keys = ReadingKeys(
            f"the dataset {name!r}", [stored.copy.place.part_key(part.name) for part in parts]
        )
        self._open: OrderedDict[int, ShardReader] = OrderedDict()
        self._process = os.getpid()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": OrderedDict()}

    def reader(self, number: int) -> ShardReader:
        if self._process != os.getpid():  # a fork: what was opened before has no keys here
            self._close_readers()
            self._process = os.getpid()
        found = self._open.pop(number, None)
        if found is None:
            found = self.new_reader(number)
            if len(self._open) >= OPEN_SHARDS:
                self._open.popitem(last=False)[1].close()
        self._open[number] = found
        return found

    def require_suite_for_gpus(self) -> None:
        if any(place.suite != CHACHA for place in self._places):
            raise Unsupported(
                f"{self._whose} is sealed with {AES}, for which GPUs have no instructions: "
                "ingest it with --suite chacha20-poly1305"
            )

    def new_reader(self, number: int) -> ShardReader:
        """One that the caller closes."""
        place = self._places[number]
        return ShardReader(
            self._folder / place.part, place, self._keys.key(number),
            self._commitments[number], self.index.shards[number], self._whose, self._threads,
        )  # fmt: skip

    def items(self, view: View, shards: Numbers, numbers: Numbers) -> list[Any]:
        """Items of any shards, in the order that is asked for; each shard is read in few calls."""
        found: list[Any] = [None] * len(shards)
        for shard in np.unique(shards).tolist():
            places = np.flatnonzero(shards == shard)
            for part, plain, sizes in self.runs(view, shard, numbers[places]):
                made = view.items(self.reader(shard), numbers[places[part]], plain, sizes)
                for place, item in zip(places[part].tolist(), made, strict=True):
                    found[place] = item
        return found

    def runs(
        self, view: View, shard: int, numbers: Numbers
    ) -> Iterator[tuple[slice, memoryview, Offsets]]:
        """Items' bytes, in few reads: which of the items, their bytes and the size of each."""
        reader = self.reader(shard)
        starts, sizes = view.runs(reader, numbers)
        for part in _groups(sizes):
            plain = reader.read(
                np.ascontiguousarray(starts[part]), np.ascontiguousarray(sizes[part])
            )
            yield part, plain, sizes[part]

    def close(self) -> None:
        """Wipes the keys of all shards: from then on there is no new reader either."""
        self._keys.close()
        self._close_readers()

    def _close_readers(self) -> None:
        while self._open:
            self._open.popitem()[1].close()


def _groups(sizes: Offsets) -> Iterator[slice]:
    """Runs that are read together, of a bounded size in all."""
    totals = np.cumsum(sizes)
    first = 0
    while first < len(sizes):
        before = int(totals[first - 1]) if first else 0
        last = int(np.searchsorted(totals, np.uint64(before + _READ_BYTES), side="right"))
        last = max(first + 1, last)
        yield slice(first, last)
        first = last


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
