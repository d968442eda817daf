"""A vault's objects. An object has versions; a version consists of parts that its manifest lists.

    vault.json                                 the header
    objects/<object>/<version>/<copy>/key.json  the copy's key, wrapped under the vault's key
                                      manifest  sealed; written last: it makes the copy complete
                                      <part>    sealed files

An object's id is a MAC of its name, so that only key holders know the names. A version has one
complete copy. While `rotate` runs it may have two, and either of them opens.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import re
import secrets
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Final

from typing_extensions import Buffer

from sealring import _native
from sealring.errors import (
    ConfigurationError,
    ForeignPart,
    NotAVault,
    TamperedChunk,
    TruncatedFile,
    UnsafePath,
    VaultError,
    WrongKey,
)
from sealring.formats.strict import read_json, strictly
from sealring.vault.digests import Hash
from sealring.vault.header import KeyRing
from sealring.vault.keys import KEY_BYTES
from sealring.vault.sealed import (
    ID_BYTES,
    LARGEST_DOCUMENT,
    LARGEST_MANIFEST,
    SUITES,
    Place,
    SealedPlace,
    check_small,
    read_as,
    wrapping_key,
)
from sealring.vault.storage import OpenFile, VaultPath

FORMAT: Final = "sealring object"
VERSION: Final = 2
MANIFEST: Final = "manifest"
KEY_FILE: Final = "key.json"
_PART: Final = re.compile(r"[0-9a-z][0-9a-z.-]{0,63}")
_COMMITMENT: Final = slice(24, 56)
_LONGEST_KIND: Final = 100
OBJECT_NAME: Final = re.compile(r"[0-9a-f]{32}")
VERSION_NAME: Final = re.compile(r"[0-9]{10}")
COPY_NAME: Final = re.compile(r"[0-9a-f]{8}")
_ONE_BY_ONE: Final = 4


@dataclass(frozen=True, slots=True)
class Part:
    """A sealed file of an object."""

    name: str
    length: int
    """Bytes of plaintext."""
    commitment: str
    hash: Hash
    """The hash function of its chunks' digests."""
    digest: str
    """The digest of the plaintext: see `digest_of`."""


@dataclass(frozen=True, slots=True)
class Manifest:
    format: str
    version: int
    kind: str
    """What the object is and what `content` describes, such as files or checkpoint."""
    name: str
    object_version: int
    parts: list[Part]
    content: str
    """A JSON text whose form depends on `kind`."""

    @property
    def digest(self) -> str:
        """The digest by which a ledger knows a version. `rotate` does not change it."""
        parts = [[part.name, part.length, part.hash, part.digest] for part in self.parts]
        same = [self.kind, self.name, self.object_version, parts, self.content]
        return hashlib.sha256(json.dumps(same, separators=(",", ":")).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class WrappedKey:
    key: int
    """The number of the vault's key."""
    suite: str
    wrapped: str


def object_id(ring: KeyRing, name: str) -> bytes:
    return ring.names.hmac_sha256(name.encode())[:ID_BYTES]


def check_name(name: str) -> str:
    if not name or len(name) > 1000 or not name.isprintable():
        raise ConfigurationError("an object's name has 1 to 1000 printable characters")
    return name


@dataclass(frozen=True, slots=True)
class Copy:
    """One copy of one version, and the key that opens it."""

    folder: VaultPath
    place: Place = field(repr=False)
    vault_key: int

    @property
    def complete(self) -> bool:
        return (self.folder / MANIFEST).has_file()

    def new_part(self, name: str) -> AbstractContextManager[int]:
        """The descriptor of a new file. If the context ends without an error, the part lasts."""
        check_part(name)
        return (self.folder / name).new_file()

    def write_part(self, name: str, content: bytes) -> Part:
        return self.seal_part(name, [[content]], "sha256")[0]

    def seal_part(
        self, name: str, pieces: Iterable[Sequence[Buffer]], hash: Hash
    ) -> tuple[Part, bytes]:
        """Seals the pieces one after the other. Returns the part and its chunks' digests."""
        with self.new_part(name) as file:
            writer = self.place.writer(file, name, hash=hash)
            for one in pieces:
                writer.write(one)
            writer.finish()
        digests = writer.digests
        commitment = writer.commitment.hex()
        return Part(name, writer.length, commitment, hash, digest_of(digests)), digests

    def commit(
        self,
        kind: str,
        name: str,
        parts: list[Part],
        content: str,
    ) -> str:
        """Makes the copy complete: first settles its key and parts, then writes the manifest.

        Returns the manifest's digest.
        """
        manifest = Manifest(FORMAT, VERSION, kind, name, self.place.version, parts, content)
        sealed = self.place.seal(MANIFEST, json.dumps(dataclasses.asdict(manifest)).encode())
        advice = "divide it into several objects"
        check_small(sealed, f"the manifest of {self.folder}", advice, LARGEST_MANIFEST)
        self.folder.settle(KEY_FILE)
        (self.folder / MANIFEST).write(sealed)
        return manifest.digest

    def manifest(self) -> Manifest:
        """Opens and checks the manifest. Raises VaultError if it is not authentic."""
        path = self.folder / MANIFEST
        sealed = path.read_small("the manifest", LARGEST_MANIFEST)
        try:
            content = self.place.open(MANIFEST, sealed, f"the manifest {path}")
        except WrongKey:
            raise ForeignPart(
                f"the manifest {path} was changed in its first 56 bytes, or lies in the place of "
                "another: it is not that of this object, version and copy. Restore it from a copy"
            ) from None
        manifest: Manifest = read_as(Manifest, content, f"the manifest {path}", VERSION)
        for part in manifest.parts:
            check_part(part.name)
        try:
            check_name(manifest.name)
        except ConfigurationError:
            raise NotAVault(f"the manifest {path} has a name that cannot be printed") from None
        if not manifest.kind.isprintable() or len(manifest.kind) > _LONGEST_KIND:
            raise NotAVault(f"the manifest {path} has a kind that cannot be printed")
        if manifest.object_version != self.place.version:
            raise ForeignPart(f"the manifest {path} is that of version {manifest.object_version}")
        return manifest

    @contextlib.contextmanager
    def opened(
        self, part: Part, whose: str, threads: int = 0
    ) -> Iterator[_native.SealedFileReader]:
        """Opens a part that the manifest lists until the context ends; an error names the part."""
        place, key = self.place.of(part.name), self.place.part_key(part.name)
        name = f"part {part.name} of {whose}"
        try:
            opened = open_part(
                self.folder / part.name, place, key, name, part.length, part.commitment, threads
            )
        except TamperedChunk:
            self.manifest()  # raises if this is not the object's key
            raise
        try:
            yield opened.reader
        finally:
            opened.close()


@dataclass(frozen=True, slots=True)
class OpenPart:
    """A part's open file, and the reader that opens its chunks."""

    file: OpenFile
    reader: _native.SealedFileReader

    def close(self) -> None:
        self.reader.close()  # first: it waits for reads, which must not use a reused descriptor
        self.file.close()


def open_part(
    path: VaultPath, place: SealedPlace, key: _native.Secret, name: str, length: int,
    commitment: str, threads: int,
) -> OpenPart:  # fmt: skip
    """Opens a sealed file and checks that it is the one that a manifest lists.

    A sealed file begins with a salt of 24 bytes and a commitment to the key derived from it.
    """
    file = path.open_file(name)
    try:
        wanted = _native.sealed_length(length)
        if file.size != wanted:
            raise TruncatedFile(
                f"{name} was cut or extended: {path} has {file.size} bytes and not {wanted}. "
                "Restore it from a copy"
            )
        if file.read(0, _COMMITMENT.stop)[_COMMITMENT].hex() != commitment:
            raise ForeignPart(
                f"{name} is not the file that the manifest lists: {path} was changed in its first "
                "56 bytes, or exchanged for another part, version or vault's. Restore it from a "
                "copy"
            )
        try:
            return OpenPart(file, place.reader(file.source, key, name, threads, file.size))
        except WrongKey:
            raise TamperedChunk(
                f"{name} was changed in its first 24 bytes: the manifest lists this file, and the "
                "key is right. Restore it from a copy"
            ) from None
    except BaseException:
        file.close()
        raise


def digest_of(chunks: bytes | bytearray) -> str:
    """A part's digest: the SHA-256 of the list of its chunks' digests, which are of plaintext."""
    return hashlib.sha256(chunks).hexdigest()


def check_part(name: str) -> None:
    if _PART.fullmatch(name) is None or name in (MANIFEST, KEY_FILE):
        raise UnsafePath(f"{name[:100]!r} cannot be the name of a part")


def new_copy(version: VaultPath, ring: KeyRing, vault: bytes, suite: str) -> Copy:
    """Makes an empty copy of a version, with a new key of its own."""
    object_bytes, number = bytes.fromhex(version.parent.name), int(version.name)
    key = _native.Secret.random(KEY_BYTES)
    folder = version / secrets.token_hex(4)
    folder.make_folder()
    place = Place(vault, object_bytes, number, suite, key)
    try:
        (folder / KEY_FILE).write_new(_wrapped(ring, place))  # `commit` syncs this file
    except BaseException:
        remove(folder)
        raise
    return Copy(folder, place, ring.newest)


def write_key(folder: VaultPath, ring: KeyRing, place: Place) -> None:
    """Replaces a copy's key file: wraps its key under the vault's newest key."""
    (folder / KEY_FILE).write(_wrapped(ring, place))


def _wrapped(ring: KeyRing, place: Place) -> bytes:
    wrapping = wrapping_key(ring.key, place.vault, place.object, place.version, place.suite)
    wrapped = _native.wrap_key(wrapping, place.key).hex()
    document = WrappedKey(ring.newest, place.suite, wrapped)
    return json.dumps(dataclasses.asdict(document)).encode() + b"\n"


def open_copy(folder: VaultPath, ring: KeyRing, vault: bytes) -> Copy:
    path = folder / KEY_FILE
    try:
        document = read_json(path.read_small("the object's key", LARGEST_DOCUMENT))
        known: WrappedKey = strictly(WrappedKey, document, str(path), "wrapped key")
        wrapped = bytes.fromhex(known.wrapped)
    except (ValueError, ConfigurationError):
        raise NotAVault(f"{path} is not an object's key: restore it from a copy") from None
    if known.suite not in SUITES:
        raise NotAVault(f"{path} names the suite {known.suite[:50]!r}, which this sealring has not")
    if known.key not in ring.keys:
        raise WrongKey(
            f"{path} is wrapped under key {known.key} of the vault, which its header no longer has"
        )
    version = folder.parent
    object_bytes, number = bytes.fromhex(version.parent.name), int(version.name)
    wrapping = wrapping_key(ring.keys[known.key], vault, object_bytes, number, known.suite)
    key = _native.unwrap_key(wrapping, wrapped)
    if key is None or len(key) != KEY_BYTES:
        raise ForeignPart(
            f"{path} was changed, or exchanged for another's: it is no key that this vault wrapped "
            "for this object and version. Restore it from a copy"
        )
    return Copy(folder, Place(vault, object_bytes, number, known.suite, key), known.key)


def remove(folder: VaultPath) -> None:
    """Removes a copy: the manifest first, so that no half of it looks complete."""
    folder.remove(4, first=MANIFEST)


def is_complete(copy: VaultPath) -> bool:
    return (copy / MANIFEST).has_file()


def complete_copies(version: VaultPath) -> list[VaultPath]:
    return [one for one in version.entries(COPY_NAME) if is_complete(one)]


def complete(versions: Iterable[VaultPath]) -> Iterator[VaultPath]:
    """Yields those versions of one object that may be complete, in the order given.

    It makes no requests for versions after the one at which the caller stops. It asks a store about
    the first versions one by one, in a request or two each. One listing gives the files of all
    others, so that more versions need no more requests, except for the listing's pages.
    """
    at_once: set[str] | None = None
    for count, version in enumerate(versions):
        if count == _ONE_BY_ONE:
            at_once = _with_manifest(version.parent)
        if may_be_complete(version) if at_once is None else version.name in at_once:
            yield version


def _with_manifest(folder: VaultPath) -> set[str] | None:
    """The names of versions that have a complete copy; None if the caller must look at each."""
    files = folder.below()
    if files is None:
        return None
    ways = (one.split("/") for one in files)
    return {
        way[0]
        for way in ways
        if len(way) == 3 and COPY_NAME.fullmatch(way[1]) and way[2] == MANIFEST
    }


def may_be_complete(version: VaultPath) -> bool:
    """Whether the version has a complete copy, or cannot be read."""
    try:
        return bool(complete_copies(version))
    except VaultError:
        return True  # opening it will raise the error


def collected(
    folder: VaultPath, form: re.Pattern[str], problems: list[VaultError]
) -> list[VaultPath]:
    """The folder's entries. Adds to `problems` the folder's error and one for each symlink."""
    try:
        found = folder.entries(form)
        problems += folder.links(form)
    except VaultError as problem:
        problems.append(problem)
        return []
    return found
