"""Seals files and folders into a vault, opens them, and seals a whole vault under a new key."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO, Final, NoReturn

from sealring import _native
from sealring.errors import (
    BadSource,
    ConfigurationError,
    DiskFull,
    NotAVault,
    SealringError,
    StoreFailed,
    TamperedChunk,
    UnsafePath,
    Unsupported,
    VaultError,
)
from sealring.formats.files import NEW_FILE, not_written, sync_directory
from sealring.vault import objects
from sealring.vault.digests import DIGEST_BYTES, computed, faster
from sealring.vault.files import (
    check_inside,
    check_output,
    make_folders,
    move_into_place,
    unfinished,
)
from sealring.vault.keys import Presented
from sealring.vault.objects import Copy, Part, complete_copies
from sealring.vault.opened import KeyChange, Tell, tell_later
from sealring.vault.sealed import Progress, read_as
from sealring.vault.vault import Stored, Vault

KIND: Final = "files"
_OTHER_KINDS: Final = {
    "checkpoint": "load it with sealring.vault.CheckpointReader, or run `sealring vault open`",
    "dataset": "read it with sealring.vault.Dataset",
}
_BLOCK: Final = 8 << 20
"""A multiple of a chunk's size."""
_BUFFER: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class File:
    path: str
    """The path in the sealed folder; empty if a single file was sealed."""
    part: str
    executable: bool


@dataclass(frozen=True, slots=True)
class Content:
    tree: bool
    files: list[File]
    folders: list[str]
    """The paths of empty folders."""


def seal_path(vault: Vault, source: Path, name: str, suite: str | None, progress: Progress) -> int:
    """Seals a file or a folder as the next version of an object. Returns the version's number."""
    found = list(files_below(source))
    watched = Watched()
    for path, inside in found:
        check_text(path, inside)
    with vault.held(alone=False):
        vault.refresh()
        copy = vault.new_version(name, suite)
        try:
            parts, files = [], []
            folders = [inside for path, inside in found if inside and path.is_dir()]
            sources = [one for one in found if one[1] not in folders or not one[1]]
            for number, (path, inside) in enumerate(sources):
                part, executable = _seal_file(copy, path, f"{number:08}", watched, progress)
                parts.append(part)
                files.append({"path": inside, "part": part.name, "executable": executable})
            tree = [inside for _, inside in found] != [""]  # a single file has the path ""
            content = json.dumps({"tree": tree, "files": files, "folders": folders})
            watched.check()
            if list(files_below(source)) != found:
                raise BadSource(
                    f"files came to {source}, or went, while it was sealed: seal it again when it "
                    "no longer changes",
                    code="vault.source_changed",
                )
            vault.commit(copy, KIND, name, parts, content)
        except BaseException:
            if not copy.complete:  # the ledger may know a complete one; it must not disappear
                vault.remove_version(copy.folder.parent)
            raise
    return copy.place.version


def open_object(stored: Stored, out: Path, progress: Progress) -> None:
    """Writes an object's plaintext to `out`. It gets this name once all of it is authentic."""
    content = content_of(stored)
    check_output(out)
    parts = {part.name: part for part in stored.manifest.parts}
    try:
        with unfinished(out) as temporary:
            if content.tree:
                temporary.mkdir(mode=0o700)
            for file in content.files:
                target = temporary
                if content.tree:
                    target = temporary / check_inside(file.path)
                    make_folders(target.parent)
                mode = 0o700 if file.executable else 0o600
                _open_file(stored, parts[file.part], target, mode, progress)
            for name in content.folders if content.tree else []:
                make_folders(temporary / check_inside(name))
            for folder, _, _ in os.walk(temporary):
                sync_directory(Path(folder))
            move_into_place(temporary, out)
    except OSError as problem:
        raise not_written(out, problem) from problem


def content_of(stored: Stored) -> Content:
    if stored.manifest.kind != KIND:
        how = _OTHER_KINDS.get(stored.manifest.kind, "a later sealring may open it")
        raise Unsupported(f"{stored.whose} is a {stored.manifest.kind}, not files: {how}")
    content: Content = read_as(Content, stored.manifest.content, f"the manifest of {stored.whose}")
    if {file.part for file in content.files} != {part.name for part in stored.manifest.parts}:
        raise NotAVault(f"the manifest of {stored.whose} lists other files than parts")
    return content


def verify(stored: Stored, progress: Progress) -> None:
    """Checks every chunk of every part, and keeps no plaintext."""
    for part in stored.manifest.parts:
        for _ in _blocks(stored, part, progress):
            pass


def rotate(
    vault: Vault,
    progress: Progress,
    also: Sequence[Presented] = (),
    tell: Tell = tell_later,
) -> KeyChange:
    """Seals everything again under new keys.

    The vault opens even if this is interrupted at any point: the header has the new key and the
    older ones, and a version keeps its old copy until its new one is complete. The next rotation
    removes the unfinished copies.
    """
    count = 0
    with vault.held(alone=True):
        vault.refresh()
        vault.require_writer()
        _remove_unfinished(vault)  # first: unfinished copies may fill the disk
        change = vault.begin_rotation(vault.header, also, tell)
        problems: list[VaultError] = []
        unwritten: list[SealringError] = []
        for stored in list(vault.stored(problems)):
            try:
                _reseal(vault, stored, progress)
                count += 1
            except VaultError as problem:
                problems.append(problem)
            except DiskFull as problem:
                unwritten.append(problem)
            except OSError as problem:
                unwritten.append(not_written(stored.copy.folder.parent, problem))
        # After a problem, a copy under an older key may be a version's only one.
        if not problems and not unwritten:
            for copy in list(vault.copies(problems)):
                if copy.vault_key != vault.ring.newest:
                    objects.remove(copy.folder)
        vault.end_rotation([*problems, *unwritten])
    return replace(change, versions=count)


def _remove_unfinished(vault: Vault) -> None:
    """Removes copies that a rotation did not finish; their versions have a complete copy."""
    for copy in list(vault.copies([])):
        if not copy.complete and complete_copies(copy.folder.parent):
            objects.remove(copy.folder)


def _reseal(vault: Vault, stored: Stored, progress: Progress) -> None:
    old = stored.copy
    copy = objects.new_copy(old.folder.parent, vault.ring, vault.header.vault, old.place.suite)
    try:
        _copy_into(copy, stored, progress)
    except BaseException:
        if not copy.complete:
            objects.remove(copy.folder)
        raise
    objects.remove(old.folder)


def _copy_into(copy: Copy, stored: Stored, progress: Progress) -> None:
    parts = []
    for part in stored.manifest.parts:
        pieces = ([block] for block in _blocks(stored, part, progress))
        parts.append(copy.seal_part(part.name, pieces, part.hash)[0])
    in_store = not copy.folder.locks
    for part in parts if in_store else []:  # check that they open before the old copy is removed
        with copy.opened(part, stored.whose):
            pass
    manifest = stored.manifest
    copy.commit(manifest.kind, manifest.name, parts, manifest.content)
    if in_store and not copy.complete:
        raise StoreFailed(
            f"{copy.folder} has no manifest, and the store said that it was put: rotate again"
        )


def _blocks(stored: Stored, part: Part, progress: Progress) -> Iterator[memoryview]:
    """Yields a part's plaintext in blocks.

    All of it is authentic as soon as it comes, but only the end without an error proves that it is
    what the manifest lists.
    """
    with stored.copy.opened(part, stored.whose) as reader:
        room = bytearray(min(_BLOCK, reader.length))
        chunk_hash = computed(part.hash)
        digests = bytearray() if reader.length else _native.chunk_digests(room, chunk_hash)
        for start in range(0, reader.length, _BLOCK):
            block = memoryview(room)[: min(_BLOCK, reader.length - start)]
            reader.read_into(start, block)
            found = _native.chunk_digests(block, chunk_hash)
            # The digests of a block of full chunks end with that of an empty chunk: drop it.
            digests += found if start + _BLOCK >= reader.length else found[:-DIGEST_BYTES]
            progress(len(block))
            yield block
    if objects.digest_of(digests) != part.digest:
        raise TamperedChunk(
            f"part {part.name} of {stored.whose} holds other bytes than its manifest lists: a "
            "holder of the vault's key has changed it. Restore it from a copy"
        )


def _open_file(stored: Stored, part: Part, target: Path, mode: int, progress: Progress) -> None:
    file = os.open(target, NEW_FILE, 0o600)
    with open(file, "wb", buffering=0) as output:
        for block in _blocks(stored, part, progress):
            left = block
            while left:
                left = left[output.write(left) :]
        os.fchmod(file, mode)
        os.fsync(file)


def _seal_file(
    copy: Copy, path: Path, name: str, watched: Watched, progress: Progress
) -> tuple[Part, bool]:
    with watched.open(str(path)) as source:
        part, _ = copy.seal_part(name, _pieces(source.fileno(), progress), faster())
        return part, bool(os.fstat(source.fileno()).st_mode & stat.S_IXUSR)


def _pieces(source: int, progress: Progress) -> Iterator[list[memoryview]]:
    """Yields a file's content in blocks.

    The file is not mapped: another process could change mapped bytes while they are sealed.
    """
    room = bytearray(_BLOCK)
    while count := os.readv(source, [room]):
        yield [memoryview(room)[:count]]
        progress(count)


class Watched:
    """Opens source files, which must not change until `check`.

    `check` raises BadSource if one was changed or removed since it was first opened.
    """

    def __init__(self) -> None:
        self._seen: dict[str, tuple[int, ...]] = {}

    def open(self, path: str) -> BinaryIO:
        try:
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError as problem:
            raise BadSource(f"{path} cannot be read: {problem.strerror}") from problem
        state = os.fstat(file)
        if not stat.S_ISREG(state.st_mode):
            os.close(file)
            raise UnsafePath(f"{path} is not a regular file")
        self._see(path, state)
        # The opener keeps the path as the file's name, which errors show.
        return open(path, "rb", buffering=_BUFFER, opener=lambda _path, _flags: file)

    def _see(self, path: str, state: os.stat_result) -> None:
        found = state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns, state.st_ctime_ns
        if self._seen.setdefault(path, found) != found:
            raise BadSource(
                f"{path} was changed while it was sealed: nothing of it was committed. Do it "
                "again when it no longer changes",
                code="vault.source_changed",
            )

    def check(self) -> None:
        for path in self._seen:
            try:
                self._see(path, os.lstat(path))
            except FileNotFoundError:
                raise BadSource(
                    f"{path} was removed while it was sealed", code="vault.source_changed"
                ) from None


def size_of(source: Path) -> int:
    return sum(path.stat().st_size for path, _ in files_below(source) if not path.is_dir())


def files_below(source: Path) -> Iterator[tuple[Path, str]]:
    """The files and empty folders below a path, each with its path in the object.

    An error names a symlink, a device or anything that cannot be read.
    """
    if not os.path.lexists(source):
        raise ConfigurationError(f"{source} does not exist")
    _refuse_special(source, folder=True)
    if not source.is_dir():
        yield source, ""
        return
    for folder, folders, names in os.walk(source, onerror=_refuse_unreadable):
        folders.sort()
        if not folders and not names and Path(folder) != source:
            yield Path(folder), Path(folder).relative_to(source).as_posix()
        for name in folders:
            _refuse_special(Path(folder, name), folder=True)
        for name in sorted(names):
            path = Path(folder, name)
            _refuse_special(path, folder=False)
            yield path, path.relative_to(source).as_posix()


def check_text(path: Path, inside: str) -> None:
    """Raises UnsafePath for a file name that is not UTF-8, which a JSON manifest cannot hold."""
    try:
        inside.encode()
    except UnicodeEncodeError:
        raise UnsafePath(f"{path} has a name that is not UTF-8: rename it") from None


def _refuse_unreadable(problem: OSError) -> NoReturn:
    raise ConfigurationError(
        f"{problem.filename} cannot be read: {problem.strerror}. Nothing was sealed"
    ) from problem


def _refuse_special(path: Path, *, folder: bool) -> None:
    mode = path.lstat().st_mode
    if stat.S_ISLNK(mode):
        raise UnsafePath(f"{path} is a symlink: seal what it leads to, or remove it")
    if not stat.S_ISREG(mode) and not (folder and stat.S_ISDIR(mode)):
        raise UnsafePath(f"{path} is neither a file nor a folder: remove it, or seal without it")
