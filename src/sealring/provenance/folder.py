"""A log on disk, read and checked. Nothing in the folder is believed but by its hashes.

DIR/checkpoint                the log's signed size and root
DIR/tile/<L>/<N>[.p/<W>]      hashes (tiles.py)
DIR/tile/entries/<N>[.p/<W>]  entries
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, TypeVar

from sealring.errors import ForkedLog, NotALog, NotIncluded, TamperedLog, TruncatedLog
from sealring.formats.files import read_limited
from sealring.provenance import tree
from sealring.provenance.checkpoints import Checkpoint
from sealring.provenance.notes import MAX_NOTE_BYTES
from sealring.provenance.tiles import (
    HASH_BYTES,
    HEIGHT,
    MAX_BUNDLE_BYTES,
    WIDTH,
    Edge,
    Level,
    decode_bundle,
    right_edge,
    split_tile,
    tile_path,
    tile_width,
)

CHECKPOINT: Final = "checkpoint"
_TILES_KEPT: Final = 512
_BUNDLES_KEPT: Final = 2
K = TypeVar("K")
V = TypeVar("V")


def read_checkpoint(folder: Path) -> bytes:
    """The folder's checkpoint as it is; `checkpoints.open_checkpoint` checks it."""
    content = read_limited(folder / CHECKPOINT, MAX_NOTE_BYTES)
    if content is None:
        raise NotALog(f"{folder} holds no log: there is no file {CHECKPOINT} in it")
    return content


class StoredTree:
    """The tree of a size, from a folder's tiles. Memory does not grow with the log."""

    def __init__(self, folder: Path, size: int) -> None:
        self._folder = folder
        self.size = size
        self._tiles: OrderedDict[tuple[int, int], list[list[bytes]]] = OrderedDict()
        self._bundles: OrderedDict[int, list[bytes]] = OrderedDict()

    def subtree(self, height: int, index: int) -> bytes:
        """The hash of a perfect subtree, from the tile that covers it."""
        level, inner = divmod(height, HEIGHT)
        number, position = divmod(index << inner, WIDTH)
        heights = self._tiles.get((level, number))
        if heights is None:
            heights = _inner_hashes(self.tile(level, number))
            _keep(self._tiles, (level, number), heights, _TILES_KEPT)
        return heights[inner][position >> inner]

    def tile(self, level: int, number: int) -> list[bytes]:
        width = tile_width(level, number, self.size)
        data = self._read(level, number, width, WIDTH * HASH_BYTES)
        # A full tile begins with what the partial one held.
        if len(data) not in (width * HASH_BYTES, WIDTH * HASH_BYTES):
            raise TamperedLog(f"{tile_path(level, number, width)} has not {width} hashes")
        return split_tile(data)[:width]

    def bundle(self, number: int) -> list[bytes]:
        """The entries of a bundle, not yet compared with their hashes."""
        entries = self._bundles.get(number)
        if entries is None:
            width = tile_width(0, number, self.size)
            data = self._read("entries", number, width, MAX_BUNDLE_BYTES)
            entries = decode_bundle(data, width)
            _keep(self._bundles, number, entries, _BUNDLES_KEPT)
        return entries

    def entry(self, index: int, root: bytes) -> bytes:
        """An entry, proved to be in the tree of this root."""
        self.inclusion_proof(index, root)
        number, position = divmod(index, WIDTH)
        entry = self.bundle(number)[position]
        if tree.leaf_hash(entry) != self.subtree(0, index):
            raise TamperedLog(f"entry {index} is not the one that was logged")
        return entry

    def inclusion_proof(self, index: int, root: bytes) -> list[bytes]:
        """A proof that leads to `root`, or TamperedLog."""
        proof = tree.inclusion_proof(index, self.size, self.subtree)
        try:
            tree.check_inclusion(index, self.size, self.subtree(0, index), proof, root)
        except NotIncluded:
            raise self._changed(f"entry {index}") from None
        return proof

    def consistency_proof(self, old: int, root: bytes) -> tuple[bytes, list[bytes]]:
        """The root of the first `old` entries, and a proof that leads from it to `root`."""
        before = tree.tree_root(old, self.subtree)
        proof = tree.consistency_proof(old, self.size, self.subtree)
        try:
            tree.check_consistency(old, before, self.size, root, proof)
        except ForkedLog:
            raise self._changed(f"the first {old} entries") from None
        return before, proof

    def check_contains(self, root: bytes, earlier: Checkpoint, whose: str) -> None:
        """TruncatedLog or ForkedLog unless this tree continues the one that was seen earlier."""
        if earlier.size > self.size:
            raise TruncatedLog(
                f"the log {earlier.origin} ends at {self.size} entries, and {whose} has "
                f"{earlier.size}: its end was cut off, or an older copy was put in its place"
            )
        before, _ = self.consistency_proof(earlier.size, root)
        if before != earlier.root:
            raise ForkedLog(
                f"the log {earlier.origin} has other entries than {whose}, among the first "
                f"{earlier.size}: it was rewritten, or shows each reader another view"
            )

    def entries(self) -> Iterator[bytes]:
        """All entries in order, not yet compared with their hashes."""
        for number in range(-(-self.size // WIDTH)):
            yield from self.bundle(number)

    def check_all(
        self, root: bytes, show: Callable[[int, bytes], None] = lambda index, entry: None
    ) -> None:
        """Reads everything, and compares entries with tiles and tiles with the root.

        `show` is given each entry as it was read: what it is used for waits until this returns.
        """
        edge = Edge()
        for index, entry in enumerate(self.entries()):
            show(index, entry)
            leaf = tree.leaf_hash(entry)
            if leaf != self.subtree(0, index):
                raise TamperedLog(f"entry {index} is not the one that was logged")
            for level, number, content in edge.add(leaf):
                if b"".join(self.tile(level, number)) != content:
                    raise TamperedLog(f"{tile_path(level, number)} was changed")
        for level, number, width in right_edge(self.size):
            if width and self.tile(level, number) != edge.levels[level]:
                raise TamperedLog(f"{tile_path(level, number, width)} was changed")
        if edge.root() != root:
            raise TamperedLog(
                "the entries are not those that the log's checkpoint was signed for: they were "
                "changed together with their hashes"
            )

    def edge(self, root: bytes) -> Edge:
        """The partial tiles, checked against the root."""
        levels: list[list[bytes]] = []
        for level, number, width in right_edge(self.size):
            levels.append(self.tile(level, number) if width else [])
        edge = Edge(levels)
        if edge.root() != root:
            raise self._changed("the end of the log")
        return edge

    def _read(self, level: Level, number: int, width: int, limit: int) -> bytes:
        if width == 0:
            raise TamperedLog(f"a log of {self.size} entries has no {tile_path(level, number)}")
        content = None
        if width < WIDTH:
            content = read_limited(self._folder / tile_path(level, number, width), limit)
        if content is None:
            # A partial tile may be deleted once the full one is there.
            content = read_limited(self._folder / tile_path(level, number), limit)
            if content is not None and level == "entries" and width < WIDTH:
                content = _first_entries(content, width)
        if content is None:
            raise TruncatedLog(
                f"{tile_path(level, number, width)}, which a log of {self.size} entries has, is "
                f"missing in {self._folder}"
            )
        return content

    def _changed(self, what: str) -> TamperedLog:
        return TamperedLog(
            f"the hashes of {what} do not lead to the root that the log signed: a tile was "
            "changed. `sealring log verify` finds it"
        )


def _inner_hashes(hashes: list[bytes]) -> list[list[bytes]]:
    """A tile's hashes, and those of every perfect subtree inside it, by height."""
    heights = [hashes]
    while len(heights[-1]) > 1:
        below = heights[-1]
        heights.append(
            [tree.node_hash(below[at], below[at + 1]) for at in range(0, len(below) - 1, 2)]
        )
    return heights


def _first_entries(bundle: bytes, width: int) -> bytes:
    at = 0
    for _ in range(width):
        at += 2 + int.from_bytes(bundle[at : at + 2], "big")
    return bundle[:at]


def _keep(cache: OrderedDict[K, V], key: K, value: V, limit: int) -> None:
    cache[key] = value
    if len(cache) > limit:
        cache.popitem(last=False)
