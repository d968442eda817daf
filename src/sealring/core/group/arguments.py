"""Checks torch's tensors and options, and converts them to what the engine takes."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Final

import torch

from sealring.core.engine.collective import DType, ReduceKind, supported, supported_kinds
from sealring.errors import Unsupported

DTYPES: Final = {
    torch.float16: DType.FLOAT16,
    torch.bfloat16: DType.BFLOAT16,
    torch.float32: DType.FLOAT32,
    torch.float64: DType.FLOAT64,
    torch.int8: DType.INT8,
    torch.int16: DType.INT16,
    torch.int32: DType.INT32,
    torch.int64: DType.INT64,
    torch.uint8: DType.UINT8,
    torch.uint16: DType.UINT16,
    torch.uint32: DType.UINT32,
    torch.uint64: DType.UINT64,
    torch.bool: DType.BOOL,
    torch.complex64: DType.COMPLEX64,
    torch.complex128: DType.COMPLEX128,
}

_KINDS: Final = {kind.name: kind for kind in ReduceKind if kind is not ReduceKind.NONE}
"""The reductions by name; torch's ReduceOp uses the same names."""


def one(tensors: list[torch.Tensor], operation: str) -> torch.Tensor:
    """Returns the only tensor of a list. (c10d passes lists, for several GPUs per process.)"""
    if len(tensors) != 1:
        raise Unsupported(f"{operation} takes one tensor per call, not {len(tensors)}")
    return tensors[0]


def check_tensor(tensor: torch.Tensor, operation: str) -> None:
    check_device(tensor, operation)
    if tensor.layout is not torch.strided:
        raise Unsupported(
            f"{operation}: {tensor.layout} tensors are not supported. Use .to_dense() first."
        )
    if tensor.is_nested:
        raise Unsupported(
            f"{operation}: nested tensors are not supported. Pass their .values() instead."
        )
    if tensor.dtype not in DTYPES and tensor.is_quantized:
        raise Unsupported(
            f"{operation}: {tensor.dtype} tensors are not supported, because their scale would "
            "stay behind. Use .dequantize() first, or send .int_repr() and the scale."
        )


def check_device(tensor: torch.Tensor, operation: str) -> None:
    if tensor.device.type not in ("cpu", "cuda"):
        raise Unsupported(
            f"{operation}: the tensor is on {tensor.device}; sealring seals CPU and CUDA tensors. "
            "Move it with .cpu() first."
        )


def check_on_cpu(tensor: torch.Tensor, what: str) -> None:
    if tensor.device.type != "cpu":
        raise Unsupported(
            f"{what} a tensor on {tensor.device}: this version of sealring does that with CPU "
            "tensors alone. Move it with .cpu() first."
        )


def device_of(tensors: Sequence[torch.Tensor], operation: str) -> torch.device:
    """Returns the device of a call's tensors; raises Unsupported if they are on several."""
    devices = {tensor.device for tensor in tensors}
    if len(devices) > 1:
        names = " and ".join(sorted(map(str, devices)))
        raise Unsupported(f"{operation}: all tensors of a call must be on one device, not {names}")
    return devices.pop()


def moved_dtype(tensor: torch.Tensor) -> DType:
    """The dtype that records name. A tensor of any dtype can be moved, if not reduced, as bytes."""
    return DTYPES.get(tensor.dtype, DType.BYTES)


def reduction(op: Any, tensor: torch.Tensor, operation: str) -> tuple[DType, ReduceKind, float]:
    """Returns (dtype, kind, factor) of a reduction; raises Unsupported if it is not defined."""
    red_op = op.op if hasattr(op, "op") else op
    kind = _KINDS.get(red_op.name)
    dtype = DTYPES.get(tensor.dtype)
    if kind is None:
        raise Unsupported(f"{operation}: {red_op} is not a reduction that sealring knows")
    if dtype is None:
        raise Unsupported(f"{operation}: {tensor.dtype} tensors can be moved but not reduced")
    if not supported(dtype, kind):
        allowed = ", ".join(sorted(other.name for other in supported_kinds(dtype)))
        raise Unsupported(
            f"{operation}: {kind.name} is not defined for {tensor.dtype}; it has {allowed}"
        )
    factor = 1.0
    if kind is ReduceKind.PREMUL_SUM:
        factor = float(op.__getstate__()[1])
    return dtype, kind, factor


def contiguous(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor if its memory holds its elements one after the other, else such a copy.

    Lazy conjugation and negation are flags of the tensor and not in its memory, so the copy
    resolves them, too.
    """
    if is_one_run(tensor):
        return tensor
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def is_one_run(tensor: torch.Tensor) -> bool:
    """Whether the tensor's memory holds exactly its elements, one after the other."""
    return tensor.is_contiguous() and not tensor.is_neg() and not tensor.is_conj()


def timeout_seconds(opts: Any, default: timedelta) -> float:
    timeout = getattr(opts, "timeout", None)
    seconds: float = 0.0 if timeout is None else timeout.total_seconds()
    return seconds if seconds > 0 else default.total_seconds()


def message_tag(tag: int) -> int:
    """Returns the tag if it fits: torch's tags are C ints, and a record has 32 bits for a tag."""
    if not 0 <= tag < 1 << 31:
        raise Unsupported(f"a message's tag must be between 0 and {(1 << 31) - 1}, not {tag}")
    return tag
