"""Parquet as a source: rows become samples, row groups become units."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import Any, BinaryIO, Final

import numpy as np

from sealring.errors import BadSource, ConfigurationError
from sealring.vault.datasets.fields import Field
from sealring.vault.datasets.sources import (
    Limits,
    SourceFile,
    Unit,
    parsing,
    range_digest,
)
from sealring.vault.trees import Watched

_ROWS: Final = 1024
_EXPANSION: Final = 1000
_SMALL: Final = 1 << 30
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
    """pyarrow's view of the file. What it cannot read is BadSource.

    `strings`: columns whose values stay in a dictionary. A few bytes can stand for a million
    copies of a long string, which would else all be made at once.
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
            with watched.open(order["path"]) as again:  # pyarrow has closed the other
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
    """Paths of the columns that hold text or bytes, also inside lists and structs."""
    columns = [opened.schema.column(number) for number in range(len(opened.schema))]
    return [
        one.path
        for one in columns
        if one.physical_type == "BYTE_ARRAY" and one.logical_type.type != "DECIMAL"
    ]


def _unfolded(column: Any) -> int:
    """Bytes of text that a column's dictionaries stand for, also inside lists and structs."""
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
    """The file, with all texts left in their dictionaries."""
    with watched.open(path) as file, readable(file) as opened:
        strings = _strings(opened)
    with watched.open(path) as file, readable(file, strings) as opened:
        yield file, opened


def _batches(opened: Any, groups: list[int], file: BinaryIO) -> Iterator[Any]:
    """Rows of these groups, as long as they do not become too much. See `readable`."""
    left = max(
        _SMALL,
        _EXPANSION
        * sum(_checked_size(opened.metadata.row_group(one), file, one) for one in groups),
    )
    for batch in opened.iter_batches(_ROWS, row_groups=groups, use_threads=False):
        left -= batch.nbytes + sum(map(_unfolded, batch.columns))
        if left < 0:
            raise _bomb(file.name)
        yield batch


def _checked_size(group: Any, source: Any, number: int) -> int:
    """Bytes of a row group in the file, if what it says of itself is possible."""
    compressed = sum(group.column(one).total_compressed_size for one in range(group.num_columns))
    plain = sum(group.column(one).total_uncompressed_size for one in range(group.num_columns))
    name = source.path if isinstance(source, SourceFile) else source.name
    if compressed < 0 or plain > max(_SMALL, _EXPANSION * compressed):
        raise _bomb(f"{name}: row group {number}")
    return int(compressed)


def _bomb(where: str) -> BadSource:
    return BadSource(
        f"{where} would become more than {_EXPANSION} times as large as it is, and more than "
        f"{_SMALL >> 30} GiB: it is damaged or meant to fill memory and disk"
    )


def _range(column: Any) -> tuple[int, int]:
    start = column.data_page_offset
    if column.has_dictionary_page and column.dictionary_page_offset is not None:
        start = min(start, column.dictionary_page_offset)
    if start < 0 or column.total_compressed_size < 0:
        raise BadSource("a column chunk lies before the file's beginning")
    return start, start + column.total_compressed_size
