"""Checks a tensor's memory before the engine gets its address. Only this module asks for addresses.

A tensor may lack the memory that it claims: wrapper subclasses and fake tensors have none, a
storage may have been resized, a mapped file may be read-only or truncated. A wrong address would
crash the process, so this module raises Unsupported instead.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import torch

from sealring.errors import Unsupported

Slot = tuple[int, int]
"""The address of contiguous memory, and its length in bytes."""


class NoMemory(Unsupported):
    """The tensor has no memory of its own; it may wrap other tensors that torch can unwrap.

    If torch cannot unwrap it either, callers get Unsupported.
    """


def storages(tensors: Iterable[torch.Tensor]) -> Iterator[torch.UntypedStorage]:
    """The tensors' storages, which must live as long as their memory is used.

    Keeping the tensors is not enough: a script may give a tensor another storage.
    """
    return (tensor.untyped_storage() for tensor in tensors if tensor.layout is torch.strided)


def slot(tensor: torch.Tensor, *, written: bool = False) -> Slot:
    """The memory of a contiguous tensor, checked. `written` says that the engine will write to
    it."""
    size = tensor.nbytes
    if size == 0:
        return 0, 0
    address, storage = _check_room(tensor, size)
    # Torch's own allocations are resizable. Memory that torch was lent may be of any kind.
    if not storage.resizable() and tensor.device.type == "cpu":
        _check_mapped(tensor, address, size, written=written)
    return address, size


def place_of_torchs_own(tensor: torch.Tensor, size: int) -> tuple[int, torch.UntypedStorage] | None:
    """The address and the storage of a tensor whose memory torch allocated, if it has `size` bytes.

    None for all other tensors, which need more checks (`slot`).
    """
    try:
        address, storage = _check_room(tensor, size)
    except (NoMemory, Unsupported):
        return None
    return (address, storage) if storage.resizable() else None


def _check_room(tensor: torch.Tensor, size: int) -> tuple[int, torch.UntypedStorage]:
    try:
        address = tensor.data_ptr()
        storage = tensor.untyped_storage()
        room = storage.nbytes() - tensor.storage_offset() * tensor.element_size()
    except (RuntimeError, NotImplementedError) as problem:
        raise NoMemory(f"{_described(tensor)} has no memory of its own: {problem}") from None
    if room < size:
        raise Unsupported(
            f"{_described(tensor)} needs {size} bytes, and its storage has {max(room, 0)}. Resize "
            "the storage back first."
        )
    if address == 0:
        raise NoMemory(
            f"{_described(tensor)} has no memory of its own. Pass the tensors that it wraps, or "
            "its .clone()."
        )
    return address, storage


def parts(whole: Slot, count: int) -> list[Slot]:
    """Cuts contiguous memory into `count` equal parts."""
    address, size = whole
    each = size // count
    return [(address + index * each, each) for index in range(count)]


def clash(written: Sequence[Slot], read: Sequence[Slot]) -> bool:
    """Whether a byte that is written is also read, or belongs to two slots that are written."""
    if len(written) + len(read) < 2:
        return False
    runs = [(address, size, True) for address, size in written if size]
    runs += [(address, size, False) for address, size in read if size]
    runs.sort()
    written_to = read_to = 0
    for address, size, writes in runs:
        if address < written_to or (writes and address < read_to):
            return True
        if writes:
            written_to = address + size
        else:
            read_to = max(read_to, address + size)
    return False


def extent(tensor: torch.Tensor) -> Slot:
    """The memory from the first to the last element of a tensor with any strides; checks it."""
    if tensor.numel() == 0:
        return 0, 0
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    size = (last + 1) * tensor.element_size()
    address, _ = _check_room(tensor, size)
    return address, size


def check_can_hold(tensor: torch.Tensor, operation: str) -> None:
    """Raises Unsupported if elements of an output share memory: it cannot hold the result."""
    if 0 in tensor.shape:
        return
    reach = 0
    dimensions = [(step, n) for step, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1]
    for step, n in sorted(dimensions):
        if step <= reach:
            raise Unsupported(
                f"{operation}: several elements of an output refer to a single memory location "
                f"(shape {list(tensor.shape)}, strides {list(tensor.stride())}), so it cannot "
                "hold the result. Use .clone() first."
            )
        reach += (n - 1) * step


_MADV_POPULATE_READ: Final = 22
_MADV_POPULATE_WRITE: Final = 23
_libc: Final = ctypes.CDLL(None, use_errno=True)


def _check_mapped(tensor: torch.Tensor, address: int, size: int, *, written: bool) -> None:
    """Raises Unsupported if reading or writing the memory would end the process by a fault.

    The kernel touches the pages and reports a fault as an error. Before Linux 5.14, and with memory
    of a device, it cannot do this; then its list of mappings says what is allowed.
    """
    start = address // mmap.PAGESIZE * mmap.PAGESIZE
    advice = _MADV_POPULATE_WRITE if written else _MADV_POPULATE_READ
    if _libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(address + size - start), advice) == 0:
        return
    problem = ctypes.get_errno()
    if problem == errno.EINVAL and is_mapped(start, address + size, "w" if written else "r"):
        return
    use = "written" if written else "read"
    raise Unsupported(
        f"{_described(tensor)}: its memory cannot be {use} ({os.strerror(problem)}). It was lent "
        "to torch, by numpy or as a mapped file. Use .clone() first."
    )


def is_mapped(start: int, end: int, permission: str) -> bool:
    """Whether the whole range has the permission in the kernel's list of mappings."""
    with open("/proc/self/maps") as maps:
        for line in maps:
            place, permissions, *_ = line.split()
            first, last = (int(address, 16) for address in place.split("-"))
            if first <= start < last:
                if permission not in permissions:
                    return False
                start = last
            if start >= end:
                return True
    return False


def _described(tensor: torch.Tensor) -> str:
    kind = type(tensor).__name__
    return f"a {kind} of shape {list(tensor.shape)} and {tensor.dtype}"
