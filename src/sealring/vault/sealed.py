"""Sealed files: C2SP's chunked encryption, by the native core.

The context is part of a file's key. It says what the file is, so that no other file opens in its
place: another part of the same object, another version, another object, another vault.
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
"""For files that a GPU opens: GPUs have no instructions for AES."""
SUITES: Final = (AES, CHACHA)
ID_BYTES: Final = 16
_PREFIX: Final = b"sealring vault 1"
LARGEST_DOCUMENT: Final = 16 << 20
LARGEST_MANIFEST: Final = 512 << 20
LARGEST_LEDGER: Final = 512 << 20
"""Of more than three million objects."""


Progress = Callable[[int], None]
"""Called with the number of bytes that were done since the last call."""
Source = int | Callable[[int, int], bytes]
"""A file descriptor, or a function that gives a range of bytes by its start and length."""


@dataclass(frozen=True, slots=True)
class SealedPlace:
    """What one part's file is sealed as. Its key travels apart from it."""

    part: str
    suite: str
    context: str
    """In hexadecimal."""

    def writer(
        self, file: int, key: _native.Secret, threads: int = 0, hash: Hash | None = None
    ) -> _native.SealedFileWriter:
        """`hash`: what its `digests` are, which it has none without."""
        context = bytes.fromhex(self.context)
        name = f"part {self.part}"
        chunk_hash = None if hash is None else computed(hash)
        return _native.SealedFileWriter(file, key, self.suite, context, name, threads, chunk_hash)

    def reader(
        self, source: Source, key: _native.Secret, name: str, threads: int = 0, size: int = 0
    ) -> _native.SealedFileReader:
        """`size`: of all that a function gives."""
        context = bytes.fromhex(self.context)
        return _native.SealedFileReader(source, key, self.suite, context, name, threads, size)


@dataclass(frozen=True, slots=True)
class Place:
    """What a sealed file is, and what it is sealed with."""

    vault: bytes
    object: bytes
    version: int
    suite: str
    key: _native.Secret

    def context(self, part: str) -> bytes:
        """Fields of fixed length and then the part's name, so that no two places look alike."""
        return _context(self.vault, self.object, self.version) + part.encode()

    def part_key(self, part: str) -> _native.Secret:
        """The input key of one part's file. From it neither the object's nor another's follows."""
        return self.key.derive(_PREFIX, b"key of the part " + part.encode(), 32)

    def of(self, part: str) -> SealedPlace:
        return SealedPlace(part, self.suite, self.context(part).hex())

    def writer(
        self, file: int, part: str, threads: int = 0, hash: Hash | None = None
    ) -> _native.SealedFileWriter:
        """Seals to a file descriptor; to memory where that is -1."""
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
        """The plaintext, whole."""
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
    """What wraps the key of this version of this object: the wrapped key opens nowhere else."""
    info = b"wraps an object's key" + _context(vault, object_id, version) + suite.encode()
    return vault_key.derive(_PREFIX, info, 32)


def _context(vault: bytes, object_id: bytes, version: int) -> bytes:
    assert len(vault) == len(object_id) == ID_BYTES
    return _PREFIX + struct.pack(f">{ID_BYTES}s{ID_BYTES}sQ", vault, object_id, version)


def shown(text: str, longest: int) -> str:
    """Text that others wrote, for a message: it is cut, and holds no codes of terminals."""
    return "".join(one if one.isprintable() else "?" for one in text[:longest])


def raise_own_lack(problem: OSError) -> None:
    """Raises what this process lacks as it is: nothing was learned of the vault.

    As an error of the vault, it would leave out what is there in favour of something older.
    """
    if problem.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
        raise problem


_OF_WHAT_LIES_THERE: Final = frozenset(
    {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.EACCES, errno.EPERM, errno.ENXIO}
)
"""Errors that an attacker who writes to the vault causes: by links, pipes, directories, modes."""


def disk_failed(problem: VaultError) -> bool:
    """Whether the disk or its network failed (EIO, ESTALE): nothing was learned of the vault.

    Still an error of the vault, so that one bad sector does not keep `revoke` from all the rest.
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
    """A document as a dataclass. It may be the work of an attacker, or of a later sealring."""
    try:
        document = read_json(content)
        if version is not None:
            check_version(document, version, where)
        return strictly(wanted, document, "it", "document")
    except (ValueError, ConfigurationError) as problem:
        raise NotAVault(f"{where} cannot be read: {problem}") from None


def check_small(content: bytes, what: str, advice: str, largest: int) -> None:
    """Refuses to write what `read_small` would not read again."""
    if len(content) > largest:
        raise Unsupported(
            f"{what} would have {len(content)} bytes, and no more than {largest} are read again: "
            f"{advice}"
        )


def read_small(path: Path, what: str, largest: int = LARGEST_DOCUMENT) -> bytes:
    """A file of the vault that is read whole. It may be the work of an attacker: not endless."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        with open(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):  # to read a pipe may give nothing, or not end
                raise NotAVault(f"{what} {path} is not a regular file")
            # By its size first: what an attacker made large is not read at all.
            too_large = status.st_size > largest
            content = b"" if too_large else file.read(largest + 1)
    except OSError as problem:
        raise_own_lack(problem)
        raise NotAVault(f"{what} {path} cannot be read: {problem.strerror}") from problem
    if too_large or len(content) > largest:
        raise NotAVault(f"{what} {path} is larger than {largest} bytes")
    return content
