"""`python -m sealring.lab aead`: the engine's kernels by themselves, on one core and on all.

seal, open   AES-256-GCM in records, as the engine runs it
reduce       the sum of two float32 tensors
copy         from memory to memory: shows the memory bandwidth
matmul       a product of float32 matrices: the arithmetic of a model, for comparison

Each works on tensors that do not fit into a cache, like gradients. The cipher also works on one
record that does, because a record that a peer has just sent is opened from the cache.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from sealring import _native, limits
from sealring.core.engine.collective import DType, ReduceKind
from sealring.lab.bench.harness import Cases, Progress, in_turn, reports_of
from sealring.lab.bench.workers import Report
from sealring.lab.results import KernelCase

if TYPE_CHECKING:
    from sealring.lab.results import Kernel

STREAMED_RECORDS: Final = 132
"""16 MiB of records, more than the caches of most cores."""
MATRIX: Final = 512
OPERATIONS_PER_BLOCK: Final = 15
"""Operations per 16 bytes in AES-256-GCM: 14 rounds, and one multiplication for the tag."""


def kernel_case(
    kernel: Kernel,
    bytes: int,
    record_bytes: int,
    moved_bytes: int,
    operations: int,
    suite: str = "",
    device: str = "cpu",
) -> KernelCase:
    """A case that describes a kernel's call, still without samples."""
    return KernelCase(
        kernel, device, suite, bytes, record_bytes, 1, moved_bytes, operations, run=0, seconds=[]
    )


def measure_kernels(
    processes: int, blocks: int, progress: Progress | None = None
) -> Iterator[Cases]:
    for cases in reports_of(processes, _worker, processes, blocks, progress=progress):
        yield Cases("aead", [replace(case, processes=processes) for case in cases])


# ---- in the workers


def _worker(rank: int, report: Report, processes: int, blocks: int) -> None:
    import torch.distributed as dist

    if processes > 1:
        dist.init_process_group("gloo")  # only to begin together; the kernels do not communicate
    kernels = [*_cipher(STREAMED_RECORDS), *_cipher(1), _reduce(), _copy(), _matmul()]
    calls = {index: call for index, (_, call) in enumerate(kernels)}
    samples = in_turn(calls, report, blocks=blocks, warm_up=2)
    if rank == 0:
        report(
            [
                replace(case, seconds=list(samples[index].seconds))
                for index, (case, _) in enumerate(kernels)
            ]
        )
    if processes > 1:
        dist.barrier()
        dist.destroy_process_group()


Kernel_ = tuple[KernelCase, Callable[[], None]]


def _cipher(records: int) -> list[Kernel_]:
    """Sealing and opening `records` records. A single one is repeated, and stays in the cache."""
    import numpy as np

    record = limits.RECORD_BYTES
    sealed_record = record + limits.TAG_BYTES
    repeats = STREAMED_RECORDS // records
    plain = np.ones(records * record, np.uint8)
    sealed = np.ones(records * sealed_record, np.uint8)
    opened = np.ones(record, np.uint8)
    key = os.urandom(limits.KEY_BYTES)
    sealer = _native.Cipher(os.urandom(limits.KEY_BYTES))
    first = _native.Cipher(key)
    for index in range(records):
        first.seal(
            plain.ctypes.data + index * record, record, sealed.ctypes.data + index * sealed_record
        )
    leaving = np.ones(sealed_record, np.uint8)

    def seal() -> None:
        for _ in range(repeats):
            for index in range(records):
                sealer.seal(plain.ctypes.data + index * record, record, leaving.ctypes.data)

    def open_() -> None:
        for _ in range(repeats):
            opener = _native.Cipher(key)  # begins again with the first record
            for index in range(records):
                good = opener.open(
                    sealed.ctypes.data + index * sealed_record, record, opened.ctypes.data
                )
                if not good:
                    raise RuntimeError("a record that was just sealed does not open")

    total = repeats * records * record
    # One side is as long as the tensor. The other is one record, which stays in the cache.
    moved = total if records > 1 else 0
    operations = total // 16 * OPERATIONS_PER_BLOCK
    return [
        (kernel_case("seal", total, record, moved, operations, limits.SUITE), seal),
        (kernel_case("open", total, record, moved, operations, limits.SUITE), open_),
    ]


def _reduce() -> Kernel_:
    import numpy as np

    total = STREAMED_RECORDS * limits.RECORD_BYTES
    one, other = np.zeros(total // 4, np.float32), np.ones(total // 4, np.float32)

    def reduce() -> None:
        _native.reduce(one.ctypes.data, other.ctypes.data, total, DType.FLOAT32, ReduceKind.SUM)

    return kernel_case("reduce", total, total, 3 * total, total // 4), reduce


def _copy() -> Kernel_:
    import numpy as np

    total = STREAMED_RECORDS * limits.RECORD_BYTES
    one, other = np.zeros(total, np.uint8), np.ones(total, np.uint8)
    return kernel_case("copy", total, total, 2 * total, 0), lambda: np.copyto(one, other)


def _matmul() -> Kernel_:
    import torch

    one, other, into = (torch.ones(MATRIX, MATRIX) for _ in range(3))

    def matmul() -> None:
        torch.mm(one, other, out=into)

    nbytes = one.nbytes
    return kernel_case("matmul", nbytes, nbytes, 3 * nbytes, 2 * MATRIX**3), matmul
