"""Parks tensors: the GPU seals them, pinned host memory keeps them, the GPU opens them again.

A large tensor is copied in parts. While one part is on the bus, the GPU seals the next part or
opens the previous one. So the bus waits only for the cryptography of one part, not of the whole
tensor.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final, NamedTuple

import torch

from sealring import _native
from sealring.core.engine.cuda.kernels import (
    RECORD_OVERHEAD,
    Header,
    RecordKernels,
    record_count,
    wire_bytes,
)
from sealring.core.engine.streams import new_event, new_stream, reached, require_no_capture
from sealring.errors import ConfigurationError, TamperedRecord

RECORD_BYTES: Final = 256 << 10
_ON_WIRE: Final = RECORD_BYTES + RECORD_OVERHEAD
PART_RECORDS: Final = 64
"""Records that are copied together: 16 MiB, the best of 8 to 64 MiB on an H200. The bus waits for
the cryptography of the first and the last part, and smaller parts need more kernel launches."""
_CLUSTER: Final = 4
"""Thread blocks per record, so that few records are enough to occupy the GPU."""
_DATA: Final = 1
"""The record's kind: data (docs/spec.md, section 7)."""


class _Key:
    """One random key in the GPU's memory, which is gone when the process ends."""

    def __init__(self, ordinal: int) -> None:
        self._keys = _native.GpuKeys(ordinal, 1)
        secret = _native.Secret.random(32)
        self._keys.add(secret)
        secret.wipe()

    @property
    def address(self) -> int:
        return self._keys.start

    def use_until(self, *streams: torch.cuda.Stream) -> None:
        """Overwrites the key when these streams have done all their work."""
        for stream in streams:
            self._keys.use_until(stream.cuda_stream)


class Parked:
    """One sealed tensor in host memory. Its memory is reused when this object is deleted."""

    def __init__(self, tensor: torch.Tensor, header: Header, host: torch.Tensor) -> None:
        self.shape, self.strides, self.dtype = tensor.shape, tensor.stride(), tensor.dtype
        self.header = header
        self.host = host
        """The pinned memory, which the worker does not trust. The GPU reads it once."""
        self.used = new_event()
        """Recorded after the last copy from or to the host memory."""
        self.coming: tuple[torch.Tensor, torch.cuda.Event] | None = None

    def room(self, device: torch.device) -> torch.Tensor:
        """Allocates GPU memory for the tensor in the current stream."""
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=device)


class _HostMemory:
    """Pinned memory, kept for the next tensor of the same size."""

    def __init__(self) -> None:
        self._free: dict[int, deque[tuple[torch.Tensor, torch.cuda.Event]]] = {}

    def take(self, size: int) -> torch.Tensor:
        free = self._free.setdefault(size, deque())
        # Without a lock, because a garbage collection during this call may give memory back. What
        # a thread has taken out of the deque belongs to it alone.
        with suppress(IndexError):
            memory, used = free.popleft()
            if reached(used):
                return memory
            free.appendleft((memory, used))
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def give_back(self, memory: torch.Tensor, used: torch.cuda.Event) -> None:
        self._free.setdefault(memory.nbytes, deque()).append((memory, used))


class Counts:
    """Gives out each count only once; threads may share it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tensors = self._records = 0

    def take(self, records: int) -> tuple[int, int]:
        """Returns the tensor's number, from 1, and the count of its first record."""
        with self._lock:
            first = self._records
            self._tensors += 1
            self._records += records
            return self._tensors, first


class Parking:
    """Parks tensors of one GPU. Each object has its own random key in the GPU's memory.

    Threads may share a Parking. Every tensor has its own counts, so no nonce repeats, and an older
    content of the same host memory does not open in place of a newer one.
    """

    def __init__(self, device: torch.device | str) -> None:
        device = torch.device(device)
        if device.type != "cuda":
            raise ConfigurationError(f"tensors are parked from a GPU, and {device} is none")
        ordinal = torch.cuda.current_device() if device.index is None else device.index
        self.device = torch.device("cuda", ordinal)
        with torch.cuda.device(self.device):
            torch.cuda.current_stream()  # creates the CUDA context
            self._key = _Key(ordinal)
            self._kernels = RecordKernels(
                self.device,
                bytes(memoryview(_native.Secret.random(32))),
                RECORD_BYTES,
                parts=_CLUSTER,
            )
            # Copying in and opening have separate streams.
            self._out, self._in, self._opens, self._checks = (
                new_stream(self.device) for _ in range(4)
            )
            torch.cuda.current_stream().synchronize()  # other streams use what was made in it
        self._memory = _HostMemory()
        self._counts = Counts()
        # Sealing ends before the work of `_out`. Copies may be under way when the last reference
        # to this object goes.
        weakref.finalize(self, self._key.use_until, self._out, self._opens)

    def park(self, tensor: torch.Tensor) -> Parked:
        """Seals the tensor as it is at this point of the current stream, and copies it out.

        The tensor may be changed or freed at once.
        """
        require_on(self.device, tensor)
        require_no_capture(self.device, "parking a tensor")
        tensor = dense(tensor.detach())
        plain = memory_of(tensor)
        parked = self.place_for(tensor, wire_bytes(plain.nbytes, RECORD_BYTES))
        # Sealed in the current stream, because later work in it may change the tensor.
        sealed = torch.empty(parked.host.nbytes, dtype=torch.uint8, device=self.device)
        for part in parts_of(plain.nbytes):
            header = parked.header.record(part.first)
            with torch.cuda.device(self.device):  # the caller's current device may be another
                self._kernels.seal(plain[part.plain], self._key, header, sealed[part.sealed])
            self.send(sealed[part.sealed], parked.host[part.sealed])
        return self.sent(parked)

    def prefetch(self, parked: Parked) -> None:
        """Begins to bring the tensor back, while the current stream computes."""
        require_no_capture(self.device, "fetching a parked tensor")
        if parked.coming is not None:
            return
        self._in.wait_event(parked.used)
        tensor = self.bring(parked)
        parked.used.record(self._in)
        opened = new_event()
        opened.record(self._opens)
        parked.coming = tensor, opened

    def fetch(self, parked: Parked) -> torch.Tensor:
        """Returns the authenticated tensor. Raises TamperedRecord if host memory was changed."""
        self.prefetch(parked)
        assert parked.coming is not None
        plain, opened = parked.coming
        parked.coming = None
        # Wait until it is known to be authentic. (The GPU writes nothing of a forged record.)
        opened.synchronize()
        with torch.cuda.stream(self._checks):
            forged = self._kernels.forged()
        if forged is not None:
            raise tampered(forged, parked.header)
        plain.record_stream(torch.cuda.current_stream(self.device))
        return plain

    def header(self, size: int) -> Header:
        """The header of the next tensor; takes as many counts as the tensor has records."""
        number, count = self._counts.take(record_count(size, RECORD_BYTES))
        return Header(
            kind=_DATA, sender=0, receiver=0, collective=number, operation=0, dtype=0,
            reduction=0, algorithm=0, message=0, segment=0, total=size, count=count,
        )  # fmt: skip

    def place_for(self, tensor: torch.Tensor, size: int) -> Parked:
        """Makes a Parked for the tensor with host memory of this size."""
        return Parked(tensor, self.header(tensor.nbytes), self._memory.take(size))

    def send(self, memory: torch.Tensor, host: torch.Tensor) -> None:
        """Copies the memory out, after the current stream's work so far."""
        self._out.wait_stream(torch.cuda.current_stream(self.device))
        memory.record_stream(self._out)
        with torch.cuda.stream(self._out):
            host.copy_(memory, non_blocking=True)

    def sent(self, parked: Parked) -> Parked:
        """Called when all copies of a tensor are queued; returns `parked`."""
        parked.used.record(self._out)
        weakref.finalize(parked, self._memory.give_back, parked.host, parked.used)
        return parked

    def bring(self, parked: Parked) -> torch.Tensor:
        """Queues the copies into the GPU and the opening; returns the tensor."""
        with torch.cuda.stream(self._in):
            came = torch.empty(parked.host.nbytes, dtype=torch.uint8, device=self.device)
        came.record_stream(self._opens)
        with torch.cuda.stream(self._opens):
            tensor = parked.room(self.device)
        plain = memory_of(tensor)
        for part in parts_of(plain.nbytes):
            self.receive(parked.host[part.sealed], came[part.sealed])
            header = parked.header.record(part.first)
            with torch.cuda.stream(self._opens):
                self._kernels.open(came[part.sealed], self._key, header, plain[part.plain])
        return tensor

    def receive(self, host: torch.Tensor, memory: torch.Tensor) -> None:
        """Copies into the memory. Opening waits for the copy; the next copy does not wait."""
        with torch.cuda.stream(self._in):
            memory.copy_(host, non_blocking=True)
        self._opens.wait_stream(self._in)


class Part(NamedTuple):
    """Records of a tensor that are copied together, beginning with record `first`."""

    first: int
    plain: slice
    sealed: slice


def parts_of(size: int) -> Iterator[Part]:
    """Yields the parts of a tensor of `size` bytes; at least one."""
    records, end = record_count(size, RECORD_BYTES), wire_bytes(size, RECORD_BYTES)
    for first in range(0, records, PART_RECORDS):
        last = first + PART_RECORDS
        yield Part(
            first,
            slice(first * RECORD_BYTES, min(last * RECORD_BYTES, size)),
            slice(first * _ON_WIRE, min(last * _ON_WIRE, end)),
        )


def tampered(count: int, header: Header) -> TamperedRecord:
    """The error for a forged record with this count, for the caller that fetches this tensor."""
    place = count - header.count
    which = f"record {place} of this tensor"
    if not 0 <= place < record_count(header.total, RECORD_BYTES):
        which = f"record {count} of all that were parked, one of another tensor,"
    return TamperedRecord(
        f"{which} is not what the GPU has sealed: host memory was changed. Nothing of it was used. "
        "Go on from a checkpoint, with a new Parking"
    )


def require_on(device: torch.device, tensor: torch.Tensor) -> None:
    """Refuses a tensor of another device: kernels get only an address and would read it anyway."""
    if tensor.device != device:
        raise ConfigurationError(
            f"a tensor on {tensor.device} cannot be parked from {device}: park it with a Parking "
            "of its own GPU"
        )


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor with its layout in memory if that has no gaps, else a contiguous copy.

    The layout is kept because another one may make torch choose another kernel, whose result
    differs in the last bits. Lazy conjugation and negation are resolved, as memory does not show
    them.
    """
    tensor = tensor.resolve_conj().resolve_neg()
    return tensor if _has_no_gaps(tensor) else tensor.contiguous()


def _has_no_gaps(tensor: torch.Tensor) -> bool:
    elements = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != elements:
            return False
        elements *= size
    return True


def memory_of(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bytes in the order of its memory."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


# ---- activations that autograd saves for the backward pass


SMALLEST_BYTES: Final = 64 << 10


@contextmanager
def offload_saved_tensors(
    parking: Parking, *, smallest_bytes: int = SMALLEST_BYTES, ahead: int = 4
) -> Iterator[None]:
    """Use it around a forward pass: tensors saved for the backward pass are parked until then.

    The backward pass needs the tensors in about the opposite order, so `ahead` tensors are brought
    back before they are needed. Parameters and tensors below `smallest_bytes` are not parked.
    """
    if ahead < 0:
        raise ConfigurationError("ahead counts tensors: 0 or more")
    order: list[weakref.ref[Parked]] = []
    places: weakref.WeakKeyDictionary[Parked, int] = weakref.WeakKeyDictionary()

    def pack(tensor: torch.Tensor) -> torch.Tensor | Parked:
        stays = (
            tensor.device != parking.device
            or tensor.nbytes < smallest_bytes
            or tensor.layout != torch.strided
            or _is_parameter(tensor)
        )
        if stays:
            return tensor
        parked = parking.park(tensor)
        places[parked] = len(order)
        order.append(weakref.ref(parked))
        return parked

    def unpack(packed: torch.Tensor | Parked) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        at = places[packed]
        parking.prefetch(packed)
        for reference in reversed(order[max(0, at - ahead) : at]):
            if (earlier := reference()) is not None:
                parking.prefetch(earlier)
        return parking.fetch(packed)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield


def _is_parameter(tensor: torch.Tensor) -> bool:
    """Whether it is a parameter or a view of one, which stays in the GPU's memory anyway."""
    base = tensor._base if tensor._is_view() else tensor
    return base is not None and base.is_leaf and base.requires_grad
