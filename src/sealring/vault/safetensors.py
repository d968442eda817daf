"""The safetensors format: a JSON header of names, dtypes, shapes and offsets, then raw bytes.

Read and written as a stream, so that a checkpoint larger than memory passes.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO, Final

import torch

from sealring.errors import ConfigurationError, Unsupported
from sealring.formats.strict import read_json

_METADATA: Final = "__metadata__"
_LARGEST_HEADER: Final = 100 << 20
_MOST_ELEMENTS: Final = 1 << 56
DTYPES: Final = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "U16": torch.uint16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
_NOT_ONE: Final = (
    struct.error, ValueError, KeyError, TypeError, AttributeError
)  # fmt: skip
_NAMES: Final = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class Entry:
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def length(self) -> int:
        return self.dtype.itemsize * math.prod(self.shape)


def header(entries: list[Entry], notes: Mapping[str, str]) -> bytes:
    """What goes in front of the tensors' bytes, which follow in the order of `entries`."""
    document: dict[str, Any] = {_METADATA: dict(notes)} if notes else {}
    start = 0
    for entry in entries:
        if entry.name == _METADATA:
            raise Unsupported(f"safetensors has no tensor named {_METADATA!r}: rename it")
        if entry.dtype not in _NAMES:
            raise Unsupported(f"{entry.name} is {entry.dtype}, which safetensors has no name for")
        document[entry.name] = {
            "dtype": _NAMES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [start, start + entry.length],
        }
        start += entry.length
    text = json.dumps(document).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def read(file: BinaryIO, size: int, where: str) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a file, one after the other. Each range must be inside and of its shape."""
    try:
        (length,) = struct.unpack("<Q", file.read(8))
        if length > min(_LARGEST_HEADER, size):
            raise ValueError("its header is too long")
        document = read_json(file.read(length))
        notes = document.pop(_METADATA, {})
        if not all(isinstance(one, str) for one in notes.values()):
            raise ValueError(f"{_METADATA} is no table of strings")
        entries = []
        for name, described in document.items():
            shape = tuple(described["shape"])
            if not all(type(one) is int and one >= 0 for one in shape):
                raise ValueError(f"the shape of {name} is none")
            if math.prod(max(one, 1) for one in shape) > _MOST_ELEMENTS:
                raise ValueError(f"the shape of {name} is too large")
            entry = Entry(name, DTYPES[described["dtype"]], shape)
            start, end = described["data_offsets"]
            if not 0 <= start <= end <= size - 8 - length or end - start != entry.length:
                raise ValueError(f"{name} has another length than its shape")
            entries.append((start, entry))
    except _NOT_ONE as problem:
        raise ConfigurationError(f"{where} is not a safetensors file: {problem}") from None
    for start, entry in sorted(entries, key=lambda one: one[0]):
        tensor = torch.empty(entry.shape, dtype=entry.dtype)
        file.seek(8 + length + start)
        view: Any = tensor.reshape(-1).view(torch.uint8).numpy()
        if entry.length and file.readinto(view) != entry.length:  # type: ignore[attr-defined]
            raise ConfigurationError(f"{where} became shorter while it was read")
        yield entry.name, tensor
