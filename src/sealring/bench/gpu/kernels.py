"""The GPU's kernels by themselves, on a tensor that no cache holds."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any, Final

from sealring.bench.exchange import Progress
from sealring.bench.kernels import Kernels, Shape
from sealring.bench.measure import Samples
from sealring.bench.place import Place
from sealring.bench.workers import Report, run_workers

SUITE: Final = "ChaCha20-Poly1305"
BYTES: Final = 1 << 30
RECORD_BYTES: Final = 256 << 10
SMALL_BYTES: Final = 4 << 10
OPERATIONS_PER_BLOCK: Final = 960 + 100
"""Of 64 bytes: 320 additions, exclusive-ors and rotations each, and 25 wide multiplications for
each of four blocks of the tag (docs/performance.md)."""
_MATRIX: Final = 8192
_CALLS: Final = 15
_SMALL_CALLS: Final = 300


def measure_kernels(place: Place, progress: Progress | None = None) -> Iterator[Kernels]:
    for _, report in run_workers(1, _worker, place):
        if isinstance(report, list):
            yield Kernels("gpu", 1, tuple(report), place.name)
        elif progress is not None:
            progress(report)


# ---- in the worker


def _worker(rank: int, report: Report, place: Place) -> None:
    device = place.enter(rank, 1)
    measured = []
    calls, check = _calls(device)
    for index, (shape, call) in enumerate(calls):
        measured.append((shape, Samples(tuple(_event_times(call)))))
        report((index + 1) / (len(calls) + 1))
    check()
    measured.append(_launch(device))
    report(measured)


def _calls(
    device: Any,
) -> tuple[list[tuple[Shape, Callable[[], object]]], Callable[[], None]]:
    """Each kernel, and what raises if one of them refused a record: it would have been quick then.

    Where a wire is opened it is read twice, tag first.
    """
    import torch

    from sealring.engine.cuda.kernels import DeviceKey, Header, RecordKernels, wire_bytes
    from sealring.engine.datatypes import DType, ReduceKind

    summing = (DType.FLOAT32, ReduceKind.SUM)
    tensor = torch.randn(BYTES // 4, device=device)
    result = torch.empty_like(tensor)
    kernels = RecordKernels(device, bytes(32), RECORD_BYTES)
    wire = torch.empty(wire_bytes(BYTES, RECORD_BYTES), dtype=torch.uint8, device=device)
    further = torch.empty_like(wire)
    key, other = DeviceKey(device, bytes(range(32))), DeviceKey(device, bytes(range(32, 64)))
    header = Header(1, 0, 1, 1, 1, 3, 1, 1, 0, 0, BYTES)
    one, product = (torch.randn(_MATRIX, _MATRIX, device=device) for _ in range(2))
    kernels.seal(tensor, key, header, wire)  # what those after it open

    cipher, sums = BYTES // 64 * OPERATIONS_PER_BLOCK, BYTES // 4

    def shape(kernel: str, moved: int, operations: int) -> Shape:
        return Shape(kernel, BYTES, RECORD_BYTES, moved * BYTES, operations, SUITE)

    calls: list[tuple[Shape, Callable[[], object]]] = [
        (Shape("copy", BYTES, BYTES, 2 * BYTES, 0), lambda: result.copy_(tensor)),
        (shape("seal", 2, cipher), lambda: kernels.seal(tensor, key, header, wire)),
        (shape("open", 3, cipher), lambda: kernels.open(wire, key, header, result)),
        (
            shape("open_reduce", 4, cipher + sums),
            lambda: kernels.open_reduce(wire, key, header, result, summing),
        ),
        (
            shape("hop", 4, 2 * cipher + sums),
            lambda: kernels.hop((wire, key, header), tensor, (further, other, header), summing),
        ),
        # Last: after it the GPU's clock is lower for a while, because of the power that it takes.
        (
            Shape("matmul", one.nbytes, one.nbytes, 3 * one.nbytes, 2 * _MATRIX**3),
            lambda: torch.mm(one, one, out=product),
        ),
    ]
    return calls, kernels.check


def _launch(device: Any) -> tuple[Shape, Samples]:
    """One small record, from the launch until it is there."""
    import torch

    from sealring.engine.cuda.kernels import DeviceKey, Header, RecordKernels, wire_bytes

    kernels = RecordKernels(device, bytes(32), SMALL_BYTES)
    tensor = torch.randn(SMALL_BYTES // 4, device=device)
    wire = torch.empty(wire_bytes(SMALL_BYTES, SMALL_BYTES), dtype=torch.uint8, device=device)
    key, header = DeviceKey(device, bytes(32)), Header(1, 0, 1, 1, 1, 3, 1, 1, 0, 0, SMALL_BYTES)
    seconds = []
    for _ in range(_SMALL_CALLS):
        launch = kernels.sealing(tensor, key, header, wire)
        torch.cuda.synchronize()
        start = time.perf_counter()
        launch()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    operations = SMALL_BYTES // 64 * OPERATIONS_PER_BLOCK
    return Shape("launch", SMALL_BYTES, SMALL_BYTES, 0, operations, SUITE), Samples(tuple(seconds))


def _event_times(call: Callable[[], object]) -> list[float]:
    """Seconds on the GPU's own clock."""
    for _ in range(3):
        call()
    times = []
    for _ in range(_CALLS):
        start, end = (_timed_event() for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e-3)
    return times


def _timed_event() -> Any:
    import torch

    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
