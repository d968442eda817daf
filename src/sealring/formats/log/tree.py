"""Merkle trees as RFC 6962 hashes them, and how a tree is cut into files (c2sp.org/tlog-tiles).

Pure functions on bytes, without I/O. A perfect subtree is (height, index): it covers the leaves
from index << height on, 1 << height of them. Every hash in a proof is that of a perfect subtree, or
is folded from a few of those.

A tile holds up to 256 hashes of one height, which is 0, 8, 16 and so on. A bundle holds the entries
of a tile of height 0. The last tile of each level is partial, and its width is part of its name. So
no file of a signed tree is ever written again.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, Literal, TypeAlias

from sealring.errors import ConfigurationError, ForkedLog, TamperedLog

EMPTY_ROOT: Final = hashlib.sha256(b"").digest()
MAX_PROOF: Final = 63
"""The most hashes in a proof, because sizes have 63 bits."""
WIDTH: Final = 256
HEIGHT: Final = 8
HASH_BYTES: Final = 32
MAX_ENTRY_BYTES: Final = (1 << 16) - 1
MAX_BUNDLE_BYTES: Final = WIDTH * (2 + MAX_ENTRY_BYTES)
_LENGTH: Final = struct.Struct(">H")

ReadSubtree = Callable[[int, int], bytes]
"""Gives the hash of a perfect subtree, by its height and index."""
Level: TypeAlias = int | Literal["entries"]


def leaf_hash(entry: bytes) -> bytes:
    return hashlib.sha256(b"\0" + entry).digest()


def node_hash(left: bytes, right: bytes) -> bytes:
    return hashlib.sha256(b"\1" + left + right).digest()


def perfect_hash(hashes: Sequence[bytes]) -> bytes:
    """The root over adjacent subtrees of one height. Their number is a power of two."""
    while len(hashes) > 1:
        hashes = [node_hash(hashes[index], hashes[index + 1]) for index in range(0, len(hashes), 2)]
    return hashes[0]


def folded(hashes: Sequence[bytes]) -> bytes:
    """The root over perfect subtrees that shrink from left to right."""
    if not hashes:
        return EMPTY_ROOT
    root = hashes[-1]
    for left in reversed(hashes[:-1]):
        root = node_hash(left, root)
    return root


def grown(size: int, subtrees: Sequence[bytes], leaf: bytes) -> list[bytes]:
    """The perfect subtrees after one more leaf, from those of the first `size` leaves."""
    found = [*subtrees, leaf]
    while size & 1:
        right = found.pop()
        found[-1] = node_hash(found[-1], right)
        size >>= 1
    return found


def peaks(start: int, end: int) -> Iterator[tuple[int, int]]:
    """Yields the perfect subtrees that cover the leaves [start, end), from left to right.

    `start` must be a multiple of the largest one's size, as in every split of RFC 6962.
    """
    count = end - start
    for height in reversed(range(count.bit_length())):
        if count >> height & 1:
            yield height, start >> height
            start += 1 << height


def tree_root(size: int, read: ReadSubtree) -> bytes:
    return _range_hash(0, size, read)


def inclusion_proof(index: int, size: int, read: ReadSubtree) -> list[bytes]:
    """RFC 6962, 2.1.1. The hashes go from the leaf's sibling up to the root's child."""
    if not 0 <= index < size:
        raise TamperedLog(f"there is no entry {index} in a log of {size}", code="log.not_included")
    start, end = 0, size
    siblings = []
    while end - start > 1:
        middle = start + _split(end - start)
        if index < middle:
            siblings.append((middle, end))
            end = middle
        else:
            siblings.append((start, middle))
            start = middle
    return [_range_hash(*sibling, read) for sibling in reversed(siblings)]


def consistency_proof(old: int, size: int, read: ReadSubtree) -> list[bytes]:
    """RFC 6962, 2.1.2. Proves that the first `old` entries of a log of `size` are unchanged."""
    if not 0 <= old <= size:
        raise ForkedLog(f"a log of {size} entries cannot follow from one of {old}")
    if old == 0:
        return []
    start, end = 0, size
    ranges = []
    while old != end:
        middle = start + _split(end - start)
        if old <= middle:
            ranges.append((middle, end))
            end = middle
        else:
            ranges.append((start, middle))
            start = middle
    if start != 0:
        ranges.append((start, end))
    return [_range_hash(*each, read) for each in reversed(ranges)]


def check_inclusion(
    index: int, size: int, leaf: bytes, proof: Sequence[bytes], root: bytes
) -> None:
    """RFC 9162, 2.1.3.2. TamperedLog unless the proof leads from the leaf to the root."""
    failed = TamperedLog(
        f"the proof does not show this entry as number {index} of {size}", code="log.not_included"
    )
    if not 0 <= index < size or len(proof) > MAX_PROOF:
        raise failed
    node, last = index, size - 1
    found = leaf
    for sibling in proof:
        if last == 0:
            raise failed
        if node & 1 or node == last:
            found = node_hash(sibling, found)
            while not node & 1 and node:
                node, last = node >> 1, last >> 1
        else:
            found = node_hash(found, sibling)
        node, last = node >> 1, last >> 1
    if last or found != root:
        raise failed


def check_consistency(
    old: int, old_root: bytes, size: int, new_root: bytes, proof: Sequence[bytes]
) -> None:
    """RFC 9162, 2.1.4.2. ForkedLog unless the new tree begins with the whole old one."""
    failed = ForkedLog(f"the log of {size} entries does not continue the one of {old}")
    if old > size or len(proof) > MAX_PROOF:
        raise failed
    if old in (0, size):
        known = new_root if old == size else EMPTY_ROOT
        if proof or old_root != known or (size == 0 and new_root != EMPTY_ROOT):
            raise failed
        return
    if not proof:
        raise failed
    hashes = [old_root, *proof] if old & (old - 1) == 0 else list(proof)
    node, last = old - 1, size - 1
    while node & 1:
        node, last = node >> 1, last >> 1
    before = after = hashes[0]
    for each in hashes[1:]:
        if last == 0:
            raise failed
        if node & 1 or node == last:
            before, after = node_hash(each, before), node_hash(each, after)
            while not node & 1 and node:
                node, last = node >> 1, last >> 1
        else:
            after = node_hash(after, each)
        node, last = node >> 1, last >> 1
    if last or before != old_root or after != new_root:
        raise failed


def _range_hash(start: int, end: int, read: ReadSubtree) -> bytes:
    return folded([read(height, index) for height, index in peaks(start, end)])


def _split(count: int) -> int:
    """The largest power of two below `count`."""
    return 1 << (count - 1).bit_length() - 1


# ---- tiles


def tile_path(level: Level, index: int, width: int = WIDTH) -> str:
    """For example `tile/0/x001/x234/067`, with `.p/WIDTH` for a partial tile."""
    digits = str(index)
    digits = digits.zfill(-(-len(digits) // 3) * 3)
    parts = [digits[at : at + 3] for at in range(0, len(digits), 3)]
    name = "/".join([*(f"x{part}" for part in parts[:-1]), parts[-1]])
    return f"tile/{level}/{name}" + ("" if width == WIDTH else f".p/{width}")


def tile_width(level: int, index: int, size: int) -> int:
    """The number of hashes that a tile has in a tree of this size."""
    return max(0, min(WIDTH, (size >> HEIGHT * level) - index * WIDTH))


def right_edge(size: int) -> Iterator[tuple[int, int, int]]:
    """Yields (level, index, width) of each level's last tile. The width is 0 if it has no hash."""
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
    """The partial tiles of a tree. Appending needs nothing else of the tree."""

    def __init__(self, levels: Sequence[Sequence[bytes]] = ()) -> None:
        self.levels = [list(level) for level in levels]

    def copy(self) -> Edge:
        return Edge(self.levels)

    @property
    def size(self) -> int:
        return sum(len(hashes) << HEIGHT * level for level, hashes in enumerate(self.levels))

    def add(self, leaf: bytes) -> list[tuple[int, int, bytes]]:
        """Adds a leaf. Returns (level, index, content) of each tile that becomes full."""
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
            found = perfect_hash(hashes)
            self.levels[level] = []
            level += 1

    def root(self) -> bytes:
        """The root: each level's hashes as perfect subtrees, the highest level first."""
        subtrees: list[bytes] = []
        for hashes in reversed(self.levels):
            for height, index in peaks(0, len(hashes)):
                start = index << height
                subtrees.append(perfect_hash(hashes[start : start + (1 << height)]))
        return folded(subtrees)
