"""Turns tensors and other entries of a checkpoint into bytes, and back."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType

from sealring.errors import Unsupported, VaultError
from sealring.vault.sealed import shown

KIND: Final = "checkpoint"
_REFUSED: Final = "WeightsUnpickler error: "
_LONGEST_REASON: Final = 300


def rank_and_world() -> tuple[int, int]:
    """This worker's rank and world size; (0, 1) if no process group was made."""
    if not dist.is_available() or not dist.is_initialized():
        return 0, 1
    return dist.get_rank(), dist.get_world_size()


def load_entry(name: str, pickled: bytes) -> Any:
    """Loads a pickle that holds only tensors and plain data; else raises VaultError."""
    try:
        return torch.load(io.BytesIO(pickled), weights_only=True, map_location="cpu")
    except Exception as problem:  # the bytes may be anything, and may raise anything
        raise _unsafe(name, problem) from None


def pickled_anew(name: str, pickled: bytes) -> io.BytesIO:
    """Loads an entry with restrictions, then pickles the value again for a planner.

    Planners load their input without restrictions, so they never get a checkpoint's own bytes. The
    new pickle names only classes and functions of the value, and the restricted load allowed those.
    """
    value = load_entry(name, pickled)
    content = io.BytesIO()
    try:
        torch.save(value, content)
    except Exception as problem:  # an entry's objects may have any attributes, and not pickle
        raise _unsafe(name, problem) from None
    content.seek(0)
    return content


def _unsafe(name: str, problem: Exception) -> VaultError:
    lines = [one for one in str(problem).splitlines() if one.strip()] or [type(problem).__name__]
    # torch's first line advises to load without restrictions; a later one says what was refused.
    told = next((one for one in lines if "GLOBAL" in one or _REFUSED in one), lines[0])
    reason = shown(told.rpartition(_REFUSED)[2].strip(), _LONGEST_REASON) or "it is malformed"
    return VaultError(
        f"the entry {name!r} cannot be loaded without running code that it brings: save it as "
        "tensors, numbers, strings, lists and dicts, or allow its type with "
        f"torch.serialization.add_safe_globals ({reason})",
        code="vault.unsafe_entry",
    )


def paths_document(planner_data: Any) -> dict[str, list[str | int]] | None:
    """How the planner flattened nested names, as JSON."""
    if planner_data is None:
        return None
    if not isinstance(planner_data, dict):
        raise _no_table()
    return {name: _path(planner_data[name]) for name in planner_data}


def paths_of_all(plans: Sequence[SavePlan]) -> dict[str, list[str | int]] | None:
    """The name tables of all ranks, merged as DefaultSavePlanner merges them."""
    found = [paths_document(plan.planner_data) for plan in plans]
    tables = [one for one in found if one is not None]
    return (
        {name: path for table in reversed(tables) for name, path in table.items()}
        if tables
        else None
    )


def bytes_of(item: WriteItem, planner: SavePlanner) -> torch.Tensor:
    """The entry's bytes in CPU memory; a contiguous CPU tensor is not copied."""
    data: Any = planner.resolve_data(item)
    if item.type == WriteItemType.BYTE_IO:
        content = data.getvalue()
        load_entry(item.index.fqn, content)
        return torch.frombuffer(bytearray(content), dtype=torch.uint8)
    tensor: torch.Tensor = data.detach()
    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise Unsupported(f"{item.index.fqn} is sparse or quantized: save its dense tensors")
    if tensor.is_meta:
        raise Unsupported(f"{item.index.fqn} is on the device 'meta' and has no content to save")
    if isinstance(tensor, AsyncCollectiveTensor):
        tensor = tensor.wait()
    if not has_own_memory(tensor):
        raise Unsupported(
            f"{item.index.fqn} is a {type(tensor).__name__}, which holds other tensors: save those"
        )
    assert item.tensor_data is not None
    planned = item.tensor_data.properties.dtype, item.tensor_data.chunk.sizes
    if (tensor.dtype, tensor.shape) != planned:
        raise Unsupported(
            f"{item.index.fqn} is planned as {planned[0]} of {list(planned[1])}, and the planner "
            f"gave {tensor.dtype} of {list(tensor.shape)}: change the plan and the tensor together"
        )
    plain = tensor.cpu().resolve_conj().resolve_neg()
    return plain.contiguous().reshape(-1).view(torch.uint8)


def raw_bytes(tensor: torch.Tensor) -> Any:
    """A contiguous tensor's memory as a buffer of bytes, without a copy."""
    return tensor.reshape(-1).view(torch.uint8).numpy()


def has_own_memory(tensor: torch.Tensor) -> bool:
    """False for classes that hold other tensors, such as masked tensors or quantizers' tensors."""
    return type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def dtype_named(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype) or name.startswith(("q", "bits")):
        raise ValueError(name)  # quantized tensors are more than their bytes
    return dtype


def _path(path: Any) -> list[str | int]:
    if not isinstance(path, tuple) or not all(isinstance(step, str | int) for step in path):
        raise _no_table()
    return list(path)


def _no_table() -> Unsupported:
    return Unsupported(
        "the planner's own data is not a table of names: use DefaultSavePlanner, or one whose "
        "planner_data is like its"
    )
