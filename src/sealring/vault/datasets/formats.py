"""The forms that data come in, each as units of work and as samples of a unit.

A unit is planned from names and sizes. An attacker may have written the files: what a file says
about itself is checked before memory is taken for it.
"""

from __future__ import annotations

import hashlib
import json
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import PurePosixPath
from typing import Any, BinaryIO, Final, Protocol

import numpy as np

from sealring.errors import BadSource, ConfigurationError, UnsafePath
from sealring.formats.strict import read_json
from sealring.vault.datasets.fields import Field, JsonText
from sealring.vault.datasets.parquet_source import Parquet
from sealring.vault.datasets.sources import (
    Limits,
    SourceFile,
    Unit,
    cut,
    parsing,
    range_digest,
)
from sealring.vault.files import check_inside
from sealring.vault.trees import Watched

Order = dict[str, Any]


class Format(Protocol):
    @property
    def suffixes(self) -> tuple[str, ...]: ...

    def fields(self, files: Sequence[SourceFile], dtype: str | None) -> list[Field]: ...

    def units(
        self, files: Sequence[SourceFile], limits: Limits, dtype: str | None
    ) -> Iterator[Unit]: ...

    def digest(self, order: Order, watched: Watched, limits: Limits) -> str:
        """Of the bytes that the unit is made from."""

    def samples(self, order: Order, watched: Watched, limits: Limits) -> Iterator[Any]:
        """As the fields' encoder takes them."""


class JsonLines:
    """A sample is a line. A line belongs to the unit in which it begins."""

    suffixes = (".jsonl", ".ndjson")

    def fields(self, files: Sequence[SourceFile], dtype: str | None) -> list[Field]:
        return [Field("json", "json")]

    def units(
        self, files: Sequence[SourceFile], limits: Limits, dtype: str | None
    ) -> Iterator[Unit]:
        for file in files:
            for start, stop in cut(file.size, limits.shard):
                yield Unit({"path": str(file.path), "start": start, "stop": stop}, stop - start)

    def digest(self, order: Order, watched: Watched, limits: Limits) -> str:
        with watched.open(order["path"]) as file:
            return range_digest(file, iter([_whole_lines(file, order, limits)]))

    def samples(self, order: Order, watched: Watched, limits: Limits) -> Iterator[Any]:
        with watched.open(order["path"]) as file:
            at, stop = _whole_lines(file, order, limits)
            file.seek(at)
            while at < stop:
                line = file.readline(limits.sample + 1)
                if len(line) > limits.sample:
                    raise _too_long(file, at, limits)
                if text := line.strip():
                    try:
                        value = read_json(text, limits.sample, "any")
                    except ValueError as problem:
                        raise BadSource(
                            f"{file.name}: the line at byte {at} is not JSON: {problem}"
                        ) from None
                    if not isinstance(value, dict):
                        raise BadSource(f"{file.name}: the line at byte {at} is no JSON object")
                    yield JsonText(text)
                at += len(line)


def _whole_lines(file: BinaryIO, order: Order, limits: Limits) -> tuple[int, int]:
    """From the first line that begins in the range, to the end of the last one that does."""
    return (
        _line_start(file, order["start"], limits),
        _line_start(file, order["stop"], limits),
    )


def _line_start(file: BinaryIO, at: int, limits: Limits) -> int:
    """The first byte of a line, from `at` on."""
    if at == 0:
        return 0
    file.seek(at - 1)
    line = file.readline(limits.sample + 1)
    if len(line) > limits.sample:
        raise _too_long(file, at - 1, limits)
    return at - 1 + len(line)


def _too_long(file: BinaryIO, at: int, limits: Limits) -> BadSource:
    return BadSource(
        f"{file.name}: the line at byte {at} is longer than {limits.sample} bytes: if it is meant, "
        "set a larger --largest-sample"
    )


class Tars:
    """WebDataset: files of one name up to the first dot, one behind the other, are a sample."""

    suffixes = (".tar",)

    def fields(self, files: Sequence[SourceFile], dtype: str | None) -> list[Field]:
        return [Field("key", "text"), Field("files", "files")]

    def units(
        self, files: Sequence[SourceFile], limits: Limits, dtype: str | None
    ) -> Iterator[Unit]:
        for file in files:
            yield Unit({"path": str(file.path), "stop": file.size}, file.size)

    def digest(self, order: Order, watched: Watched, limits: Limits) -> str:
        with watched.open(order["path"]) as file:
            return range_digest(file, iter([(0, order["stop"])]))

    def samples(self, order: Order, watched: Watched, limits: Limits) -> Iterator[Any]:
        seen: set[bytes] = set()
        key, files = "", dict[str, bytes]()
        with watched.open(order["path"]) as file:
            for name, content in _members(file, limits):
                pure = PurePosixPath(name)
                stem, _, ending = pure.name.partition(".")
                found = str(pure.with_name(stem)) if stem else name
                if found != key:
                    if files:
                        yield {"key": key, "files": files}
                    key, files = found, {}
                    digest = hashlib.sha256(key.encode(errors="surrogateescape")).digest()
                    if digest in seen:
                        raise BadSource(f"{file.name}: it has the sample {key!r} twice")
                    seen.add(digest)
                if ending in files:
                    raise BadSource(f"{file.name}: it has the file {name!r} twice")
                files[ending] = content
                if sum(map(len, files.values())) > limits.sample:
                    raise BadSource(
                        f"{file.name}: the sample {key!r} is larger than {limits.sample} bytes: if "
                        "it is meant, set a larger --largest-sample"
                    )
            if files:
                yield {"key": key, "files": files}


class _Bounded:
    """A file from which no more is read at once than a sample may have."""

    def __init__(self, file: BinaryIO, largest: int) -> None:
        self._file, self._largest = file, largest
        self.name = file.name
        self.seek, self.tell, self.seekable = file.seek, file.tell, file.seekable

    def read(self, size: int = -1) -> bytes:
        if not 0 <= size <= self._largest:
            raise BadSource(
                f"{self.name}: at byte {self.tell()} it names {size} bytes, and the limit is "
                f"{self._largest}: if it is meant, set a larger --largest-sample"
            )
        return self._file.read(size)


def _members(file: BinaryIO, limits: Limits) -> Iterator[tuple[str, bytes]]:
    bounded: Any = _Bounded(file, max(limits.sample, 1 << 20))
    with (
        parsing(file.name, "a tar archive"),
        tarfile.open(fileobj=bounded, mode="r:") as archive,
    ):
        for member in archive:
            archive.members = []  # type: ignore[attr-defined]  # it keeps all that it has read
            where = f"{file.name}: {member.name[:200]!r}"
            if member.isdir():
                continue
            if not member.isreg() or member.issparse():
                raise UnsafePath(
                    f"{where} is a link, a device or a sparse file: only regular files are ingested"
                )
            try:
                inside = check_inside(member.name.removeprefix("./"))
            except UnsafePath:
                raise UnsafePath(f"{where} leads out of the archive") from None
            if member.size > limits.sample:
                raise BadSource(
                    f"{where} has {member.size} bytes, and the limit is {limits.sample}: if it "
                    "is meant, set a larger --largest-sample"
                )
            content = archive.extractfile(member)
            assert content is not None, "isreg"
            data = content.read(member.size)
            if len(data) != member.size:
                raise BadSource(f"{where} is cut off")
            yield str(inside), data
        _check_end(bounded, archive.offset)


def _check_end(file: Any, at: int) -> None:
    """Nothing is behind the last file: tarfile takes a damaged header for the archive's end."""
    file.seek(at)
    while block := file.read(1 << 20):
        if block.count(0) != len(block):
            raise BadSource(
                f"{file.name}: what follows byte {at} is neither a file nor the archive's end: it "
                "is damaged, or several archives in one"
            )


class Images:
    """A folder of images; the folder directly below it is the label."""

    suffixes = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm")

    def fields(self, files: Sequence[SourceFile], dtype: str | None) -> list[Field]:
        return [Field("path", "text"), Field("label", "text"), Field("target", "int64"),
                Field("image", "bytes")]  # fmt: skip

    def units(
        self, files: Sequence[SourceFile], limits: Limits, dtype: str | None
    ) -> Iterator[Unit]:
        labels = sorted({_label(file.inside) for file in files})
        numbers = {label: number for number, label in enumerate(labels)}
        group: list[tuple[str, str, int, int]] = []
        size = 0
        for file in files:
            if file.size > limits.sample:
                raise BadSource(
                    f"{file.path} has {file.size} bytes, and the limit is {limits.sample}: if it "
                    "is meant, set a larger --largest-sample"
                )
            if group and size + file.size > limits.shard:
                yield Unit({"files": group}, size)
                group, size = [], 0
            group.append((str(file.path), file.inside, numbers[_label(file.inside)], file.size))
            size += file.size
        yield Unit({"files": group}, size)

    def digest(self, order: Order, watched: Watched, limits: Limits) -> str:
        digests = hashlib.sha256()
        for path, inside, target, size in order["files"]:
            with watched.open(path) as file:
                about = json.dumps([inside, target]).encode()
                digests.update(range_digest(file, iter([(0, size)]), about).encode())
        return digests.hexdigest()

    def samples(self, order: Order, watched: Watched, limits: Limits) -> Iterator[Any]:
        for path, inside, target, size in order["files"]:
            with watched.open(path) as file:
                image = file.read(size)
            yield {"path": inside, "label": _label(inside), "target": target, "image": image}


def _label(inside: str) -> str:
    folder, given, _ = inside.partition("/")
    return folder if given else ""


class Tokens:
    """Raw tokens: .npy of one dimension, or .bin without a header, whose type is named."""

    suffixes = (".bin", ".npy")
    types: Final = ("uint16", "uint32")

    def fields(self, files: Sequence[SourceFile], dtype: str | None) -> list[Field]:
        found = {self._layout(file, dtype)[0] for file in files}
        if len(found) > 1:
            raise BadSource("the files have tokens of different types: ingest them apart")
        return [Field("tokens", f"array:{found.pop()}")]

    def units(
        self, files: Sequence[SourceFile], limits: Limits, dtype: str | None
    ) -> Iterator[Unit]:
        for file in files:
            name, start = self._layout(file, dtype)
            item = np.dtype(name).itemsize
            if (file.size - start) % item:
                raise BadSource(f"{file.path} has no whole number of {name} tokens")
            for first, last in cut(file.size - start, max(item, limits.shard // item * item)):
                order = {
                    "path": str(file.path), "dtype": name,
                    "start": start + first, "stop": start + last,
                }  # fmt: skip
                yield Unit(order, last - first)

    def _layout(self, file: SourceFile, dtype: str | None) -> tuple[str, int]:
        """The tokens' type, and where the first one is."""
        if file.path.suffix == ".bin":
            if dtype not in self.types:
                raise ConfigurationError(
                    f"{file.path} does not say what its tokens are: name --dtype uint16 or uint32"
                )
            return dtype, 0
        with Watched().open(str(file.path)) as opened:
            bounded: Any = _Bounded(opened, 1 << 20)
            with parsing(file.path, ".npy"):
                version = np.lib.format.read_magic(bounded)
                read = (
                    np.lib.format.read_array_header_1_0
                    if version == (1, 0)
                    else np.lib.format.read_array_header_2_0
                )
                shape, _, found = read(bounded, max_header_size=10_000)
            start = opened.tell()
        plain = found in (np.dtype("<u2"), np.dtype("<u4"))
        if not plain or len(shape) != 1 or start + shape[0] * found.itemsize != file.size:
            raise BadSource(
                f"{file.path} is no array of one dimension of uint16 or uint32, or is cut off"
            )
        return found.name, start

    def digest(self, order: Order, watched: Watched, limits: Limits) -> str:
        with watched.open(order["path"]) as file:
            return range_digest(file, iter([(order["start"], order["stop"])]))

    def samples(self, order: Order, watched: Watched, limits: Limits) -> Iterator[Any]:
        with watched.open(order["path"]) as file:
            file.seek(order["start"])
            content = file.read(order["stop"] - order["start"])
        item = np.dtype(order["dtype"]).newbyteorder("<")
        yield {"tokens": np.frombuffer(content, item)}


FORMATS: Final[dict[str, Format]] = {
    "parquet": Parquet(),
    "jsonl": JsonLines(),
    "webdataset": Tars(),
    "images": Images(),
    "tokens": Tokens(),
}


def format_of(files: Sequence[SourceFile], name: str | None) -> str:
    """The one that is named, or that all files' endings say."""
    if name is not None and name not in FORMATS:
        raise ConfigurationError(f"--format {name}: it is one of {', '.join(FORMATS)}")
    endings = {ending: one for one, form in FORMATS.items() for ending in form.suffixes}
    found: dict[str, SourceFile] = {}
    for file in files:
        ending = file.path.suffix.lower()
        if ending not in endings:
            raise BadSource(
                f"{file.path} is none of {', '.join(endings)}: move it away, and ingest the rest"
            )
        found.setdefault(endings[ending], file)
    for kind, file in found.items():
        if kind != (name or kind):
            raise BadSource(f"{file.path} is {kind} and not {name}: move it away")
    if len(found) > 1:
        names = ", ".join(f"{one.path} ({kind})" for kind, one in found.items())
        raise BadSource(f"the source mixes formats: {names}. Ingest each apart")
    return next(iter(found))
