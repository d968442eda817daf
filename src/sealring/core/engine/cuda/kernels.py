"""Seal, open, open and reduce, hop: many records a launch, between tensors and wire buffers.

This is the kernels' own face, which their tests and `python -m sealring.lab gpu` use.
Collectives launch the same kernels from native/device/cuda/cuda_device.cpp, for one record or for a
run of them.
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
    """How much wire the records of `payload` bytes take."""
    return payload + record_count(payload, record_bytes) * RECORD_OVERHEAD


def record_count(payload: int, record_bytes: int) -> int:
    return max(1, -(-payload // record_bytes))


def log_turns(record_bytes: int, parts: int) -> int:
    """How often a part's threads must go round, as a power of two, for records of this length."""
    blocks = record_bytes // _BLOCK_BYTES
    turns = -(-blocks // (parts << _LOG_THREADS))
    return max(0, (turns - 1).bit_length())


@dataclass(frozen=True, slots=True)
class Header:
    """A launch's first record as docs/spec.md, section 7, has it; the others count on from it."""

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
        """The header of the launch's record `number`, all but its length."""
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
    """What kernels need of a key: where the GPU finds it."""

    @property
    def address(self) -> int: ...


Side = tuple[torch.Tensor, KeyOnGpu, Header]
"""The wire of one direction, its key, and the header of its first record."""


class RecordKernels:
    """The kernels of one GPU, for records of one size under one group context.

    Who seals must see to it that no (key, count) comes twice: `header.count` and the following
    ones, one per record, are the nonces.
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
        """The tensor's bytes, sealed into `wire`."""
        self.sealing(plain, key, header, wire)()

    def sealing(
        self, plain: torch.Tensor, key: KeyOnGpu, header: Header, wire: torch.Tensor
    ) -> Callable[[], None]:
        """The same as a call that is ready to be made, once, while its tensors exist."""
        self._check_wire(wire, plain)
        return self._prepared("seal", None, plain, local=plain, out=(wire, key, header))

    def open(self, wire: torch.Tensor, key: KeyOnGpu, header: Header, result: torch.Tensor) -> None:
        """The records' plaintext, into `result`; of a bad record nothing."""
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
        """result = result op plaintext; of a bad record nothing."""
        self._check_wire(wire, result)
        incoming = (wire, key, header)
        self._prepared(
            "open_reduce", reduction, result, local=result, result=result, incoming=incoming
        )()

    def hop(self, incoming: Side, local: torch.Tensor, out: Side, reduction: Reduction) -> None:
        """Seals local op plaintext for the next rank; `local` itself stays as it is."""
        self._check_wire(incoming[0], local)
        self._check_wire(out[0], local)
        self._prepared("hop", reduction, local, local=local, incoming=incoming, out=out)()

    def forged(self) -> int | None:
        """Waits for the GPU. The count of one of the records so far that were not authentic.

        Not its place in the launch: several launches may be under way when this is asked.
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
        """Compiled when first asked for."""
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
    """What kernels.cu is compiled with, for one element type and reduction or for none.

    `runs_commands`: for the kernels that read commands (commands.hpp).
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
