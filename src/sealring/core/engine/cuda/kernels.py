"""Runs the record kernels directly: seal, open, open and reduce, hop. One launch does many records.

The kernels' tests and `python -m sealring.lab gpu` use this module. Collectives launch the same
kernels from native/device/cuda/cuda_device.cpp, for one record or for several in a row.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, Protocol

import torch

from sealring.core.engine.collective import DType, ReduceKind, supported
from sealring.core.engine.cuda import compiler
from sealring.core.engine.cuda.driver import Kernel
from sealring.errors import TamperedRecord, Unsupported
from sealring.limits import HEADER_BYTES, KEY_BYTES, MAX_PAYLOAD_BYTES, TAG_BYTES

RECORD_OVERHEAD: Final = HEADER_BYTES + 2 * TAG_BYTES
CONTEXT_BYTES: Final = 32
_LOG_THREADS: Final = 7
_BLOCK_BYTES: Final = 64
_NOTHING: Final = -1
# The structs of gpu_record.hpp.
_WIRE: Final = struct.Struct("<QQ64s")
_LAUNCH: Final = struct.Struct("<80s80sQQQQ32sIIII")

Reduction = tuple[DType, ReduceKind]


def wire_bytes(payload: int, record_bytes: int) -> int:
    """The size of the wire buffer for the records of `payload` bytes."""
    return payload + record_count(payload, record_bytes) * RECORD_OVERHEAD


def record_count(payload: int, record_bytes: int) -> int:
    return max(1, -(-payload // record_bytes))


def log_turns(record_bytes: int, parts: int) -> int:
    """The base-2 logarithm of how often the threads of a part loop over records of this length."""
    blocks = record_bytes // _BLOCK_BYTES
    turns = -(-blocks // (parts << _LOG_THREADS))
    return max(0, (turns - 1).bit_length())


@dataclass(frozen=True, slots=True)
class Header:
    """The header of a launch's first record (docs/spec.md, section 7). Later records count up."""

    kind: int
    sender: int
    receiver: int
    collective: int
    operation: int
    dtype: int
    reduction: int
    algorithm: int
    message: int
    segment: int
    total: int
    count: int = 0
    root: int = 0
    generation: int = 0
    lane: int = 0

    def packed(self, length: int = 0) -> bytes:
        return struct.pack(
            "<2sBBIQIIIIQBBBBIIIQ",
            b"SR",
            1,
            self.kind,
            length,
            self.count,
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
            self.segment,
            self.root,
            self.total,
        )

    def record(self, number: int) -> Header:
        """The header of record `number` of the launch, without its length."""
        return replace(self, count=self.count + number, segment=self.segment + number)


class DeviceKey:
    """A key in the GPU's memory."""

    def __init__(self, device: torch.device, key: bytes) -> None:
        if len(key) != KEY_BYTES:
            raise ValueError(f"key must have {KEY_BYTES} bytes")
        staged = torch.frombuffer(bytearray(key), dtype=torch.uint8)
        self._words = staged.to(device)
        staged.zero_()

    @property
    def address(self) -> int:
        return self._words.data_ptr()

    def wipe(self) -> None:
        """Overwrites the key. Wait for launches that use it first."""
        self._words.zero_()


class KeyOnGpu(Protocol):
    """A key that a kernel can use: its address in the GPU's memory."""

    @property
    def address(self) -> int: ...


Side = tuple[torch.Tensor, KeyOnGpu, Header]
"""The wire of one direction, its key, and the header of its first record."""


class RecordKernels:
    """The kernels of one GPU, for records of one size under one group context.

    The caller of `seal`, `sealing` and `hop` must never use a (key, count) pair twice: the nonces
    are `header.count` and the following counts, one per record.
    """

    def __init__(
        self,
        device: torch.device,
        context: bytes,
        record_bytes: int,
        *,
        parts: int = 1,
        defines: tuple[tuple[str, int], ...] = (),
    ) -> None:
        if len(context) != CONTEXT_BYTES:
            raise ValueError(f"context must have {CONTEXT_BYTES} bytes")
        if record_bytes % _BLOCK_BYTES or not _BLOCK_BYTES <= record_bytes <= MAX_PAYLOAD_BYTES:
            raise Unsupported(
                f"records of {record_bytes} bytes: the GPU takes multiples of {_BLOCK_BYTES} up to "
                f"{MAX_PAYLOAD_BYTES}"
            )
        self._device = device
        self._context = context
        self._record_bytes = record_bytes
        self._parts = parts
        self._defines = defines
        self._log_turns = log_turns(record_bytes, parts)
        self._failed = torch.full((1,), _NOTHING, dtype=torch.int64, device=device)
        self.kernels: dict[tuple[str, int, int], Kernel] = {}

    def seal(self, plain: torch.Tensor, key: KeyOnGpu, header: Header, wire: torch.Tensor) -> None:
        """Seals the tensor's bytes into `wire`."""
        self.sealing(plain, key, header, wire)()

    def sealing(
        self, plain: torch.Tensor, key: KeyOnGpu, header: Header, wire: torch.Tensor
    ) -> Callable[[], None]:
        """Returns a function that does what `seal` does.

        Call it once, while the tensors exist.
        """
        self._check_wire(wire, plain)
        return self._prepared("seal", None, plain, local=plain, out=(wire, key, header))

    def open(self, wire: torch.Tensor, key: KeyOnGpu, header: Header, result: torch.Tensor) -> None:
        """Writes the records' plaintext into `result`; nothing of a record that is not
        authentic."""
        self._check_wire(wire, result)
        self._prepared("open", None, result, result=result, incoming=(wire, key, header))()

    def open_reduce(
        self,
        wire: torch.Tensor,
        key: DeviceKey,
        header: Header,
        result: torch.Tensor,
        reduction: Reduction,
    ) -> None:
        """Computes `result = result op plaintext`, except for records that are not authentic."""
        self._check_wire(wire, result)
        incoming = (wire, key, header)
        self._prepared(
            "open_reduce", reduction, result, local=result, result=result, incoming=incoming
        )()

    def hop(self, incoming: Side, local: torch.Tensor, out: Side, reduction: Reduction) -> None:
        """Seals `local op plaintext` for the next rank. `local` does not change."""
        self._check_wire(incoming[0], local)
        self._check_wire(out[0], local)
        self._prepared("hop", reduction, local, local=local, incoming=incoming, out=out)()

    def forged(self) -> int | None:
        """Waits for the GPU; returns the count of a record that was not authentic, or None.

        It returns the count, not the index in the launch, because several launches may be under
        way.
        """
        count = int(self._failed.item())
        return None if count == _NOTHING else count

    def check(self) -> None:
        """Waits for the GPU; raises if any record so far was not authentic."""
        count = self.forged()
        if count is not None:
            raise TamperedRecord(
                f"the record with the count {count} is not what its sender sealed: it was changed "
                "on the way. Nothing of it was used."
            )

    def kernel(self, name: str, reduction: Reduction | None = None) -> Kernel:
        """Returns a kernel; the first call for it compiles it."""
        dtype, kind = reduction or (DType.BYTES, ReduceKind.NONE)
        key = (name, int(dtype), int(kind))
        if key not in self.kernels:
            code = compiler.code_for(
                self._device.index or 0, (*definitions(reduction), *self._defines)
            )
            self.kernels[key] = Kernel(code, name)
        return self.kernels[key]

    def _check_wire(self, wire: torch.Tensor, payload: torch.Tensor) -> None:
        need = wire_bytes(payload.nbytes, self._record_bytes)
        if wire.nbytes < need or not wire.is_contiguous() or wire.data_ptr() % 16:
            raise ValueError(f"the wire buffer needs {need} bytes, contiguous, at a multiple of 16")
        if not payload.is_contiguous():
            raise ValueError("the tensor must be contiguous")

    def _prepared(
        self,
        name: str,
        reduction: Reduction | None,
        payload: torch.Tensor,
        *,
        local: torch.Tensor | None = None,
        result: torch.Tensor | None = None,
        incoming: Side | None = None,
        out: Side | None = None,
    ) -> Callable[[], None]:
        argument = _LAUNCH.pack(
            _packed(incoming),
            _packed(out),
            local.data_ptr() if local is not None else 0,
            result.data_ptr() if result is not None else 0,
            payload.nbytes,
            self._failed.data_ptr(),
            self._context,
            self._record_bytes,
            self._log_turns,
            1,
            0,
        )
        blocks = record_count(payload.nbytes, self._record_bytes) * self._parts
        stream = torch.cuda.current_stream(self._device).cuda_stream
        launch = self.kernel(name, reduction).launch
        return partial(launch, blocks, 1 << _LOG_THREADS, self._parts, argument, stream)


def definitions(
    reduction: Reduction | None, *, runs_commands: bool = False
) -> tuple[tuple[str, int], ...]:
    """The macros with which kernels.cu is compiled, for one reduction or for none.

    `runs_commands` is true for the kernels that read commands (commands.hpp).
    """
    command_kernels = ("RUNS_COMMANDS", int(runs_commands))
    if reduction is None:
        return (("REDUCES", 0), command_kernels)
    dtype, kind = reduction
    if not supported(dtype, kind):
        raise Unsupported(f"{kind.name} of {dtype.name} is not defined")
    return (("REDUCES", 1), ("DTYPE", dtype), ("KIND", kind), command_kernels)


def _packed(side: Side | None) -> bytes:
    if side is None:
        return bytes(_WIRE.size)
    wire, key, header = side
    return _WIRE.pack(wire.data_ptr(), key.address, header.packed())
