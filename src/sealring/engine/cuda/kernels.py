"""Seal, open, open and reduce, hop: records between tensors and wire buffers, all on the GPU.

Keys lie in device memory with the count of their next record beside them; a launch takes its counts
there and moves them on, so no nonce can come twice. Launches that use one key go to one stream.
"""

from __future__ import annotations

import ctypes
import struct
from dataclasses import dataclass
from typing import Final

import torch

from sealring.engine.cuda import compiler
from sealring.engine.cuda.driver import Kernel
from sealring.engine.datatypes import DType, ReduceKind, supported
from sealring.errors import TamperedRecord, Unsupported
from sealring.limits import HEADER_BYTES, KEY_BYTES, MAX_PAYLOAD_BYTES, TAG_BYTES

RECORD_OVERHEAD: Final = HEADER_BYTES + 2 * TAG_BYTES
CONTEXT_BYTES: Final = 32
_THREADS: Final = 128
_PART_BYTES: Final = 64 << 10
_STAGED: Final = _PART_BYTES
# The structs of kernels.cu.
_KEY_SLOT: Final = struct.Struct("<32sQI20x")
_WIRE: Final = struct.Struct("<QQQ64s")
_LAUNCH: Final = struct.Struct("<88s88sQQQQQ32sIIII")


def wire_bytes(payload: int, record_bytes: int) -> int:
    """How much wire the records of `payload` bytes take."""
    return payload + record_count(payload, record_bytes) * RECORD_OVERHEAD


def record_count(payload: int, record_bytes: int) -> int:
    return max(1, -(-payload // record_bytes))


@dataclass(frozen=True, slots=True)
class Header:
    """A launch's records as docs/spec.md, section 7, has them; the GPU adds length and count."""

    kind: int
    sender: int
    receiver: int
    collective: int
    operation: int
    dtype: int
    reduction: int
    algorithm: int
    message: int
    first_segment: int
    total: int
    generation: int = 0
    lane: int = 0

    def packed(self) -> bytes:
        return struct.pack(
            "<2sBBIQIIIIQBBBBIQQ",
            b"SR",
            1,
            self.kind,
            0,
            0,
            self.lane,
            self.generation,
            self.sender,
            self.receiver,
            self.collective,
            self.operation,
            self.dtype,
            self.reduction,
            self.algorithm,
            self.message,
            0,
            self.total,
        )


class DeviceKey:
    """One key on the GPU and the count of its next record."""

    def __init__(self, device: torch.device, key: bytes, count: int = 0) -> None:
        if len(key) != KEY_BYTES:
            raise ValueError(f"key must have {KEY_BYTES} bytes")
        slot = bytearray(_KEY_SLOT.pack(key, count, 0))
        staged = torch.frombuffer(slot, dtype=torch.uint8)
        self._slot = staged.to(device)
        staged.zero_()

    @property
    def address(self) -> int:
        return self._slot.data_ptr()

    def wipe(self) -> None:
        """Overwrites the key. Wait for launches that use it first."""
        self._slot.zero_()


class RecordKernels:
    """The kernels of one GPU, for records of one size under one group context."""

    def __init__(self, device: torch.device, context: bytes, record_bytes: int) -> None:
        if len(context) != CONTEXT_BYTES:
            raise ValueError(f"context must have {CONTEXT_BYTES} bytes")
        if record_bytes % 64 or not 64 <= record_bytes <= MAX_PAYLOAD_BYTES:
            raise Unsupported(
                f"records of {record_bytes} bytes: the GPU takes multiples of 64 up to "
                f"{MAX_PAYLOAD_BYTES}"
            )
        self._device = device
        self._context = context
        self._record_bytes = record_bytes
        self._failed = torch.full((1,), -1, dtype=torch.int64, device=device)
        self._kernels: dict[tuple[str, int, int], Kernel] = {}
        self._launch = (ctypes.c_char * _LAUNCH.size)()
        self._pointer = (ctypes.c_void_p * 1)(ctypes.addressof(self._launch))

    def seal(self, plain: torch.Tensor, key: DeviceKey, header: Header, wire: torch.Tensor) -> None:
        """The tensor's bytes, sealed into `wire`."""
        self._check_wire(wire, plain)
        self._run("seal", None, plain, local=plain, out=(wire, key, header))

    def open(
        self, wire: torch.Tensor, key: DeviceKey, header: Header, result: torch.Tensor
    ) -> None:
        """The records' plaintext, into `result`; of a bad record nothing."""
        self._check_wire(wire, result)
        self._run("open", None, result, result=result, incoming=(wire, key, header))

    def open_reduce(
        self,
        wire: torch.Tensor,
        key: DeviceKey,
        header: Header,
        result: torch.Tensor,
        reduction: tuple[DType, ReduceKind],
        divisor: int = 1,
    ) -> None:
        """result = result op plaintext; for AVG, divided by `divisor` at the end."""
        self._check_wire(wire, result)
        incoming = (wire, key, header)
        self._run(
            "open_reduce",
            reduction,
            result,
            local=result,
            result=result,
            incoming=incoming,
            divisor=divisor,
        )

    def hop(
        self,
        incoming: tuple[torch.Tensor, DeviceKey, Header],
        local: torch.Tensor,
        out: tuple[torch.Tensor, DeviceKey, Header],
        reduction: tuple[DType, ReduceKind],
        divisor: int = 1,
    ) -> None:
        """Seals local op plaintext for the next rank; `local` itself stays as it is."""
        self._check_wire(incoming[0], local)
        self._check_wire(out[0], local)
        self._run("hop", reduction, local, local=local, incoming=incoming, out=out, divisor=divisor)

    def check(self) -> None:
        """Waits for the GPU; raises if any record since the last check was not authentic."""
        record = int(self._failed.item())
        if record != -1:
            raise TamperedRecord(
                f"record {record} of this collective is not what its sender sealed: it was changed "
                "on the way. Nothing of it was used. Make a new group, and look at the path to "
                "that rank"
            )

    def kernel(self, name: str, reduction: tuple[DType, ReduceKind] | None = None) -> Kernel:
        """Compiled when first asked for: ask at group start, not in the middle of training."""
        dtype, kind = reduction or (DType.BYTES, ReduceKind.NONE)
        key = (name, int(dtype), int(kind))
        if key not in self._kernels:
            defines: list[tuple[str, int]] = [("SEALRING_REDUCES", int(reduction is not None))]
            if reduction is not None:
                if not supported(dtype, kind) or kind is ReduceKind.PREMUL_SUM:
                    raise Unsupported(f"{kind.name} of {dtype.name} is not reduced on the GPU")
                defines += [("SEALRING_DTYPE", dtype), ("SEALRING_KIND", kind)]
            code = compiler.code_for(self._device.index or 0, tuple(defines))
            self._kernels[key] = Kernel(code, name, 0 if name == "seal" else _STAGED)
        return self._kernels[key]

    def _check_wire(self, wire: torch.Tensor, payload: torch.Tensor) -> None:
        need = wire_bytes(payload.nbytes, self._record_bytes)
        if wire.nbytes < need or not wire.is_contiguous() or wire.data_ptr() % 16:
            raise ValueError(f"the wire buffer needs {need} bytes, contiguous, at a multiple of 16")
        if not payload.is_contiguous():
            raise ValueError("the tensor must be contiguous")

    def _run(
        self,
        name: str,
        reduction: tuple[DType, ReduceKind] | None,
        payload: torch.Tensor,
        *,
        local: torch.Tensor | None = None,
        result: torch.Tensor | None = None,
        incoming: tuple[torch.Tensor, DeviceKey, Header] | None = None,
        out: tuple[torch.Tensor, DeviceKey, Header] | None = None,
        divisor: int = 1,
    ) -> None:
        records = record_count(payload.nbytes, self._record_bytes)
        parts = -(-min(self._record_bytes, max(64, payload.nbytes)) // _PART_BYTES)
        _LAUNCH.pack_into(
            self._launch,
            0,
            _packed(incoming),
            _packed(out),
            local.data_ptr() if local is not None else 0,
            result.data_ptr() if result is not None else 0,
            payload.nbytes,
            self._failed.data_ptr(),
            0,
            self._context,
            self._record_bytes,
            divisor,
            1,
            0,
        )
        stream = torch.cuda.current_stream(self._device).cuda_stream
        self.kernel(name, reduction).launch(
            records * parts, _THREADS, parts, ctypes.addressof(self._pointer), stream
        )


def _packed(side: tuple[torch.Tensor, DeviceKey, Header] | None) -> bytes:
    if side is None:
        return bytes(_WIRE.size)
    wire, key, header = side
    return _WIRE.pack(wire.data_ptr(), key.address, header.first_segment, header.packed())
