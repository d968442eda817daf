"""A log on disk. It can be read and checked, and one process at a time can append to it.

DIR/checkpoint                the log's signed size and root
DIR/tile/<L>/<N>[.p/<W>]      hashes (tree.py)
DIR/tile/entries/<N>[.p/<W>]  entries

Everything in the folder is checked against hashes before it is believed.

An append writes tiles and bundles under names that no signed tree uses, makes them durable, and
then replaces the checkpoint, which is the commit. If the process is killed at any point, the log is
as it was before the append or after it, perhaps with files that nothing refers to.

The owner of the key keeps the last checkpoint that it signed beside the key. So it does not go on
with a folder that was put back to an older state, which would sign two different logs.
"""

from __future__ import annotations

import contextlib
import shutil
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Final, Self, TypeVar

from sealring.errors import (
    ConfigurationError,
    ForkedLog,
    NotALog,
    TamperedLog,
)
from sealring.formats.files import (
    LEFT_BEHIND,
    DurableFiles,
    locked,
    not_written,
    read_limited,
    replace_private,
)
from sealring.formats.log import tree
from sealring.formats.log.checkpoints import (
    Checkpoint,
    SignedCheckpoint,
    open_checkpoint,
    parse_checkpoint,
)
from sealring.formats.log.notes import (
    MAX_NOTE_BYTES,
    Note,
    SignatureLine,
    Signer,
    parse_note,
    with_signatures,
)
from sealring.formats.log.policy import Log, LogPolicy
from sealring.formats.log.tree import (
    HASH_BYTES,
    HEIGHT,
    MAX_BUNDLE_BYTES,
    WIDTH,
    Edge,
    Level,
    check_entry,
    decode_bundle,
    encode_bundle,
    right_edge,
    split_tile,
    tile_path,
    tile_width,
)

CHECKPOINT: Final = "checkpoint"
_TILES_KEPT: Final = 512
BUNDLES_KEPT: Final = 2
K = TypeVar("K")
V = TypeVar("V")


def read_checkpoint(folder: Path) -> bytes:
    """Reads the folder's checkpoint. `checkpoints.open_checkpoint` checks it."""
    content = read_limited(folder / CHECKPOINT, MAX_NOTE_BYTES)
    if content is None:
        raise NotALog(f"{folder} holds no log: there is no file {CHECKPOINT} in it")
    return content


class StoredTree:
    """A tree of a given size, read from a folder's tiles. Memory does not grow with the log."""

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
        # A full tile begins with the hashes of the partial one.
        if len(data) not in (width * HASH_BYTES, WIDTH * HASH_BYTES):
            raise TamperedLog(f"{tile_path(level, number, width)} has not {width} hashes")
        return split_tile(data)[:width]

    def bundle(self, number: int) -> list[bytes]:
        """The entries of a bundle. They are not compared with their hashes yet."""
        entries = self._bundles.get(number)
        if entries is None:
            width = tile_width(0, number, self.size)
            data = self._read("entries", number, width, MAX_BUNDLE_BYTES)
            entries = decode_bundle(data, width)
            _keep(self._bundles, number, entries, BUNDLES_KEPT)
        return entries

    def entry(self, index: int, root: bytes) -> bytes:
        """An entry. It is proved to be in the tree of this root."""
        self.inclusion_proof(index, root)
        number, position = divmod(index, WIDTH)
        entry = self.bundle(number)[position]
        if tree.leaf_hash(entry) != self.subtree(0, index):
            raise TamperedLog(f"entry {index} is not the one that was logged")
        return entry

    def inclusion_proof(self, index: int, root: bytes) -> list[bytes]:
        """A proof that leads to `root`. TamperedLog if there is none."""
        proof = tree.inclusion_proof(index, self.size, self.subtree)
        try:
            tree.check_inclusion(index, self.size, self.subtree(0, index), proof, root)
        except TamperedLog:
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
        """ForkedLog unless this tree continues the checkpoint that was seen earlier."""
        if earlier.size > self.size:
            raise ForkedLog(
                f"the log {earlier.origin} ends at {self.size} entries, and {whose} has "
                f"{earlier.size}: its end was cut off, or an older copy was put in its place",
                code="log.truncated_log",
            )
        before, _ = self.consistency_proof(earlier.size, root)
        if before != earlier.root:
            raise ForkedLog(
                f"the log {earlier.origin} has other entries than {whose}, among the first "
                f"{earlier.size}: it was rewritten, or shows each reader another view"
            )

    def entries(self) -> Iterator[bytes]:
        """Yields all entries in order. They are not compared with their hashes yet."""
        for number in range(-(-self.size // WIDTH)):
            yield from self.bundle(number)

    def check_all(
        self, root: bytes, show: Callable[[int, bytes], None] = lambda index, entry: None
    ) -> None:
        """Reads everything, and compares entries with tiles and tiles with the root.

        `show` gets each entry as it is read. The caller must not use them before this returns.
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
        """The partial tiles, after a check against the root."""
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
            # A partial tile may be deleted once the full one exists.
            content = read_limited(self._folder / tile_path(level, number), limit)
            if content is not None and level == "entries" and width < WIDTH:
                content = _first_entries(content, width)
        if content is None:
            raise ForkedLog(
                f"{tile_path(level, number, width)}, which a log of {self.size} entries has, is "
                f"missing in {self._folder}",
                code="log.truncated_log",
            )
        return content

    def _changed(self, what: str) -> TamperedLog:
        return TamperedLog(
            f"the hashes of {what} do not lead to the root that the log signed: a tile was "
            "changed. `sealring audit log` finds it"
        )


def _inner_hashes(hashes: list[bytes]) -> list[list[bytes]]:
    """A tile's hashes and those of every perfect subtree inside it, by height."""
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


# ---- appending


def create_log(folder: Path, signer: Signer) -> None:
    """Makes an empty log. The folder may exist, with nothing in it but a failed writer's files."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _require_empty(folder)
        with locked(folder):
            _require_empty(folder)  # another writer may have had the lock
            checkpoint = Checkpoint(signer.name, 0, tree.EMPTY_ROOT).encode()
            batch = DurableFiles(folder)
            batch.clear()
            batch.write(CHECKPOINT, Note(checkpoint, (signer.sign(checkpoint),)).encode())
            batch.sync()
    except OSError as problem:
        raise not_written(folder, problem) from None


def _require_empty(folder: Path) -> None:
    if not {one.name for one in folder.iterdir()} <= LEFT_BEHIND:
        raise ConfigurationError(f"{folder} is not empty: choose another folder for the log")


class LogWriter:
    """Appends to a log: `with LogWriter(...) as log: log.append(entries)`. Holds the lock."""

    def __init__(
        self, folder: Path, signer: Signer, remembered: Path | None = None, wait: float = 0.0
    ) -> None:
        """`remembered`: the file beside the key. `wait`: how long to wait for another writer."""
        self._folder = folder
        self._signer = signer
        self._remembered = remembered
        self._wait = wait
        self._stack = contextlib.ExitStack()
        self._edge = Edge()
        self._bundle: list[bytes] = []
        self._checkpoint: SignedCheckpoint
        self._uncertain = False
        """A commit failed half-way. To sign another tree of that size would be a fork."""

    def __enter__(self) -> Self:
        read_checkpoint(self._folder)  # so that no lock file is made in a folder that is no log
        with contextlib.ExitStack() as stack:
            stack.enter_context(locked(self._folder, self._wait))
            DurableFiles(self._folder).clear()
            self._load()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    @property
    def checkpoint(self) -> SignedCheckpoint:
        return self._checkpoint

    @property
    def stored(self) -> StoredTree:
        return StoredTree(self._folder, self._checkpoint.size)

    def append(self, entries: Iterable[bytes], expected: bytes | None = None) -> range:
        """Appends all entries in one commit, and returns their numbers.

        With `expected`, nothing is signed unless the entries lead to this root.
        """
        self._require_certain()
        edge, bundle = self._edge.copy(), list(self._bundle)
        before = edge.size
        batch = DurableFiles(self._folder)
        try:
            for entry in entries:
                bundle.append(check_entry(entry))
                for level, number, content in edge.add(tree.leaf_hash(entry)):
                    batch.write(tile_path(level, number), content)
                    if level == 0:
                        batch.write(tile_path("entries", number), encode_bundle(bundle))
                        bundle = []
            if edge.size == before:
                return range(before, before)
            if expected is not None and edge.root() != expected:
                raise TamperedLog("the entries to append are not those that were signed for")
            for level, number, width in right_edge(edge.size):
                if width:
                    batch.write(tile_path(level, number, width), b"".join(edge.levels[level]))
            if bundle:
                name = tile_path("entries", edge.size // WIDTH, len(bundle))
                batch.write(name, encode_bundle(bundle))
            batch.sync()
            checkpoint = Checkpoint(self._signer.name, edge.size, edge.root())
            text = checkpoint.encode()
            self._publish(Note(text, (self._signer.sign(text),)))
        except OSError as problem:
            raise not_written(self._folder, problem) from None
        self._edge, self._bundle = edge, bundle
        self._drop_outdated(before)
        return range(before, edge.size)

    def add_cosignatures(self, lines: Iterable[SignatureLine]) -> SignedCheckpoint:
        """Adds cosignatures to the current checkpoint. The caller must have checked them."""
        self._require_certain()
        self._publish(with_signatures(self._checkpoint.note, list(lines)))
        return self._checkpoint

    def _publish(self, note: Note) -> None:
        encoded = note.encode()
        signed = open_checkpoint(encoded, self._own_policy())
        batch = DurableFiles(self._folder)
        self._uncertain = True
        try:
            batch.write(CHECKPOINT, encoded)
            batch.sync()
        except OSError as problem:
            raise not_written(self._folder, problem) from None
        if self._remembered is not None:
            replace_private(self._remembered, encoded)
        self._checkpoint = signed
        self._uncertain = False

    def _require_certain(self) -> None:
        if self._uncertain:
            raise ConfigurationError(
                f"an earlier commit to {self._folder} failed, and may be on the disk or not: open "
                "the log again"
            )

    def _load(self) -> None:
        signed = open_checkpoint(read_checkpoint(self._folder), self._own_policy())
        stored = StoredTree(self._folder, signed.size)
        if self._remembered is not None:
            content = read_limited(self._remembered, MAX_NOTE_BYTES)
            if content is not None:
                last = parse_checkpoint(parse_note(content).text)
                whose = f"the last checkpoint that its key signed ({self._remembered})"
                stored.check_contains(signed.root, last, whose)
        self._edge = stored.edge(signed.root)
        self._bundle = stored.bundle(signed.size // WIDTH) if signed.size % WIDTH else []
        leaves = self._edge.levels[0] if self._edge.levels else []
        if [tree.leaf_hash(entry) for entry in self._bundle] != leaves:
            raise TamperedLog("the last entries of the log are not those that were logged")
        self._checkpoint = signed

    def _own_policy(self) -> LogPolicy:
        return LogPolicy((Log(self._signer.verifier),))

    def _drop_outdated(self, before: int) -> None:
        """Removes partial tiles of the earlier tree that are now full. Failures are ignored."""
        for level, number, width in right_edge(before):
            if width and tile_width(level, number, self._edge.size) == WIDTH:
                names = [tile_path(level, number)]
                names += [tile_path("entries", number)] if level == 0 else []
                for name in names:
                    shutil.rmtree(self._folder / f"{name}.p", ignore_errors=True)
