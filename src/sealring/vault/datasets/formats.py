"""The file formats that can be ingested. Each divides files into units and reads a unit's samples.

Units are planned from names and sizes. An attacker may have written the files: the sizes that a
file states are checked before memory is allocated for them.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, Final, Protocol

import numpy as np

from sealring.errors import (
    BadSource,
    ConfigurationError,
    SealringError,
    UnsafePath,
    named,
)
from sealring.formats.strict import read_json
from sealring.vault.datasets.fields import Field, JsonText
from sealring.vault.files import check_inside
from sealring.vault.trees import Watched, files_below

SHARD_BYTES: Final = 64 << 20
LARGEST_SAMPLE: Final = 64 << 20
_BLOCK: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Limits:
    shard: int = SHARD_BYTES
    """About how many bytes of the source go into one shard."""
    sample: int = LARGEST_SAMPLE
    """The largest sample in bytes; a larger one is refused."""


@dataclass(frozen=True, slots=True)
class Unit:
    """The source of one shard. Its order is JSON, because another process may carry it out."""

    order: dict[str, Any]
    bytes: int


@dataclass(frozen=True, slots=True)
class SourceFile:
    path: Path
    inside: str
    """The file's path in the ingested folder; its name if it is ingested alone."""
    size: int


def source_files(source: Path) -> list[SourceFile]:
    """The files to ingest, sorted by path. Names that begin with a dot are left out."""
    found = []
    for path, inside in files_below(source):
        hidden = any(part.startswith(".") for part in inside.split("/"))
        if not hidden and not path.is_dir():
            found.append(SourceFile(path, inside or path.name, path.stat().st_size))
    if not found:
        raise ConfigurationError(f"{source} holds no files to ingest")
    return sorted(found, key=lambda one: one.inside)


def too_large(what: object, size: int, limit: int) -> BadSource:
    return BadSource(
        f"{what} has {size} bytes, and the limit is {limit}: if it is meant, set a larger "
        "--largest-sample"
    )


@contextlib.contextmanager
def parsing(name: object, form: str) -> Iterator[None]:
    """Turns any error of another project's parser into BadSource: a hostile file may cause any."""
    try:
        yield
    except SealringError:
        raise
    except Exception as problem:
        reason = f"{named(problem)}: {problem}"[:300]
        raise BadSource(f"{name} cannot be read as {form}. {reason}") from None


def range_digest(file: BinaryIO, ranges: Iterator[tuple[int, int]], about: bytes = b"") -> str:
    """SHA-256 of `about`, which describes the bytes, and of the bytes in the ranges."""
    digest = hashlib.sha256(len(about).to_bytes(8, "big") + about)
    for start, stop in ranges:
        file.seek(start)
        left = stop - start
        while left:
            block = file.read(min(left, _BLOCK))
            if not block:
                raise BadSource(
                    f"{file.name} became shorter while it was read", code="vault.source_changed"
                )
            digest.update(block)
            left -= len(block)
    return digest.hexdigest()


def cut(size: int, step: int) -> Iterator[tuple[int, int]]:
    for start in range(0, size, step):
        yield start, min(size, start + step)


Order = dict[str, Any]


class Format(Protocol):
    @property
    def suffixes(self) -> tuple[str, ...]: ...

    def fields(self, files: Sequence[SourceFile], dtype: str | None) -> list[Field]: ...

    def units(
        self, files: Sequence[SourceFile], limits: Limits, dtype: str | None
    ) -> Iterator[Unit]: ...

    def digest(self, order: Order, watched: Watched, limits: Limits) -> str:
        """The digest of the bytes that the unit is made from."""

    def samples(self, order: Order, watched: Watched, limits: Limits) -> Iterator[Any]:
        """The unit's samples, in the form that the fields' encoder takes."""


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
    """The range from the first line that begins in the order's range to the end of the last."""
    return (
        _line_start(file, order["start"], limits),
        _line_start(file, order["stop"], limits),
    )


def _line_start(file: BinaryIO, at: int, limits: Limits) -> int:
    """Where the first line begins that does not begin before `at`."""
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
    """WebDataset: neighbouring files with equal names up to the first dot form a sample."""

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
                if (size := sum(map(len, files.values()))) > limits.sample:
                    raise too_large(f"{file.name}: the sample {key!r}", size, limits.sample)
            if files:
                yield {"key": key, "files": files}


class _Bounded:
    """A file of which one read gives no more bytes than the largest sample has."""

    def __init__(self, file: BinaryIO, largest: int) -> None:
        self._file, self._largest = file, largest
        self.name = file.name
        self.seek, self.tell, self.seekable = file.seek, file.tell, file.seekable

    def read(self, size: int = -1) -> bytes:
        if not 0 <= size <= self._largest:
            where = f"{self.name}: what is named at byte {self.tell()}"
            raise too_large(where, size, self._largest)
        return self._file.read(size)


def _members(file: BinaryIO, limits: Limits) -> Iterator[tuple[str, bytes]]:
    bounded: Any = _Bounded(file, max(limits.sample, 1 << 20))
    with (
        parsing(file.name, "a tar archive"),
        tarfile.open(fileobj=bounded, mode="r:") as archive,
    ):
        for member in archive:
            archive.members = []  # type: ignore[attr-defined]  # tarfile would keep all members
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
                raise too_large(where, member.size, limits.sample)
            content = archive.extractfile(member)
            assert content is not None, "isreg"
            data = content.read(member.size)
            if len(data) != member.size:
                raise BadSource(f"{where} is cut off")
            yield str(inside), data
        _check_end(bounded, archive.offset)


def _check_end(file: Any, at: int) -> None:
    """Raises BadSource if data follow the last file: tarfile takes a damaged header for the end."""
    file.seek(at)
    while block := file.read(1 << 20):
        if block.count(0) != len(block):
            raise BadSource(
                f"{file.name}: what follows byte {at} is neither a file nor the archive's end: it "
                "is damaged, or several archives in one"
            )


class Images:
    """A folder of images. The name of the folder directly below it is an image's label."""

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
                raise too_large(file.path, file.size, limits.sample)
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
    """Raw tokens: .npy files of one dimension, or .bin files without a header.

    The caller must name the type of .bin files.
    """

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
        """The tokens' type, and the byte at which the first token begins."""
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


_BATCH_ROWS: Final = 1024
LARGEST_EXPANSION: Final = 1000
SMALL_ROW_GROUP: Final = 1 << 30
"""A row group of up to this size is decoded, however small its file is."""
_STRING_LIMIT: Final = 16 << 20
_CONTAINER_LIMIT: Final = 1 << 20


def pyarrow(module: str) -> Any:
    try:
        return import_module(module)
    except ImportError:
        raise ConfigurationError(
            "Parquet needs pyarrow: install the extra, pip install 'sealring[data]'",
            code="configuration.missing_extra",
        ) from None


@contextlib.contextmanager
def readable(file: BinaryIO, strings: list[str] | None = None) -> Iterator[Any]:
    """Opens a file with pyarrow. Raises BadSource if pyarrow cannot read it.

    `strings`: columns whose values stay in a dictionary. A few bytes can stand for a million copies
    of a long string; without the dictionary pyarrow would make all copies at once.
    """
    parquet = pyarrow("pyarrow.parquet")
    with parsing(file.name, "Parquet"), parquet.ParquetFile(
        file, pre_buffer=False, thrift_string_size_limit=_STRING_LIMIT,
        thrift_container_size_limit=_CONTAINER_LIMIT, read_dictionary=strings,
    ) as opened:  # fmt: skip
        yield opened


class Parquet:
    suffixes = (".parquet",)

    def fields(self, files: Sequence[SourceFile], dtype: str | None) -> list[Field]:
        first: list[Field] | None = None
        for source in files:
            with Watched().open(str(source.path)) as file, readable(file) as opened:
                schema = opened.schema_arrow
                if len(set(schema.names)) != len(schema.names) or not schema.names:
                    raise BadSource(f"{source.path} has a column twice, or none")
                found = [Field(one.name, _kind(one.type)) for one in schema]
            if found != (first or found):
                raise BadSource(
                    f"{source.path} has other columns than {files[0].path}: ingest them apart"
                )
            first = found
        assert first is not None, "source_files"
        return first

    def units(
        self, files: Sequence[SourceFile], limits: Limits, dtype: str | None
    ) -> Iterator[Unit]:
        for source in files:
            with Watched().open(str(source.path)) as file, readable(file) as opened:
                first, size = 0, 0
                groups = opened.metadata.num_row_groups
                for number in range(groups):
                    size += _checked_size(opened.metadata.row_group(number), source, number)
                    if size >= limits.shard or number + 1 == groups:
                        order = {"path": str(source.path), "first": first, "stop": number + 1}
                        yield Unit(order, size)
                        first, size = number + 1, 0

    def digest(self, order: dict[str, Any], watched: Watched, limits: Limits) -> str:
        with watched.open(order["path"]) as file:
            with readable(file) as opened:
                groups = [
                    opened.metadata.row_group(number).to_dict()
                    for number in range(order["first"], order["stop"])
                ]
                about = [str(opened.schema_arrow), groups]
                ranges = [
                    _range(opened.metadata.row_group(number).column(column))
                    for number in range(order["first"], order["stop"])
                    for column in range(opened.metadata.num_columns)
                ]
            with watched.open(order["path"]) as again:  # pyarrow has closed the first file
                text = json.dumps(about, default=str, sort_keys=True).encode()
                return range_digest(again, iter(ranges), text)

    def samples(
        self, order: dict[str, Any], watched: Watched, limits: Limits
    ) -> Iterator[dict[str, Any]]:
        wanted = list(range(order["first"], order["stop"]))
        with _folded(watched, order["path"]) as (file, opened):
            kinds = [_kind(one.type) for one in opened.schema_arrow]
            for batch in _batches(opened, wanted, file):
                columns = [_values(*one) for one in zip(batch.columns, kinds, strict=True)]
                for row in zip(*columns, strict=True):
                    yield dict(zip(batch.schema.names, row, strict=True))


def _strings(opened: Any) -> list[str]:
    """The paths of columns that hold text or bytes, also inside lists and structs."""
    columns = [opened.schema.column(number) for number in range(len(opened.schema))]
    return [
        one.path
        for one in columns
        if one.physical_type == "BYTE_ARRAY" and one.logical_type.type != "DECIMAL"
    ]


def _unfolded(column: Any) -> int:
    """How many bytes of text a column's dictionaries stand for, also inside lists and structs."""
    types, compute = pyarrow("pyarrow.types"), pyarrow("pyarrow.compute")
    if types.is_dictionary(column.type):
        lengths = compute.binary_length(column.dictionary).take(column.indices)
        return compute.sum(lengths.cast("int64")).as_py() or 0
    if types.is_map(column.type):
        return _unfolded(column.keys) + _unfolded(column.items)
    if types.is_struct(column.type):
        return sum(map(_unfolded, column.flatten()))
    if types.is_nested(column.type):
        return _unfolded(column.flatten())
    return 0


def _kind(arrow_type: Any) -> str:
    types = pyarrow("pyarrow.types")
    if types.is_dictionary(arrow_type):
        return _kind(arrow_type.value_type)
    if types.is_boolean(arrow_type):
        return "bool"
    if types.is_integer(arrow_type) and not types.is_uint64(arrow_type):
        return "int64"
    if types.is_floating(arrow_type):
        return "float64"
    if types.is_string(arrow_type) or types.is_large_string(arrow_type):
        return "text"
    if types.is_binary(arrow_type) or types.is_large_binary(arrow_type):
        return "bytes"
    if types.is_fixed_size_binary(arrow_type):
        return "bytes"
    if types.is_list(arrow_type) or types.is_large_list(arrow_type):
        item = arrow_type.value_type
        if types.is_integer(item) or types.is_floating(item):
            return f"array:{np.dtype(item.to_pandas_dtype()).name}"
    return "json"


def _values(column: Any, kind: str) -> Iterator[Any]:
    if kind.startswith("array:"):
        for value in column:
            if value.is_valid and value.values.null_count:
                raise BadSource("a list has elements that are missing")
            yield value.values.to_numpy() if value.is_valid else None
    else:
        for value in column:  # one at a time: see readable
            yield value.as_py()


@contextlib.contextmanager
def _folded(watched: Watched, path: str) -> Iterator[tuple[BinaryIO, Any]]:
    """Opens a file so that all texts stay in their dictionaries: see `readable`."""
    with watched.open(path) as file, readable(file) as opened:
        strings = _strings(opened)
    with watched.open(path) as file, readable(file, strings) as opened:
        yield file, opened


def _batches(opened: Any, groups: list[int], file: BinaryIO) -> Iterator[Any]:
    """Yields the rows of these groups. Raises BadSource if they become too large in memory."""
    left = max(
        SMALL_ROW_GROUP,
        LARGEST_EXPANSION
        * sum(_checked_size(opened.metadata.row_group(one), file, one) for one in groups),
    )
    for batch in opened.iter_batches(_BATCH_ROWS, row_groups=groups, use_threads=False):
        left -= batch.nbytes + sum(map(_unfolded, batch.columns))
        if left < 0:
            raise _bomb(file.name)
        yield batch


def _checked_size(group: Any, source: Any, number: int) -> int:
    """The bytes of a row group in the file. Raises BadSource if its stated sizes are impossible."""
    compressed = sum(group.column(one).total_compressed_size for one in range(group.num_columns))
    plain = sum(group.column(one).total_uncompressed_size for one in range(group.num_columns))
    name = source.path if isinstance(source, SourceFile) else source.name
    if compressed < 0 or plain > max(SMALL_ROW_GROUP, LARGEST_EXPANSION * compressed):
        raise _bomb(f"{name}: row group {number}")
    return int(compressed)


def _bomb(where: str) -> BadSource:
    return BadSource(
        f"{where} would become more than {LARGEST_EXPANSION} times as large as it is, and more "
        f"than {SMALL_ROW_GROUP >> 30} GiB: it is damaged or meant to fill memory and disk"
    )


def _range(column: Any) -> tuple[int, int]:
    start = column.data_page_offset
    if column.has_dictionary_page and column.dictionary_page_offset is not None:
        start = min(start, column.dictionary_page_offset)
    if start < 0 or column.total_compressed_size < 0:
        raise BadSource("a column chunk lies before the file's beginning")
    return start, start + column.total_compressed_size


FORMATS: Final[dict[str, Format]] = {
    "parquet": Parquet(),
    "jsonl": JsonLines(),
    "webdataset": Tars(),
    "images": Images(),
    "tokens": Tokens(),
}


def format_of(files: Sequence[SourceFile], name: str | None) -> str:
    """The format of all files, by their endings. If `name` is given, it must be that format."""
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
