"""What a dataset is: its fields, its shards, and how they were made. Sealed with the manifest.

The digest depends on fields and samples alone: the same content has the same digest in every vault,
under every key and suite, and also after `rotate`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from typing import Final

from sealring.errors import ConfigurationError, NotAVault, Unsupported
from sealring.formats.strict import read_json, strictly
from sealring.vault.datasets.fields import Field
from sealring.vault.header import check_version
from sealring.vault.vault import Stored

KIND: Final = "dataset"
VERSION: Final = 1
OFFSET_BYTES: Final = 8
_DIGEST: Final = b"sealring dataset 1\0"


@dataclass(frozen=True, slots=True)
class Shard:
    """Samples one behind the other, and then where each begins and the last ends (uint64)."""

    part: str
    samples: int
    bytes: int
    """Of the samples, without the table behind them."""
    digest: str
    """Of the part's plaintext."""
    source: str
    """The digest of what it was made from."""

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
    """JSON: how samples are made from a source. Shards of one recipe and source are equal."""
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
        return json.dumps(dataclasses.asdict(self))


def index_of(stored: Stored) -> Index:
    if stored.manifest.kind != KIND:
        raise Unsupported(
            f"{stored.whose} is a {stored.manifest.kind} and not a dataset: "
            "`sealring vault ingest` makes one"
        )
    try:
        document = read_json(stored.manifest.content.encode())
        check_version(document, VERSION, f"the index of {stored.whose}")
        index: Index = strictly(Index, document, f"the index of {stored.whose}", "dataset")
    except (ValueError, ConfigurationError) as problem:
        raise NotAVault(f"the index of {stored.whose} cannot be read: {problem}") from None
    listed = [(part.name, part.length, part.digest) for part in stored.manifest.parts]
    if listed != [(shard.part, shard.length, shard.digest) for shard in index.shards]:
        raise NotAVault(f"the index of {stored.whose} lists other shards than its manifest")
    return index
