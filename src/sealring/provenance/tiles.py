"""How a tree and its entries are cut into files (c2sp.org/tlog-tiles); bytes alone, no I/O.

A tile holds up to 256 hashes of one height, 0, 8, 16 and so on; a bundle holds the entries of a
tile of height 0. The last tile of each level is partial, and its width is part of its name: so no
file of a tree that was signed is ever written again.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, Literal, TypeAlias

from sealring.errors import ConfigurationError, TamperedLog
from sealring.provenance import tree

WIDTH: Final = 256
HEIGHT: Final = 8
HASH_BYTES: Final = 32
MAX_ENTRY_BYTES: Final = (1 << 16) - 1
MAX_BUNDLE_BYTES: Final = WIDTH * (2 + MAX_ENTRY_BYTES)
_LENGTH: Final = struct.Struct(">H")

Level: TypeAlias = int | Literal["entries"]


def tile_path(level: Level, index: int, width: int = WIDTH) -> str:
    """`tile/0/x001/x234/067`, with `.p/WIDTH` for a partial tile."""
    digits = str(index)
    digits = digits.zfill(-(-len(digits) // 3) * 3)
    parts = [digits[at : at + 3] for at in range(0, len(digits), 3)]
    name = "/".join([*(f"x{part}" for part in parts[:-1]), parts[-1]])
    return f"tile/{level}/{name}" + ("" if width == WIDTH else f".p/{width}")


def tile_width(level: int, index: int, size: int) -> int:
    """How many hashes a tile has in a tree of this size."""
    return max(0, min(WIDTH, (size >> HEIGHT * level) - index * WIDTH))


def right_edge(size: int) -> Iterator[tuple[int, int, int]]:
    """(level, index, width) of the last tile of each level; width 0 where it would be empty."""
    level = 0
    while count := size >> HEIGHT * level:
        yield level, count // WIDTH, count % WIDTH
        level += 1


def encode_bundle(entries: Iterable[bytes]) -> bytes:
    return b"".join(_LENGTH.pack(len(entry)) + entry for entry in entries)


def decode_bundle(data: bytes, width: int) -> list[bytes]:
    entries = []
    at = 0
    while at < len(data):
        if at + _LENGTH.size > len(data):
            raise TamperedLog("a bundle of entries ends in the middle of a length")
        (length,) = _LENGTH.unpack_from(data, at)
        at += _LENGTH.size
        if at + length > len(data):
            raise TamperedLog("a bundle of entries ends in the middle of an entry")
        entries.append(data[at : at + length])
        at += length
    if len(entries) != width:
        raise TamperedLog(f"a bundle has {len(entries)} entries, and its name says {width}")
    return entries


def split_tile(data: bytes) -> list[bytes]:
    return [data[at : at + HASH_BYTES] for at in range(0, len(data), HASH_BYTES)]


def check_entry(entry: bytes) -> bytes:
    if len(entry) > MAX_ENTRY_BYTES:
        raise ConfigurationError(
            f"an entry of a log has at most {MAX_ENTRY_BYTES} bytes, and this has {len(entry)}: "
            "log its digest"
        )
    return entry


class Edge:
    """The partial tiles of a tree, which are all that appending needs of it."""

    def __init__(self, levels: Sequence[Sequence[bytes]] = ()) -> None:
        self.levels = [list(level) for level in levels]

    def copy(self) -> Edge:
        return Edge(self.levels)

    @property
    def size(self) -> int:
        return sum(len(hashes) << HEIGHT * level for level, hashes in enumerate(self.levels))

    def add(self, leaf: bytes) -> list[tuple[int, int, bytes]]:
        """Adds a leaf. Returns (level, index, content) of each tile that is full by it."""
        full: list[tuple[int, int, bytes]] = []
        found, level = leaf, 0
        index = self.size
        while True:
            if level == len(self.levels):
                self.levels.append([])
            hashes = self.levels[level]
            hashes.append(found)
            if len(hashes) < WIDTH:
                return full
            index >>= HEIGHT
            full.append((level, index, b"".join(hashes)))
            found = tree.perfect_hash(hashes)
            self.levels[level] = []
            level += 1

    def root(self) -> bytes:
        """Each level's hashes are split into perfect subtrees, the highest level first."""
        subtrees: list[bytes] = []
        for hashes in reversed(self.levels):
            for height, index in tree.peaks(0, len(hashes)):
                start = index << height
                subtrees.append(tree.perfect_hash(hashes[start : start + (1 << height)]))
        return tree.folded(subtrees)
