"""A checkpoint's metadata as JSON, in both directions: never a pickle."""

from __future__ import annotations

import io
import pickle
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from sealring.errors import NotAVault, UnsafeEntry, Unsupported

KIND: Final = "checkpoint"


@dataclass(frozen=True, slots=True)
class Location:
    """Where an entry's bytes are."""

    part: str
    start: int
    length: int


def check_entry(name: str, pickled: bytes) -> None:
    """Refuses a pickle that names anything but tensors and plain data.

    The bytes are handed to the planner after this, which loads them without such a check.
    """
    try:
        torch.load(io.BytesIO(pickled), weights_only=True, map_location="cpu")
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError) as problem:
        reason = str(problem).strip().splitlines()[0]
        raise UnsafeEntry(
            f"the entry {name!r} cannot be loaded without running code that it brings: save it as "
            "tensors, numbers, strings, lists and dicts, or allow its type with "
            f"torch.serialization.add_safe_globals ({reason})"
        ) from None


def metadata_document(metadata: Metadata) -> dict[str, Any]:
    tensors, entries = {}, []
    for name, described in metadata.state_dict_metadata.items():
        if isinstance(described, TensorStorageMetadata):
            tensors[name] = {
                "dtype": dtype_name(described.properties.dtype),
                "size": list(described.size),
                "chunks": [[list(one.offsets), list(one.sizes)] for one in described.chunks],
            }
        else:
            entries.append(name)
    paths = metadata.planner_data
    return {
        "tensors": tensors,
        "bytes": entries,
        "paths": None if paths is None else {name: _path(paths[name]) for name in paths},
        "torch_version": metadata.version,
    }


def metadata_from(document: Any, where: str) -> Metadata:
    try:
        described: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {
            name: TensorStorageMetadata(
                TensorProperties(dtype=dtype_named(tensor["dtype"])),
                torch.Size(tensor["size"]),
                [
                    ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
                    for offsets, sizes in tensor["chunks"]
                ],
            )
            for name, tensor in document["tensors"].items()
        }
        described |= {name: BytesStorageMetadata() for name in document["bytes"]}
        paths = document["paths"]
        return Metadata(
            described,
            planner_data=None if paths is None else {k: tuple(v) for k, v in paths.items()},
            version=document["torch_version"],
        )
    except (KeyError, TypeError, ValueError, AttributeError):
        raise NotAVault(f"the metadata of {where} cannot be read") from None


def index_document(index: MetadataIndex) -> list[Any]:
    return [index.fqn, None if index.offset is None else list(index.offset)]


def index_from(name: str, offset: list[int] | None) -> MetadataIndex:
    return MetadataIndex(name, None if offset is None else torch.Size(offset))


def raw_bytes(tensor: torch.Tensor) -> Any:
    """A contiguous tensor's memory itself, as a buffer of bytes."""
    return tensor.reshape(-1).view(torch.uint8).numpy()


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def dtype_named(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(name)
    return dtype


def _path(path: Any) -> list[str | int]:
    """How the planner flattened a nested name."""
    if not isinstance(path, tuple) or not all(isinstance(step, str | int) for step in path):
        raise Unsupported(
            "the planner's own data is not a table of names: use DefaultSavePlanner, or one whose "
            "planner_data is like its"
        )
    return list(path)
