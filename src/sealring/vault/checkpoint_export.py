"""Exports checkpoints as torch.save or safetensors files, and imports safetensors files."""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Final

import torch
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
from torch.distributed.checkpoint.state_dict_saver import _save_state_dict

from sealring.errors import ConfigurationError, Unsupported
from sealring.formats.files import not_written
from sealring.formats.strict import read_json
from sealring.vault.checkpoint_form import raw_bytes
from sealring.vault.checkpoint_reader import CheckpointReader
from sealring.vault.checkpoint_writer import CheckpointWriter
from sealring.vault.files import check_output, move_into_place, new_output, unfinished

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
_MALFORMED: Final = (struct.error, ValueError, KeyError, TypeError, AttributeError)
_NAMES: Final = {dtype: name for name, dtype in DTYPES.items()}


def safetensors_header(tensors: Mapping[str, torch.Tensor], notes: Mapping[str, str]) -> bytes:
    """The header of a safetensors file. The tensors' bytes follow it in this order."""
    document: dict[str, Any] = {_METADATA: dict(notes)} if notes else {}
    start = 0
    for name, tensor in tensors.items():
        if name == _METADATA:
            raise Unsupported(f"safetensors has no tensor named {_METADATA!r}: rename it")
        if tensor.dtype not in _NAMES:
            raise Unsupported(f"{name} is {tensor.dtype}, which safetensors has no name for")
        end = start + tensor.nbytes
        document[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
        start = end
    text = json.dumps(document).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def read_safetensors(file: BinaryIO, size: int, where: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Reads the tensors of a file one by one.

    Raises ConfigurationError if a tensor's range does not fit its shape or lies outside the file.
    """
    try:
        (length,) = struct.unpack("<Q", file.read(8))
        if length > min(_LARGEST_HEADER, size):
            raise ValueError("its header is too long")
        document = read_json(file.read(length))
        notes = document.pop(_METADATA, {})
        if not all(isinstance(one, str) for one in notes.values()):
            raise ValueError(f"{_METADATA} is no table of strings")
        found = []
        for name, described in document.items():
            shape, dtype = tuple(described["shape"]), DTYPES[described["dtype"]]
            if not all(type(one) is int and one >= 0 for one in shape):
                raise ValueError(f"the shape of {name} is none")
            if math.prod(max(one, 1) for one in shape) > _MOST_ELEMENTS:
                raise ValueError(f"the shape of {name} is too large")
            start, end = described["data_offsets"]
            fits = end - start == dtype.itemsize * math.prod(shape)
            if not 0 <= start <= end <= size - 8 - length or not fits:
                raise ValueError(f"{name} has another length than its shape")
            found.append((start, name, shape, dtype))
    except _MALFORMED as problem:
        raise ConfigurationError(f"{where} is not a safetensors file: {problem}") from None
    for start, name, shape, dtype in sorted(found, key=lambda one: one[0]):
        tensor = torch.empty(shape, dtype=dtype)
        file.seek(8 + length + start)
        if tensor.nbytes and file.readinto(raw_bytes(tensor)) != tensor.nbytes:  # type: ignore[attr-defined]
            raise ConfigurationError(f"{where} became shorter while it was read")
        yield name, tensor


def load_whole(reader: CheckpointReader) -> dict[str, Any]:
    """Loads the whole state of a checkpoint in this process, without other ranks."""
    return _loaded(reader, None)[0]


def _loaded(reader: CheckpointReader, only: str | None) -> tuple[dict[str, Any], list[str]]:
    """Loads a checkpoint's state, or only what is below the entry `only`.

    Returns the state and the names of the entries that were left out, which are not read.
    """
    state: dict[str, Any] = {}
    reader.reset()
    planner = _Below(only)
    try:
        _load_state_dict(state, reader, planner=planner, no_dist=True)
    except BaseException as problem:
        # torch wraps a rank's error in an exception of its own.
        for error, _ in getattr(problem, "failures", {}).values():
            raise error from None
        raise
    return state if only is None else _below(state, only, only), list(planner.left_out)


def export_torch(
    reader: CheckpointReader, out: str | os.PathLike[str], *, only: str | None = None
) -> list[str]:
    """Writes a checkpoint in plaintext, as `torch.save` does; `weights_only=True` loads it.

    `only`: the one entry to write, such as "model". Returns the names of the entries left out.
    """
    target = Path(out)
    check_output(target)
    state, left_out = _loaded(reader, only)
    with _plaintext_file(target) as file:
        torch.save(state, file)
    return left_out


def export_safetensors(
    reader: CheckpointReader, out: str | os.PathLike[str], *, only: str | None = None
) -> list[str]:
    """Writes a checkpoint's tensors in plaintext as safetensors, under their saved names.

    Raises Unsupported if an entry is not a tensor: safetensors cannot hold it. `only`: the one
    entry to write, such as "model"; tensor names then begin below it. Returns the names of the
    entries left out.
    """
    target = Path(out)
    check_output(target)
    state, left_out = _loaded(reader, only)
    flat: dict[str, torch.Tensor] = {}
    _flatten("", state, flat)
    head = safetensors_header(flat, {"format": "pt"})
    with _plaintext_file(target) as file:
        file.write(head)
        for tensor in flat.values():
            file.write(raw_bytes(tensor.contiguous()))
    return left_out


def import_safetensors(writer: CheckpointWriter, source: str | os.PathLike[str]) -> None:
    """Seals the tensors of a safetensors file as a checkpoint."""
    path = Path(source)
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            state = dict(read_safetensors(file, size, str(path)))
    except OSError as problem:
        raise ConfigurationError(f"{path} cannot be read: {problem.strerror}") from problem
    writer.reset()
    _save_state_dict(state, writer, no_dist=True)


def _flatten(prefix: str, value: Any, into: dict[str, torch.Tensor]) -> None:
    if isinstance(value, torch.Tensor):
        into[prefix] = value
    elif isinstance(value, dict):
        for name, inner in value.items():
            _flatten(f"{prefix}.{name}" if prefix else str(name), inner, into)
    else:
        raise Unsupported(
            f"{prefix!r} is {type(value).__name__} and no tensor, so safetensors cannot hold it: "
            "name the entry to export (`--only model`), or export with torch.save's form"
        )


class _Below(_EmptyStateDictLoadPlanner):
    """A load planner that loads only what is below one entry; all entries if `only` is None."""

    def __init__(self, only: str | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._only = only
        self.left_out: dict[str, None] = {}

    def set_up_planner(self, state_dict: Any, metadata: Any = None, *others: Any) -> None:
        super().set_up_planner(state_dict, metadata, *others)
        if not state_dict and self._only is not None:
            raise ConfigurationError(
                f"the checkpoint has no entry {self._only!r}: it has {', '.join(self.left_out)}"
            )

    def _should_include_key(self, key: str, metadata: Any) -> bool:
        if self._only is None:
            return True
        steps = (metadata.planner_data or {}).get(key, (key,))
        above = [".".join(map(str, steps[:depth])) for depth in range(1, len(steps) + 1)]
        name = above[-1]
        if name == self._only or name.startswith(f"{self._only}."):
            # torch numbers the elements of lists, and writes other keys as strings.
            lists = [one for one, step in zip(above, steps[1:], strict=False) if type(step) is int]
            if any(self._only.startswith(f"{one}.") for one in lists):
                raise ConfigurationError(f"{self._only!r} is in the list {lists[0]!r}: export that")
            return True
        # Names the outermost entry that holds nothing of what is loaded.
        outer = (one for one in above if not f"{self._only}.".startswith(f"{one}."))
        self.left_out[next(outer, name)] = None
        return False


def _below(state: dict[str, Any], only: str, name: str) -> dict[str, Any]:
    """The part of a state that `only` names; a single value gets the whole name `name`.

    A name with dots may be one key or several nested keys; a state may have both.
    """
    found: dict[str, Any] = {}
    for key, inner in state.items():
        if key == only:
            found |= inner if isinstance(inner, dict) else {name: inner}
        elif key.startswith(f"{only}."):
            found[key.removeprefix(f"{only}.")] = inner
        elif only.startswith(f"{key}."):
            found |= _below(inner, only.removeprefix(f"{key}."), name)
    return found


@contextmanager
def _plaintext_file(target: Path) -> Iterator[Any]:
    """Opens a new file of mode 0600, which gets its name only when it is complete."""
    try:
        with unfinished(target) as temporary:
            with new_output(temporary, target) as file:
                yield file
            move_into_place(temporary, target)
    except OSError as problem:
        raise not_written(target, problem) from problem
