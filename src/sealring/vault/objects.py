"""Objects of a vault: versions of a name, each of parts that a manifest lists.

    vault.json                                 the header
    objects/<object>/<version>/<copy>/key.json  the object's key, wrapped under the vault's
                                      manifest  sealed; written last: it makes the copy complete
                                      <part>    sealed files

An object's id comes from its name by a MAC, so that the names are known to key holders only. A
version has one complete copy; while `rotate` runs it may have two, and each of them opens.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import re
import secrets
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from sealring import _native
from sealring.errors import (
    ConfigurationError,
    ForeignPart,
    MissingPart,
    NotAVault,
    TruncatedFile,
    UnsafePath,
    VaultError,
    WrongKey,
)
from sealring.identity.private_files import sync_directory
from sealring.strict import strictly
from sealring.vault.files import NEW_FILE, remove_directory, sync_file, write_file, write_new
from sealring.vault.header import KeyRing, check_version
from sealring.vault.keys import KEY_BYTES
from sealring.vault.sealed import (
    ID_BYTES,
    LARGEST_MANIFEST,
    SUITES,
    Place,
    parse,
    read_small,
    wrapping_key,
)

FORMAT: Final = "sealring object"
VERSION: Final = 1
MANIFEST: Final = "manifest"
KEY_FILE: Final = "key.json"
_PART: Final = re.compile(r"[0-9a-z][0-9a-z.-]{0,63}")
_COMMITMENT: Final = slice(24, 56)


@dataclass(frozen=True, slots=True)
class Part:
    """A sealed file of an object."""

    name: str
    length: int
    """Bytes of plaintext."""
    commitment: str
    digest: str
    """Of the plaintext: see `digest_of`."""


@dataclass(frozen=True, slots=True)
class Manifest:
    format: str
    version: int
    kind: str
    """files or checkpoint: what `content` is."""
    name: str
    object_version: int
    parts: list[Part]
    content: str
    """JSON of the kind's own."""

    @property
    def digest(self) -> str:
        """By this a ledger knows a version: of all that stays the same after `rotate`."""
        parts = [[part.name, part.length, part.digest] for part in self.parts]
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
    """One copy of one version on disk, and the key that opens it."""

    folder: Path
    place: Place = field(repr=False)
    vault_key: int

    @property
    def complete(self) -> bool:
        return (self.folder / MANIFEST).exists()

    def create_part(self, name: str) -> int:
        """A new file's descriptor."""
        check_part(name)
        return os.open(self.folder / name, NEW_FILE, 0o600)

    def finish_part(self, file: int, name: str, writer: _native.SealedFileWriter) -> Part:
        """Seals the last chunk and waits until the disk has all of it."""
        writer.finish()
        os.fsync(file)
        return Part(name, writer.length, writer.commitment.hex(), digest_of(writer.digests))

    def write_part(self, name: str, content: bytes) -> Part:
        file = self.create_part(name)
        try:
            writer = self.place.writer(file, name)
            writer.write([content])
            return self.finish_part(file, name, writer)
        finally:
            os.close(file)

    def commit(
        self,
        kind: str,
        name: str,
        parts: list[Part],
        content: str,
    ) -> str:
        """Makes the copy complete: its key and parts are on disk, then the manifest. Its digest."""
        manifest = Manifest(FORMAT, VERSION, kind, name, self.place.version, parts, content)
        # All at once: a file system then writes them in one transaction.
        sync_file(self.folder / KEY_FILE)
        for folder in (self.folder, *self.folder.parents[:3]):
            sync_directory(folder)
        sealed = self.place.seal(MANIFEST, json.dumps(dataclasses.asdict(manifest)).encode())
        write_file(self.folder / MANIFEST, sealed)
        return manifest.digest

    def manifest(self) -> Manifest:
        """Opened, and so authentic."""
        path = self.folder / MANIFEST
        sealed = read_small(path, "the manifest", LARGEST_MANIFEST)
        try:
            document = parse(self.place.open(MANIFEST, sealed, f"the manifest {path}"))
        except ValueError as problem:
            raise NotAVault(f"the manifest {path} is not JSON: {problem}") from None
        check_version(document, VERSION, f"the manifest {path}")
        try:
            manifest: Manifest = strictly(Manifest, document, str(path), "manifest")
        except ConfigurationError as problem:
            raise NotAVault(str(problem)) from None
        for part in manifest.parts:
            check_part(part.name)
        try:
            check_name(manifest.name)
        except ConfigurationError:
            raise NotAVault(f"the manifest {path} has a name that cannot be printed") from None
        if manifest.object_version != self.place.version:
            raise ForeignPart(f"the manifest {path} is that of version {manifest.object_version}")
        return manifest

    @contextlib.contextmanager
    def opened(
        self, part: Part, whose: str, threads: int = 0
    ) -> Iterator[_native.SealedFileReader]:
        """A part as the manifest lists it, or an error that names it."""
        name = f"part {part.name} of {whose}"
        path = self.folder / part.name
        try:
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except FileNotFoundError:
            raise MissingPart(f"{name} is missing: restore {path} from a copy") from None
        except OSError as problem:
            raise UnsafePath(f"{name} cannot be read: {path}: {problem.strerror}") from None
        try:
            size, wanted = os.fstat(file).st_size, _native.sealed_length(part.length)
            if size != wanted:
                raise TruncatedFile(
                    f"{name} was cut or extended: {path} has {size} bytes and not {wanted}. "
                    "Restore it from a copy"
                )
            if os.pread(file, 56, 0)[_COMMITMENT].hex() != part.commitment:
                raise ForeignPart(
                    f"{name} is not the file that the manifest lists: {path} was exchanged for "
                    "another part, version or vault's. Restore it from a copy"
                )
            yield self.place.reader(file, part.name, name, threads)
        finally:
            os.close(file)


def digest_of(chunks: bytes | bytearray) -> str:
    """A part's digest: the SHA-256 of the list of its chunks' SHA-256, all of plaintext."""
    return hashlib.sha256(chunks).hexdigest()


def check_part(name: str) -> None:
    if _PART.fullmatch(name) is None or name in (MANIFEST, KEY_FILE):
        raise UnsafePath(f"{name[:100]!r} cannot be the name of a part")


def new_copy(version: Path, ring: KeyRing, vault: bytes, suite: str) -> Copy:
    """An empty copy under a key of its own."""
    object_bytes, number = bytes.fromhex(version.parent.name), int(version.name)
    key = _native.Secret.random(KEY_BYTES)
    folder = version / secrets.token_hex(4)
    folder.mkdir(mode=0o700)
    place = Place(vault, object_bytes, number, suite, key)
    write_new(folder / KEY_FILE, _wrapped(ring, place))  # `commit` syncs it
    return Copy(folder, place, ring.newest)


def write_key(folder: Path, ring: KeyRing, place: Place) -> None:
    """Replaces the file whole: the key under the vault's newest."""
    write_file(folder / KEY_FILE, _wrapped(ring, place))


def _wrapped(ring: KeyRing, place: Place) -> bytes:
    wrapping = wrapping_key(ring.key, place.vault, place.object, place.version, place.suite)
    wrapped = _native.wrap_key(wrapping, place.key).hex()
    document = WrappedKey(ring.newest, place.suite, wrapped)
    return json.dumps(dataclasses.asdict(document)).encode() + b"\n"


def open_copy(folder: Path, ring: KeyRing, vault: bytes) -> Copy:
    path = folder / KEY_FILE
    try:
        document = parse(read_small(path, "the object's key"))
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
        raise WrongKey(
            f"{path} does not open under key {known.key} of this vault for this object and version"
        )
    return Copy(folder, Place(vault, object_bytes, number, known.suite, key), known.key)


def not_written(folder: Path, problem: OSError) -> VaultError:
    return VaultError(f"{folder} cannot be written: {problem.strerror}")


def remove(folder: Path) -> None:
    """Removes a copy: the manifest first, so that no half of it looks complete."""
    remove_directory(folder.parents[3], folder, first=MANIFEST)
