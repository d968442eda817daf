"""A log on disk, appended to by one process at a time.

An append writes tiles and bundles under names that no signed tree has, makes them durable, and then
replaces the checkpoint, which is the commit. A process that is killed at any point leaves the log
as it was before the append or as it is after it, and files that nothing refers to.

The key's owner remembers, beside the key, the last checkpoint that it signed. A folder that was put
back to an older state is therefore not continued: that would sign two different logs.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Self

from sealring.errors import ConfigurationError, TamperedLog
from sealring.formats.files import (
    LEFT_BEHIND,
    Batch,
    locked,
    not_written,
    read_limited,
    replace_private,
    write_private,
    write_public,
)
from sealring.identity.private_files import read_private
from sealring.provenance import tree
from sealring.provenance.checkpoints import (
    Checkpoint,
    SignedCheckpoint,
    open_checkpoint,
    parse_checkpoint,
)
from sealring.provenance.folder import CHECKPOINT, StoredTree, read_checkpoint
from sealring.provenance.notes import (
    MAX_NOTE_BYTES,
    Note,
    SignatureLine,
    Signer,
    parse_note,
    with_signatures,
)
from sealring.provenance.policy import Log, LogPolicy
from sealring.provenance.tiles import (
    WIDTH,
    Edge,
    check_entry,
    encode_bundle,
    right_edge,
    tile_path,
    tile_width,
)


def read_signer(path: Path) -> Signer:
    """A signer key from a file that no other user can read."""
    content = read_private(path, "the signer key", ConfigurationError)
    return Signer.parse(content.decode("utf-8", "replace").strip())


def write_signer(path: Path, signer: Signer) -> None:
    write_private(path, (signer.encode() + "\n").encode())


def write_key_pair(path: Path, signer: Signer) -> Path:
    """A new signer key and its verifier key beside it, whose path is returned: NAME.vkey.

    Nothing is overwritten: only who could make the signer key writes the other one.
    """
    beside = path.with_name(f"{path.name.removesuffix('.key')}.vkey")
    if os.path.lexists(beside):
        raise ConfigurationError(
            f"{beside} is there already and will not be overwritten: move it away first"
        )
    write_signer(path, signer)
    write_public(beside, f"{signer.verifier.encode()}\n".encode())
    return beside


def create_log(folder: Path, signer: Signer) -> None:
    """An empty log. The folder may exist, with no more in it than a writer left that failed."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _require_empty(folder)
        with locked(folder):
            _require_empty(folder)  # another writer may have had the lock
            checkpoint = Checkpoint(signer.name, 0, tree.EMPTY_ROOT).encode()
            batch = Batch(folder)
            batch.clear()
            batch.write(CHECKPOINT, Note(checkpoint, (signer.sign(checkpoint),)).encode())
            batch.sync()
    except OSError as problem:
        raise not_written(folder, problem) from None


def _require_empty(folder: Path) -> None:
    if not {one.name for one in folder.iterdir()} <= LEFT_BEHIND:
        raise ConfigurationError(f"{folder} is not empty: choose another folder for the log")


class LogWriter:
    """`with LogWriter(...) as log: log.append(entries)`. Holds the folder's lock meanwhile."""

    def __init__(
        self, folder: Path, signer: Signer, remembered: Path | None = None, wait: float = 0.0
    ) -> None:
        """`remembered` is the file beside the key; `wait` is for another writer's lock."""
        self._folder = folder
        self._signer = signer
        self._remembered = remembered
        self._wait = wait
        self._stack = contextlib.ExitStack()
        self._edge = Edge()
        self._bundle: list[bytes] = []
        self._checkpoint: SignedCheckpoint
        self._uncertain = False
        """A commit failed half-way. Signing another tree of that size would be a fork."""

    def __enter__(self) -> Self:
        read_checkpoint(self._folder)  # so that no lock appears in a folder that is no log
        with contextlib.ExitStack() as stack:
            stack.enter_context(locked(self._folder, self._wait))
            Batch(self._folder).clear()
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
        """Appends all entries in one commit; returns their numbers.

        With `expected`, nothing is signed unless they lead to this root.
        """
        self._require_certain()
        edge, bundle = self._edge.copy(), list(self._bundle)
        before = edge.size
        batch = Batch(self._folder)
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
        """Adds cosignatures of the present checkpoint to it. The caller has checked them."""
        self._require_certain()
        self._publish(with_signatures(self._checkpoint.note, list(lines)))
        return self._checkpoint

    def _publish(self, note: Note) -> None:
        encoded = note.encode()
        signed = open_checkpoint(encoded, self._own_policy())
        batch = Batch(self._folder)
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
        """Removes partial tiles of the earlier tree that are full now. It may fail."""
        for level, number, width in right_edge(before):
            if width and tile_width(level, number, self._edge.size) == WIDTH:
                names = [tile_path(level, number)]
                names += [tile_path("entries", number)] if level == 0 else []
                for name in names:
                    shutil.rmtree(self._folder / f"{name}.p", ignore_errors=True)
