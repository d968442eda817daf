"""Sealed files: C2SP's chunked encryption, done by the native core.

A file's key is derived from its context, which says what the file is. So no other file opens in its
place: no other part of the object, no other version, no other object and no other vault's file.
"""

from __future__ import annotations

import errno
import os
import stat
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from typing_extensions import Buffer

from sealring import _native
from sealring.errors import ConfigurationError, NotAVault, TruncatedFile, Unsupported, VaultError
from sealring.formats.strict import read_json, strictly
from sealring.vault.digests import Hash, computed

AES: Final = "AEAD_AES_256_GCM"
CHACHA: Final = "AEAD_CHACHA20_POLY1305"
"""The suite for files that a GPU opens: GPUs have no instructions for AES."""
SUITES: Final = (AES, CHACHA)
ID_BYTES: Final = 16
_PREFIX: Final = b"sealring vault 1"
LARGEST_DOCUMENT: Final = 16 << 20
LARGEST_MANIFEST: Final = 512 << 20
LARGEST_LEDGER: Final = 512 << 20
"""Enough for more than three million objects."""


Progress = Callable[[int], None]
"""Called with the number of bytes processed since the last call."""
Source = int | Callable[[int, int], bytes]
"""A file descriptor, or a function that gives a range of bytes by its start and length."""


@dataclass(frozen=True, slots=True)
class SealedPlace:
    """What is needed to seal or open one part's file, except its key, which travels apart."""

    part: str
    suite: str
    context: str
    """In hexadecimal."""

    def writer(
        self, file: int, key: _native.Secret, threads: int = 0, hash: Hash | None = None
    ) -> _native.SealedFileWriter:
        """`hash`: the hash function of the writer's `digests`; without it there are none."""
        context = bytes.fromhex(self.context)
        name = f"part {self.part}"
        chunk_hash = None if hash is None else computed(hash)
        return _native.SealedFileWriter(file, key, self.suite, context, name, threads, chunk_hash)

    def reader(
        self, source: Source, key: _native.Secret, name: str, threads: int = 0, size: int = 0
    ) -> _native.SealedFileReader:
        """`size`: the file's length, if the source is a function."""
        context = bytes.fromhex(self.context)
        return _native.SealedFileReader(source, key, self.suite, context, name, threads, size)


@dataclass(frozen=True, slots=True)
class Place:
    """The place of one object version's files in a vault, with the suite and key that seal them."""

    vault: bytes
    object: bytes
    version: int
    suite: str
    key: _native.Secret

    def context(self, part: str) -> bytes:
        """The context of a part: fields of fixed length, then the part's name, so it is unique."""
        return _context(self.vault, self.object, self.version) + part.encode()

    def part_key(self, part: str) -> _native.Secret:
        """The input key of one part's file. It reveals neither the object's key nor another's."""
        return self.key.derive(_PREFIX, b"key of the part " + part.encode(), 32)

    def of(self, part: str) -> SealedPlace:
        return SealedPlace(part, self.suite, self.context(part).hex())

    def writer(
        self, file: int, part: str, threads: int = 0, hash: Hash | None = None
    ) -> _native.SealedFileWriter:
        """A writer that seals to a file descriptor, or to memory if `file` is -1."""
        return self.of(part).writer(file, self.part_key(part), threads, hash)

    def reader(
        self, source: Source, part: str, name: str, threads: int = 0, size: int = 0
    ) -> _native.SealedFileReader:
        return self.of(part).reader(source, self.part_key(part), name, threads, size)

    def seal(self, part: str, plain: Buffer) -> bytes:
        writer = self.writer(-1, part, 1)
        writer.write([plain])
        writer.finish()
        return writer.take()

    def open(self, part: str, sealed: bytes, name: str) -> bytes:
        """Returns the whole plaintext. Raises VaultError if it is not authentic."""
        if not sealed:
            raise TruncatedFile(f"{name} is empty: restore it from a copy")

        def read(offset: int, size: int) -> bytes:
            return sealed[offset : offset + size]

        reader = self.reader(read, part, name, 1, len(sealed))
        plain = bytearray(reader.length)
        reader.read_into(0, plain)
        return bytes(plain)


def wrapping_key(
    vault_key: _native.Secret, vault: bytes, object_id: bytes, version: int, suite: str
) -> _native.Secret:
    """The key that wraps an object version's key. The wrapped key opens in no other place."""
    info = b"wraps an object's key" + _context(vault, object_id, version) + suite.encode()
    return vault_key.derive(_PREFIX, info, 32)


def _context(vault: bytes, object_id: bytes, version: int) -> bytes:
    assert len(vault) == len(object_id) == ID_BYTES
    return _PREFIX + struct.pack(f">{ID_BYTES}s{ID_BYTES}sQ", vault, object_id, version)


def shown(text: str, longest: int) -> str:
    """Foreign text for use in a message: cut, and without control codes for terminals."""
    return "".join(one if one.isprintable() else "?" for one in text[:longest])


def raise_own_lack(problem: OSError) -> None:
    """Raises an error unchanged if this process lacks memory or descriptors.

    Such an error says nothing about the vault. As a VaultError it would make the caller skip a
    version that is there, and take an older one.
    """
    if problem.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
        raise problem


_OF_WHAT_LIES_THERE: Final = frozenset(
    {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.EACCES, errno.EPERM, errno.ENXIO}
)
"""Errors that an attacker who can write to the vault can cause, with links, pipes, directories or
modes."""


def disk_failed(problem: VaultError) -> bool:
    """Whether the disk or its network failed (EIO, ESTALE), which says nothing about the vault.

    It still is a VaultError, so that one bad sector does not stop `revoke` for all other objects.
    """
    cause = problem.__cause__
    return isinstance(cause, OSError) and cause.errno not in _OF_WHAT_LIES_THERE


def check_version(document: Any, known: int, where: str) -> None:
    version = document.get("version") if isinstance(document, dict) else None
    if not isinstance(version, int) or version == known:
        return
    other = f"{where} has version {version} of its format, and this sealring reads version {known}"
    if version > known:
        raise NotAVault(f"{other}: install a later one", code="vault.later_version")
    raise NotAVault(
        f"{other}: export what it holds with the release that wrote it, and seal that again",
        code="vault.earlier_version",
    )


def read_as(wanted: Any, content: bytes | str, where: str, version: int | None = None) -> Any:
    """Reads a JSON document into a dataclass; NotAVault if it does not fit.

    An attacker or a later sealring may have written it.
    """
    try:
        document = read_json(content)
        if version is not None:
            check_version(document, version, where)
        return strictly(wanted, document, "it", "document")
    except (ValueError, ConfigurationError) as problem:
        raise NotAVault(f"{where} cannot be read: {problem}") from None


def check_small(content: bytes, what: str, advice: str, largest: int) -> None:
    """Raises Unsupported if `read_small` would refuse to read this content again."""
    if len(content) > largest:
        raise Unsupported(
            f"{what} would have {len(content)} bytes, and no more than {largest} are read again: "
            f"{advice}"
        )


def read_small(path: Path, what: str, largest: int = LARGEST_DOCUMENT) -> bytes:
    """Reads a whole file of the vault, up to `largest` bytes: an attacker may have made it huge."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        with open(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):  # reading a pipe may give nothing or never end
                raise NotAVault(f"{what} {path} is not a regular file")
            # Checks the size first, so that a file that an attacker made large is not read.
            too_large = status.st_size > largest
            content = b"" if too_large else file.read(largest + 1)
    except OSError as problem:
        raise_own_lack(problem)
        raise NotAVault(f"{what} {path} cannot be read: {problem.strerror}") from problem
    if too_large or len(content) > largest:
        raise NotAVault(f"{what} {path} is larger than {largest} bytes")
    return content
