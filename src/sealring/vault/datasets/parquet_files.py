"""Parquet that stays Parquet: encrypted by its own means, for tools that query it.

Each file has a random key of its own, which is sealed in the vault, and AES_GCM_V1 authenticates
every page and the footer. The AAD prefix says which file of which vault it is. It is not stored in
the file, so that a file in the place of another does not open.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from sealring import _native
from sealring.errors import (
    BadSource,
    ConfigurationError,
    MissingPart,
    NotAVault,
    TamperedChunk,
    Unsupported,
)
from sealring.formats.files import sync_directory
from sealring.formats.strict import read_json, strictly
from sealring.vault import objects
from sealring.vault.closing import Closable
from sealring.vault.datasets.parquet_source import check_content, pyarrow, readable
from sealring.vault.datasets.sources import SourceFile, Watched, source_files
from sealring.vault.datasets.stages import canonical
from sealring.vault.files import check_inside, check_output, make_folders, move_into_place
from sealring.vault.keys import KEY_BYTES
from sealring.vault.objects import Copy
from sealring.vault.outputs import new_output, unfinished
from sealring.vault.trees import check_text
from sealring.vault.vault import Vault
from sealring.vault.versions import Stored

KIND: Final = "parquet"
_PART: Final = "keys"
_PREFIX: Final = b"sealring parquet 1"
ALGORITHM: Final = "AES_GCM_V1"
"""AES_GCM_CTR_V1 would leave the pages without authentication."""


@dataclass(frozen=True, slots=True)
class Content:
    files: list[str]
    """Their paths in the folder, in the order of their keys."""


def seal_parquet(
    vault: Vault, source: Path, out: Path, name: str, progress: Callable[[int], None]
) -> int:
    """Writes the files encrypted to a new folder, and seals their keys as the next version."""
    files = source_files(source)
    for file in files:
        if file.path.suffix != ".parquet":
            raise BadSource(f"{file.path} is no .parquet file: move it away")
        check_text(file.path, file.inside)
    check_output(out)
    with vault.held(alone=False):
        vault.refresh()
        copy = vault.new_version(name)
        try:
            secrets = _native.Secret.random(KEY_BYTES * len(files))
            with unfinished(out) as folder:
                for number, file in enumerate(files):
                    key = secrets.part(KEY_BYTES * number, KEY_BYTES)
                    aad = prefix(copy, file.inside)
                    _encrypt(file, folder / file.inside, out / file.inside, key, aad, progress)
                for made, _, _ in os.walk(folder):
                    sync_directory(Path(made))
                content = Content([file.inside for file in files])
                # The keys first: files without keys would be lost.
                part = _seal_keys(copy, secrets)
                vault.commit(copy, KIND, name, [part], canonical(asdict(content)))
                move_into_place(folder, out)
        except BaseException:
            if not copy.complete:
                objects.remove(copy.folder)
            raise
    return copy.place.version


def prefix(copy: Copy, inside: str) -> bytes:
    """What a file is: vault, object, version and path."""
    return _PREFIX + copy.place.context(inside)


def _seal_keys(copy: Copy, secrets: _native.Secret) -> objects.Part:
    return copy.seal_part(_PART, [[memoryview(secrets)]])[0]


def _encrypt(
    source: SourceFile, target: Path, out: Path, key: _native.Secret, aad: bytes,
    progress: Callable[[int], None],
) -> None:  # fmt: skip
    encryption, parquet = pyarrow("pyarrow.parquet.encryption"), pyarrow("pyarrow.parquet")
    make_folders(target.parent)
    watched = Watched()
    check_content(watched, str(source.path))
    with watched.open(str(source.path)) as file, readable(file) as opened:
        properties = encryption.create_encryption_properties(
            bytes(key), aad_prefix=aad, store_aad_prefix=False, encryption_algorithm=ALGORITHM
        )
        with (
            new_output(target, out) as output,
            parquet.ParquetWriter(
                output, opened.schema_arrow, encryption_properties=properties
            ) as writer,
        ):
            for number in range(opened.metadata.num_row_groups):
                writer.write_table(opened.read_row_group(number))
                progress(opened.metadata.row_group(number).total_byte_size)
    watched.check()


class ParquetFiles(Closable):
    """Encrypted Parquet files and their keys, for pyarrow and what reads through it."""

    def __init__(
        self, vault: Vault, name: str, folder: Path, *, version: int | None = None
    ) -> None:
        with vault.reading():
            stored = vault.find(name, version)
            self._content = _content(stored)
            self._secrets = _native.Secret.zeros(KEY_BYTES * len(self._content.files))
            (part,) = stored.manifest.parts
            with stored.copy.opened(part, stored.whose) as reader:
                reader.read_into(0, memoryview(self._secrets))
        self._copy, self._folder, self._name = stored.copy, folder, name

    def _release(self) -> None:
        self._secrets.wipe()
        self._copy.place.key.wipe()

    def _what(self) -> str:
        return f"the Parquet files {self._name!r}"

    @property
    def files(self) -> list[str]:
        return list(self._content.files)

    def decryption_properties(self, file: str) -> Any:
        """For `decryption_properties=` of pyarrow. pyarrow keeps the key in ordinary memory."""
        self.require_open()
        if file not in self._content.files:
            raise ConfigurationError(f"{file!r} is none of the {len(self.files)} files")
        number = self._content.files.index(file)
        key = self._secrets.part(KEY_BYTES * number, KEY_BYTES)
        return pyarrow("pyarrow.parquet.encryption").create_decryption_properties(
            bytes(key), aad_prefix=prefix(self._copy, file), check_footer_integrity=True,
            allow_plaintext_files=False,
        )  # fmt: skip

    @contextmanager
    def open(self, file: str) -> Iterator[Any]:
        """A pyarrow.parquet.ParquetFile. What is not authentic is TamperedChunk."""
        path = self._folder / check_inside(file)
        properties = self.decryption_properties(file)
        arrow = pyarrow("pyarrow")
        try:
            with pyarrow("pyarrow.parquet").ParquetFile(
                path, decryption_properties=properties
            ) as opened:
                yield opened
        except FileNotFoundError:
            raise MissingPart(f"{path} is missing: restore it from a copy") from None
        except (OSError, arrow.ArrowException) as problem:
            raise TamperedChunk(
                f"{path} is not authentic: it was changed, cut, or exchanged for another file. "
                f"Restore it from a copy ({problem})"
            ) from None


def _content(stored: Stored) -> Content:
    if stored.manifest.kind != KIND:
        raise Unsupported(f"{stored.whose} is a {stored.manifest.kind}, and no Parquet files")
    try:
        document = read_json(stored.manifest.content.encode())
        content: Content = strictly(Content, document, stored.whose, "manifest")
        if [part.length for part in stored.manifest.parts] != [KEY_BYTES * len(content.files)]:
            raise ValueError("it has another number of keys than files")
    except (ValueError, ConfigurationError) as problem:
        raise NotAVault(f"the manifest of {stored.whose} cannot be read: {problem}") from None
    return content
