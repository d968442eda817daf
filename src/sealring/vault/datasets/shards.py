"""A dataset's index of fields and shards. Writes a shard's file from samples, and reads any of it.

The index is sealed with the manifest. Its digest depends only on fields and samples: equal content
has an equal digest in every vault, under every key and suite, and after `rotate`.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import secrets
import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from sealring import _native
from sealring.errors import (
    BadSource,
    ForeignPart,
    MissingPart,
    NotAVault,
    Unsupported,
    VaultBusy,
)
from sealring.formats.files import NEW_FILE
from sealring.vault.closing import Closable
from sealring.vault.datasets.fields import Field
from sealring.vault.digests import Hash
from sealring.vault.objects import Part, digest_of, open_part
from sealring.vault.sealed import SealedPlace, read_as
from sealring.vault.storage import VaultPath
from sealring.vault.vault import Stored

KIND: Final = "dataset"
VERSION: Final = 1
SHARD_HASH: Final[Hash] = "sha256"
"""The hash function for shards. It is fixed, so that a dataset's digest is the same on every CPU.
"""
OFFSET_BYTES: Final = 8
OPEN_SHARDS: Final = 64
"""The most shards that stay open at the same time."""
_DIGEST: Final = b"sealring dataset 1\0"
_BUFFER: Final = 4 << 20
_LARGEST_KEPT: Final = 64 << 20
_SAMPLES_LIMIT: Final = 1 << 26
"""The most samples of a shard, because a shard's table of offsets is held in memory."""
Offsets = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Shard:
    """A shard holds its samples one after the other, then a table of uint64 offsets.

    The table says where each sample begins and where the last one ends.
    """

    part: str
    samples: int
    bytes: int
    """The bytes of the samples, without the table."""
    digest: str
    """The digest of the part's plaintext."""
    source: str
    """The digest of the source that the shard was made from."""

    @property
    def length(self) -> int:
        return self.bytes + OFFSET_BYTES * (self.samples + 1)


@dataclass(frozen=True, slots=True)
class Input:
    """Another dataset that this one was made from."""

    name: str
    version: int
    digest: str


@dataclass(frozen=True, slots=True)
class Index:
    version: int
    fields: list[Field]
    recipe: str
    """JSON that says how samples are made. Shards with equal recipe and source are equal."""
    inputs: list[Input]
    shards: list[Shard]

    @property
    def samples(self) -> int:
        return sum(shard.samples for shard in self.shards)

    @property
    def bytes(self) -> int:
        return sum(shard.bytes for shard in self.shards)

    @property
    def digest(self) -> str:
        fields = [[field.name, field.kind] for field in self.fields]
        shards = [[shard.samples, shard.bytes, shard.digest] for shard in self.shards]
        text = json.dumps([fields, shards], separators=(",", ":"), ensure_ascii=True)
        return hashlib.sha256(_DIGEST + text.encode()).hexdigest()

    def text(self) -> str:
        return json.dumps(asdict(self))


def index_of(stored: Stored) -> Index:
    if stored.manifest.kind != KIND:
        raise Unsupported(
            f"{stored.whose} is a {stored.manifest.kind} and not a dataset: "
            "`sealring vault ingest` makes one"
        )
    where = f"the index of {stored.whose}"
    index: Index = read_as(Index, stored.manifest.content, where, VERSION)
    listed = [(part.name, part.length, part.hash, part.digest) for part in stored.manifest.parts]
    if listed != [(one.part, one.length, SHARD_HASH, one.digest) for one in index.shards]:
        raise NotAVault(f"the index of {stored.whose} lists other shards than its manifest")
    return index


@dataclass(frozen=True, slots=True)
class SealedShard:
    """A shard with all that is needed to open its file, except the key."""

    place: SealedPlace
    commitment: str
    shard: Shard
    whose: str


def sealed_shard(stored: Stored, part: Part, shard: Shard) -> SealedShard:
    return SealedShard(stored.copy.place.of(part.name), part.commitment, shard, stored.whose)


@dataclass(frozen=True, slots=True)
class Written:
    """A shard's finished file on the disk, under a temporary name."""

    file: str
    commitment: str
    shard: Shard


def write_shard(
    folder: Path, place: SealedPlace, key: _native.Secret, source: str,
    samples: Iterable[bytes | memoryview], progress: Callable[[int], None] = lambda count: None,
) -> Written:  # fmt: skip
    """Seals samples to a new file in `folder`. After an error there is no file."""
    path = folder / f".{place.part}.{secrets.token_hex(8)}"
    file = os.open(path, NEW_FILE, 0o600)
    try:
        writer = place.writer(file, key, 1, SHARD_HASH)
        offsets = array("Q", [0])
        room = bytearray()
        length = 0
        for sample in samples:
            room += sample
            length += len(sample)
            offsets.append(length)
            if len(room) >= _BUFFER:
                writer.write([room])
                progress(len(room))
                room = bytearray()
            if len(offsets) > _SAMPLES_LIMIT:
                raise BadSource(f"one shard has more than {_SAMPLES_LIMIT} samples")
        table = np.asarray(offsets, dtype="<u8")
        writer.write([room, table.data])
        progress(len(room))
        writer.finish()
        os.fsync(file)
        digest = digest_of(writer.digests)
        made = Shard(place.part, len(offsets) - 1, length, digest, source)
        return Written(path.name, writer.commitment.hex(), made)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        raise
    finally:
        os.close(file)


class _Kept(threading.local):
    """Memory that a thread reuses for its reads: fresh memory costs page faults."""

    memory = np.empty(0, dtype=np.uint8)


_KEPT: Final = _Kept()


def _room(size: int) -> memoryview:
    if size > _LARGEST_KEPT:
        return np.empty(size, dtype=np.uint8).data
    if len(_KEPT.memory) < size:
        _KEPT.memory = np.empty(size, dtype=np.uint8)
    return _KEPT.memory[:size].data


class ShardReader(Closable):
    """An open shard. Only the native reader holds its key."""

    def __init__(
        self, path: VaultPath, what: SealedShard, key: _native.Secret, threads: int = 1
    ) -> None:
        self.name = self._what = f"part {what.place.part} of {what.whose}"
        self.shard = what.shard
        try:
            self._part = open_part(
                path, what.place, key, self.name, self.shard.length, what.commitment, threads
            )
        except MissingPart:
            if path.parent.has_folder():
                raise
            raise VaultBusy(
                f"{self.name} was sealed anew while it was read (`sealring vault rotate`): open "
                "the dataset again",
                code="vault.keys_changed",
            ) from None
        self.sealed = self._part.reader
        self._offsets: Offsets | None = None

    @property
    def offsets(self) -> Offsets:
        """Where each sample begins, and where the last one ends."""
        self.require_open()
        if self._offsets is None:
            table = np.empty(self.shard.samples + 1, dtype="<u8")
            self.sealed.read_into(self.shard.bytes, table.data)
            ordered = bool((table[1:] >= table[:-1]).all())
            if table[0] != 0 or int(table[-1]) != self.shard.bytes or not ordered:
                raise ForeignPart(
                    f"the table of {self.shard.part} does not fit its samples: a holder of the "
                    "vault's key wrote it"
                )
            self._offsets = table
        return self._offsets

    def read(self, starts: Offsets, sizes: Offsets) -> memoryview:
        """Reads runs of bytes, one after the other, and opens each chunk only once.

        The bytes are valid until this thread reads again from any shard.
        """
        room = _room(int(sizes.sum()))
        self.sealed.read_runs(starts.data, sizes.data, room)
        return room

    def samples(self, block: int = 8 << 20) -> Iterator[memoryview]:
        """Yields all samples in order, read in blocks of about this size."""
        for part in groups(np.diff(self.offsets), block):
            start, *ends = self.offsets[part.start : part.stop + 1].tolist()
            view = np.empty(ends[-1] - start, dtype=np.uint8).data
            self.sealed.read_into(start, view)
            for first, end in itertools.pairwise([start, *ends]):
                yield view[first - start : end - start]

    def _release(self) -> None:
        self._part.close()


class OpenShards:
    """The open shards, by their numbers."""

    def __init__(self) -> None:
        self._readers: OrderedDict[int, ShardReader] = OrderedDict()

    def get(self, number: int, new: Callable[[int], ShardReader]) -> ShardReader:
        found = self._readers.pop(number, None) or new(number)
        self._readers[number] = found
        return found

    def trim(self) -> None:
        """Closes the least recently used shards until OPEN_SHARDS are left."""
        while len(self._readers) > OPEN_SHARDS:
            self._readers.popitem(last=False)[1].close()

    def close(self) -> None:
        while self._readers:
            self._readers.popitem()[1].close()


def groups(sizes: Offsets, most: int) -> Iterator[slice]:
    """Divides sizes into runs of neighbours to read together, each of at most `most` bytes.

    A single larger size is a run by itself.
    """
    totals = np.cumsum(sizes)
    first = 0
    while first < len(sizes):
        before = int(totals[first - 1]) if first else 0
        last = int(np.searchsorted(totals, np.uint64(before + most), side="right"))
        last = max(first + 1, last)
        yield slice(first, last)
        first = last
