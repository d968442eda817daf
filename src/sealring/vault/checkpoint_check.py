"""What makes a checkpoint valid: coordinators check it before a commit, readers before a load.

Each rank of the world signs a statement about its own part only. The statement says which pieces
of which tensors the part holds, their types and shapes, and the digests of the part's chunks. It
also holds the digest of the plan, which says which rank saves which pieces. torch's metadata is
computed from these statements alone. So a rank that lies after the save can change only the bytes
of its own pieces: for another plan it needs the signatures of all other ranks. During the save a
rank can claim a tensor of another rank, and torch's planner may then let it save that tensor.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from cryptography import x509
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from sealring import _native
from sealring.errors import ConfigurationError, ForeignPart, NotAVault
from sealring.formats.strict import read_json, strictly
from sealring.vault import signing
from sealring.vault.checkpoint_form import dtype_named
from sealring.vault.digests import CHUNK_BYTES, DIGEST_BYTES, Hash, computed
from sealring.vault.movement import Box
from sealring.vault.objects import Copy, Part
from sealring.vault.sealed import Place


@dataclass(frozen=True, slots=True)
class Item:
    """A piece of a tensor, or an entry that is no tensor, in a rank's part."""

    name: str
    start: int
    length: int
    dtype: str | None
    size: list[int] | None
    """The shape of the whole tensor."""
    offsets: list[int] | None
    sizes: list[int] | None
    """The shape of this piece."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The checkpoint that a statement is about."""

    vault: str
    object: str
    version: int
    save: str
    """Random, one for each attempt to save."""
    plan: str
    """See `plan_digest`."""


@dataclass(frozen=True, slots=True)
class Contribution:
    """The statement that one rank signs."""

    checkpoint: Checkpoint
    length: int
    hash: Hash
    """The hash function of the chunks' digests."""
    digests: str
    """SHA-256 of the list of its chunks' digests."""
    items: list[Item]


@dataclass(frozen=True, slots=True)
class Content:
    """The content of a checkpoint's manifest."""

    contributions: list[signing.Signed]
    """One for each rank, in the order of the ranks."""


@dataclass(frozen=True, slots=True)
class Location:
    """Where an entry's bytes are."""

    part: str
    start: int
    length: int


class Root(NamedTuple):
    """What a rank signed about the bytes of its part."""

    hash: Hash
    """The hash function of the chunks' digests."""
    digest: str
    """The SHA-256 of the list of the chunks' digests."""


@dataclass(frozen=True, slots=True)
class Valid:
    """A checkpoint whose statements were all checked. Only `check` makes this object."""

    metadata: Metadata
    roots: Mapping[str, Root]
    """By the name of each rank's part."""
    files: Mapping[str, int]
    """The lengths of all parts, by their names."""
    content_digest: str
    """Covers the plaintext and the layout, and no keys, dates, versions or signatures."""

    def require_files(self, parts: Sequence[Part], whose: str) -> None:
        """Raises ForeignPart unless the manifest lists exactly the signed files, each once."""
        listed = sorted((part.name, part.length) for part in parts)
        roots = {part.name: Root(part.hash, part.digest) for part in parts}
        if listed != sorted(self.files.items()) or not self.roots.items() <= roots.items():
            raise ForeignPart(f"the parts of {whose} are not those that its ranks signed")


def part_of(rank: int) -> str:
    return f"rank-{rank:05}"


def list_of(part: str) -> str:
    """The name of the part that lists the digests of this part's chunks."""
    return f"{part}.digests"


def checkpoint_at(place: Place, save: str, plan: str) -> Checkpoint:
    return Checkpoint(place.vault.hex(), place.object.hex(), place.version, save, plan)


def plan_digest(
    ranks: Sequence[Sequence[Item]], paths: Mapping[str, Sequence[str | int]] | None
) -> str:
    """A digest of what each rank saves and of how nested names were flattened."""
    pieces = [
        [[one.name, one.dtype, one.size, one.offsets, one.sizes] for one in items]
        for items in ranks
    ]
    text = json.dumps([pieces, paths], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def check(
    text: str, place: Place, authorities: Sequence[x509.Certificate], job: str, whose: str
) -> Valid:
    """Checks a manifest's content: workers of the job must have signed all of it.

    Returns the checkpoint that it describes. Raises ForeignPart, NotAVault or VaultError.
    """
    try:
        document = read_json(text)
    except ValueError:
        raise NotAVault(f"the manifest of {whose} cannot be read") from None
    paths = _paths(document.pop("paths", None) if isinstance(document, dict) else None, whose)
    content: Content = _read(Content, document, whose)
    ranks: list[list[Item]] = []
    roots: dict[str, Root] = {}
    files: dict[str, int] = {}
    checkpoint: Checkpoint | None = None
    for rank, signed in enumerate(content.contributions):
        signer = signing.check(signed, authorities, job, whose)
        if (signer.rank, signer.world) != (rank, len(content.contributions)):
            raise ForeignPart(
                f"{whose} has {len(content.contributions)} signatures, and number {rank} is that "
                f"of rank {signer.rank} of {signer.world}: each rank of the world signs once"
            )
        one: Contribution = _statement(Contribution, signer, whose)
        checkpoint = checkpoint or checkpoint_at(place, one.checkpoint.save, one.checkpoint.plan)
        if one.checkpoint != checkpoint:
            raise ForeignPart(f"what rank {rank} signed is of another checkpoint than {whose}")
        part = part_of(rank)
        roots[part] = Root(one.hash, one.digests)
        files[part] = one.length
        files[list_of(part)] = DIGEST_BYTES * (one.length // CHUNK_BYTES + 1)
        for item in one.items:
            if item.start + item.length > one.length:
                raise _lie(rank, item, whose, "is where no tensor is")
        ranks.append(one.items)
    if checkpoint is None:
        raise signing.unadmitted(f"no rank has signed {whose}")
    metadata = _metadata(ranks, whose)
    if checkpoint.plan != plan_digest(ranks, paths):
        raise ForeignPart(f"the ranks signed another plan than that of the pieces in {whose}")
    metadata.planner_data = paths
    held = [checkpoint.plan, [[files[part], *root] for part, root in roots.items()]]
    content_digest = hashlib.sha256(json.dumps(held, separators=(",", ":")).encode()).hexdigest()
    return Valid(metadata, roots, files, content_digest)


def expect_signed(
    reader: _native.SealedFileReader, copy: Copy, parts: Mapping[str, Part], part: str, root: Root,
    whose: str,
) -> int:  # fmt: skip
    """Makes the part's reader accept only the chunks that the rank signed.

    Returns how many bytes were read for this.
    """
    listed = parts[list_of(part)]
    with copy.opened(listed, whose) as opened:
        content = bytearray(opened.length)
        opened.read_into(0, content)
    if hashlib.sha256(content).hexdigest() != root.digest:
        raise ForeignPart(f"part {listed.name} of {whose} is not the list that its rank signed")
    reader.expect(bytes(content), computed(root.hash))
    return opened.bytes_read


def require_readable(copy: Copy, parts: Sequence[Part], valid: Valid, whose: str) -> None:
    """Raises an error unless every file opens and has its length, and every list is as signed.

    Of each rank's part only the last chunk is opened.
    """
    by_name = {part.name: part for part in parts}
    for part, root in valid.roots.items():
        with copy.opened(by_name[part], whose) as reader:
            expect_signed(reader, copy, by_name, part, root, whose)
            reader.verify(reader.chunks - 1, 1)


def _read(kind: Any, document: Any, whose: str) -> Any:
    try:
        return strictly(kind, document, whose, "checkpoint")
    except ConfigurationError as problem:
        raise NotAVault(f"the manifest of {whose} cannot be read: {problem}") from None


def _statement(kind: Any, signer: signing.Signer, whose: str) -> Any:
    own = {name: value for name, value in signer.document.items() if name not in signing.FIELDS}
    return _read(kind, own, f"what rank {signer.rank} signed in {whose}")


def _lie(rank: int, item: Item, whose: str, what: str) -> ForeignPart:
    return ForeignPart(f"rank {rank} signed in {whose} that {item.name!r} {what}")


def _metadata(ranks: Sequence[Sequence[Item]], whose: str) -> Metadata:
    described: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    chunks: dict[str, list[Box]] = defaultdict(list)
    storage: dict[MetadataIndex, Location] = {}
    for rank, item in ((rank, item) for rank, items in enumerate(ranks) for item in items):
        location = Location(part_of(rank), item.start, item.length)
        if item.dtype is None:
            index = MetadataIndex(item.name)
            if item.name in described:
                raise _lie(rank, item, whose, "is there twice")
            described[item.name] = BytesStorageMetadata()
            storage[index] = location
            continue
        found = _described(rank, item, whose)
        assert item.offsets is not None
        assert item.sizes is not None
        index = MetadataIndex(item.name, torch.Size(item.offsets))
        known = described.setdefault(item.name, found)
        if not isinstance(known, TensorStorageMetadata) or (
            (known.size, known.properties.dtype) != (found.size, found.properties.dtype)
        ):
            raise _lie(rank, item, whose, "has another type or shape than other ranks say")
        if index in storage:
            raise _lie(rank, item, whose, "is there twice")
        known.chunks.append(ChunkStorageMetadata(torch.Size(item.offsets), torch.Size(item.sizes)))
        chunks[item.name].append(Box(item.offsets, item.sizes))
        storage[index] = location
    for name, pieces in chunks.items():
        whole = described[name]
        assert isinstance(whole, TensorStorageMetadata)
        if not covers(list(whole.size), pieces):
            raise ForeignPart(f"the pieces of {name!r} in {whose} leave gaps, or overlap")
    return Metadata(described, storage_data=storage, storage_meta=StorageMeta())


def _described(rank: int, item: Item, whose: str) -> TensorStorageMetadata:
    if item.dtype is None or item.size is None or item.offsets is None or item.sizes is None:
        raise _lie(rank, item, whose, "is a tensor without a shape")
    try:
        dtype = dtype_named(item.dtype)
    except ValueError:
        raise NotAVault(
            f"rank {rank} signed in {whose} that {item.name!r} is of the type {item.dtype[:50]!r}, "
            "which this torch does not have"
        ) from None
    box = Box(item.offsets, item.sizes)
    if not box.lies_in(item.size) or box.elements * dtype.itemsize != item.length:
        raise _lie(rank, item, whose, "has another length than its shape, or lies out of it")
    return TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(item.size), [])


def covers(size: list[int], pieces: list[Box]) -> bool:
    """Whether the pieces hold every element exactly once. Each piece lies inside the tensor."""
    full = [piece for piece in pieces if piece.elements]
    if sum(piece.elements for piece in full) != math.prod(size):
        return False
    return _is_grid(full) or not any(
        one.meet(other) is not None for one, other in itertools.combinations(full, 2)
    )


def _is_grid(pieces: list[Box]) -> bool:
    """Whether the pieces are different cells of one grid, and so do not overlap.

    Nearly all layouts are grids, and this check is fast.
    """
    spans = (zip(one.offsets, one.sizes, strict=True) for one in pieces)
    for dimension in zip(*spans, strict=True):
        edges = sorted(set(dimension))
        if any(a + x > b for (a, x), (b, _) in itertools.pairwise(edges)):
            return False
    return len({tuple(one.offsets) for one in pieces}) == len(pieces)


def _paths(document: Any, whose: str) -> dict[str, tuple[str | int, ...]] | None:
    """How the planner flattened nested names."""
    if document is None:
        return None
    good = isinstance(document, dict) and all(
        isinstance(path, list) and all(type(step) in (str, int) for step in path)
        for path in document.values()
    )
    if not good:
        raise NotAVault(f"the names in {whose} cannot be read")
    return {name: tuple(path) for name, path in document.items()}
