"""Reads any items of an open dataset's shards, in few reads."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from sealring.errors import BadSource, ConfigurationError, Unsupported
from sealring.vault.datasets.fields import Field, decoder
from sealring.vault.datasets.order import Numbers
from sealring.vault.datasets.reading_keys import ReadingKeys
from sealring.vault.datasets.shards import (
    Index,
    Offsets,
    OpenShards,
    ShardReader,
    groups,
    index_of,
    sealed_shard,
)
from sealring.vault.sealed import AES, CHACHA
from sealring.vault.vault import Vault

_READ_BYTES: Final = 64 << 20
_DOCUMENT: Final = "document"


class Form(NamedTuple):
    """The form of a batch of items as one tensor with one row for each item."""

    name: str
    dtype: str
    """The tensor's element type, named as in numpy and torch."""
    length: int | None
    """How many numbers a row has; None if this depends on the items."""
    item: int
    """The bytes of one number of an item; negative if signed numbers become larger in the tensor.
    """
    pad: int
    documents: bool = False
    """Whether a batch has the tensor `document` beside it."""


class ItemBytes(NamedTuple):
    """Items of one shard that were read at once."""

    reader: ShardReader
    places: Numbers
    """The indices of these items among all items that were asked for."""
    plain: memoryview
    """The items' bytes. They are valid until this thread reads again."""
    sizes: Offsets


class View(Protocol):
    """Divides the bytes of shards into items."""

    def sizes(self, index: Index) -> list[int]:
        """The number of items in each shard."""

    def runs(self, reader: ShardReader, numbers: Numbers) -> tuple[Offsets, Offsets]:
        """The starts and sizes of the items' bytes in a shard."""

    def items(self, opened: OpenDataset, shards: Numbers, numbers: Numbers) -> list[Any]:
        """Items of any shards, in the order asked for."""

    def form(self) -> Form:
        """How a device makes a tensor of items' bytes. Raises Unsupported if it cannot."""

    def beside(self, reader: ShardReader, numbers: Numbers) -> dict[str, Numbers]:
        """Further tensors of a batch, by name, with one row for each item."""


class Samples:
    """A view in which an item is a sample, as it was ingested."""

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

    def items(self, opened: OpenDataset, shards: Numbers, numbers: Numbers) -> list[Any]:
        found: list[Any] = [None] * len(shards)
        for run in opened.runs(self, shards, numbers):
            at = 0
            for place, size in zip(run.places.tolist(), run.sizes.tolist(), strict=True):
                found[place] = self._decode(run.plain[at : at + size])
                at += size
        return found

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
    """A view of packed sequences: an item is `length` tokens, across the samples of a shard.

    The last item of a shard is filled up. The tensor `document` gives for each token the number of
    its sample in the window, and -1 for a token that fills up.
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

    def items(self, opened: OpenDataset, shards: Numbers, numbers: Numbers) -> list[Any]:
        batch = self.rows(opened, shards, numbers).batch(0, len(shards))
        names = list(batch)
        rows = zip(*(one.unbind() for one in batch.values()), strict=True)
        return [dict(zip(names, row, strict=True)) for row in rows]

    def rows(self, opened: OpenDataset, shards: Numbers, numbers: Numbers) -> Rows:
        tokens = np.empty((len(shards), self.length), dtype=self.dtype)
        counts = np.empty(len(shards), dtype=np.int64)
        beside: dict[str, Numbers] = {}
        for reader, places, plain, sizes in opened.runs(self, shards, numbers):
            put_rows(beside, len(shards), places, self.beside(reader, numbers[places]))
            counts[places] = sizes // np.uint64(self.dtype.itemsize)
            flat = np.frombuffer(plain, self.dtype)
            if bool((counts[places] == self.length).all()):
                tokens[places] = flat.reshape(len(places), self.length)
                continue
            ends = np.cumsum(counts[places])
            for place, end in zip(places.tolist(), ends.tolist(), strict=True):
                count = int(counts[place])
                tokens[place, :count] = flat[end - count : end]
        return Rows(self, tokens, counts, beside)

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
    """An open dataset: its index and its shards' keys. It does not need the vault any more."""

    def __init__(
        self, vault: Vault, name: str, version: int | None = None, threads: int = 1
    ) -> None:
        self._threads = threads
        with vault.reading():
            stored = vault.find(name, version)
        self.index = index_of(stored)
        self.name, self.version = name, stored.manifest.object_version
        self.digest = self.index.digest
        self._folder = stored.copy.folder
        parts = stored.manifest.parts
        self._shards = [
            sealed_shard(stored, part, shard)
            for part, shard in zip(parts, self.index.shards, strict=True)
        ]
        self._keys = ReadingKeys(
            f"the dataset {name!r}", [stored.copy.place.part_key(part.name) for part in parts]
        )
        self._open = OpenShards()
        self._process = os.getpid()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": OpenShards()}

    def reader(self, number: int) -> ShardReader:
        if self._process != os.getpid():  # after a fork the open readers have no keys here
            self._open.close()
            self._process = os.getpid()
        found = self._open.get(number, self.new_reader)
        self._open.trim()
        return found

    def require_suite_for_gpus(self) -> None:
        if any(one.place.suite != CHACHA for one in self._shards):
            raise Unsupported(
                f"{self._shards[0].whose} is sealed with {AES}, for which GPUs have no "
                "instructions: ingest it with --suite chacha20-poly1305"
            )

    def new_reader(self, number: int) -> ShardReader:
        """Opens a shard that the caller closes."""
        what = self._shards[number]
        return ShardReader(
            self._folder / what.place.part, what, self._keys.key(number), self._threads
        )

    def runs(self, view: View, shards: Numbers, numbers: Numbers) -> Iterator[ItemBytes]:
        """Yields the bytes of items of any shards. Reads each shard in few calls."""
        for shard in np.unique(shards).tolist():
            places = np.flatnonzero(shards == shard)
            reader = self.reader(shard)
            starts, sizes = view.runs(reader, numbers[places])
            for part in groups(sizes, _READ_BYTES):
                plain = reader.read(
                    np.ascontiguousarray(starts[part]), np.ascontiguousarray(sizes[part])
                )
                yield ItemBytes(reader, places[part], plain, sizes[part])

    def close(self) -> None:
        """Wipes the keys of all shards. After this no reader can be opened."""
        self._keys.close()
        self._open.close()


@dataclass(frozen=True, slots=True)
class Rows:
    """Packed sequences in the order asked for, with the element type that was sealed."""

    view: Windows
    tokens: NDArray[np.integer]
    counts: Numbers
    """The number of tokens in each row; a row with fewer than `length` must be filled up."""
    beside: dict[str, Numbers]

    def batch(self, first: int, end: int) -> dict[str, torch.Tensor]:
        """A batch as torch's collate makes it. It shares no memory with other batches."""
        tokens = self.tokens[first:end].astype(np.int64)
        for row in np.flatnonzero(self.counts[first:end] < self.view.length).tolist():
            tokens[row, self.counts[first + row] :] = self.view.pad
        found = {self.view.name: torch.from_numpy(tokens)}
        for name, rows in self.beside.items():
            found[name] = torch.from_numpy(rows[first:end].copy())
        return found


def put_rows(
    rooms: dict[str, Numbers], count: int, places: Numbers, found: dict[str, Numbers]
) -> None:
    """Puts rows at their places in tables of `count` rows, and makes missing tables."""
    for name, rows in found.items():
        room = rooms.setdefault(name, np.empty((count, rows.shape[1]), np.int64))
        room[places] = rows
